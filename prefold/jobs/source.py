"""Open the inputs of a job: JSONL, CSV, TSV and Parquet files, plain or gzipped, and pipes.

Names, patterns and folders stand for files. Several files are one input with consecutive record numbers. A source is
read as a stream and is never in memory as a whole. An invalid record has an error (`Record.error`), and the following
records are still read. A damaged file (a truncated gzip stream, an unreadable Parquet footer) is a JobError.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, JobError
from ..spec.files import is_stream, sampled_digest
from .formats import LineSource, ParquetSource, TableOptions, delimiter_of, file_errors
from .record import FORMATS, Record, Source

# The digest covers a whole file of up to _WHOLE_DIGEST bytes. For a larger file it covers _DIGEST_BLOCKS blocks, evenly
# spread. The identity then also has the modification time, because an edit may lie between the blocks. Reading all of a
# file of 100 GB would take minutes before the job starts, even with --limit.
_WHOLE_DIGEST = 256 << 20
_DIGEST_BLOCKS = 512


def file_identity(path: Path, size: int | None = None) -> dict[str, Any]:
    """Return the identity of a file's content, or of its first `size` bytes.

    The identity is {"bytes": size, "digest": BLAKE2b in hex}.
    """
    size = path.stat().st_size if size is None else size
    return {"bytes": size, "digest": sampled_digest(path, size, _DIGEST_BLOCKS, _WHOLE_DIGEST)}


def input_identity(path: Path) -> dict[str, Any]:
    """Return the identity of an input file's content.

    If the file is too large for a digest of the whole, add {"modified": its modification time as text}.
    """
    facts = path.stat()
    identity = file_identity(path, facts.st_size)
    if facts.st_size > _WHOLE_DIGEST:
        identity["modified"] = datetime.fromtimestamp(facts.st_mtime, UTC).isoformat()
    return identity


def content_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a file without its modification time."""
    return {name: value for name, value in identity.items() if name != "modified"}


def as_noted(identity: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return an identity in the form of `before`, an identity from a journal.

    Journals of earlier versions have no modification time. Then it is left out here, unless the content has changed.
    """
    if "files" in identity:
        then, now = before.get("files", [before]), identity["files"]
        return {"files": [as_noted(*pair) for pair in zip(now, then, strict=False)] + now[len(then) :]}
    content = content_of(identity)
    return content if content == before else identity


def is_gzip(path: Path) -> bool:
    """Return whether a file starts with gzip's magic number."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def check_grown(source: Source, before: dict[str, Any]) -> None:
    """Raise JobError unless the input starts with the whole input that had the identity `before`.

    The last file of that input may be longer now, if its records are lines. Further files may follow it. So the old
    records keep their numbers.
    """
    if not source.paths:
        raise JobError("--grown needs files: standard input may have changed in other ways")
    then, now = (identity.get("files", [identity]) for identity in (before, as_noted(source.identity, before)))
    for place, old in enumerate(then):
        if place < len(now) and now[place] == old:
            continue
        if place < len(now) and content_of(now[place]) == content_of(old):
            path, was = source.paths[place], old["modified"]
            raise JobError(
                f"{path} was modified after the last run (at {now[place]['modified']}, before: {was}). Its size and "
                "the blocks in its digest are unchanged, but other parts may have changed, so --grown cannot continue. "
                f"If you know that the file is unchanged, restore its time (touch -d {was} {shlex.quote(str(path))}); "
                "else --overwrite starts the job again, -o NAME writes to another file"
            )
        if place == len(then) - 1 and place < len(now) and source.format != "parquet":
            _check_longer(source.paths[place], old, now[place])
            continue
        raise _other(source.name)


def _other(name: Path | str) -> JobError:
    return JobError(
        f"{name} does not start with its content of the last run, so --grown cannot continue; "
        "--overwrite starts the job again, -o NAME writes to another file"
    )


def _check_longer(path: Path, old: dict[str, Any], now: dict[str, Any]) -> None:
    size, digest = old.get("bytes"), old.get("digest")
    if not isinstance(size, int) or size >= now["bytes"] or file_identity(path, size)["digest"] != digest:
        raise _other(path)
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        last, new = file.read(1), file.read(2)
    if size and not (new == b"\x1f\x8b" if is_gzip(path) else last == b"\n" or new[:1] in b"\r\n"):
        raise JobError(
            f"the last record of {path} has become longer: it had no line end in the last run; "
            "--overwrite starts the job again"
        )


SUFFIXES = {".ndjson": "jsonl", ".json": "jsonl"} | {f".{format}": format for format in FORMATS}
_BUFFER = 1 << 16


def open_source(
    name: str, format: str | None = None, options: TableOptions | None = None, *, stdin: Iterable[bytes] | None = None
) -> Source:
    """Return the source of the records in `name`, a path, or "-" for standard input.

    A path that is not a regular file, such as a pipe, is read like standard input. Raise JobError if the file does not
    exist, its format is unknown, or its header is wrong.

    Args:
        name: A path, or "-".
        format: One of FORMATS; None: the format of the path's suffix, and JSONL for a stream.
        options: How CSV and TSV are read.
        stdin: Lines to read instead of standard input, or instead of the pipe `name`.
    """
    options = options or TableOptions()
    if format is not None and format not in FORMATS:
        raise JobError(f"the input format {format!r} is not known; use one of {', '.join(FORMATS)}")
    path = Path(name)
    if name == "-" or is_stream(name):
        stream = open_stream(name) if stdin is None else stdin
        return _stream_source(name, format or _suffix_format(path) or "jsonl", stream, options)
    if not path.exists():
        raise JobError(f"there is no input file {name}; check the path")
    if not path.is_file():
        raise JobError(f"the input {name} is a folder; name the files in it")
    format = format or _format_of(path)
    delimiter_of(format, options.delimiter)
    identity = input_identity(path)
    if format == "parquet":
        source: Source = ParquetSource(name, path, identity)
        source.paths = (path,)
        return source
    zipped = is_gzip(path)

    def opener() -> Any:
        return _opened(path, identity["bytes"], zipped)

    with file_errors(name, 0), opener() as file:
        head = file.readline()
    source = LineSource.make(name, format, identity, head, opener, options)
    source.paths = (path,)
    return source


@contextmanager
def _opened(path: Path, size: int, zipped: bool) -> Iterator[Any]:
    """Open the first `size` bytes of a file for reading, and decompress gzip.

    A file that grows meanwhile is read up to the size in its identity. Whatever follows, such as half a line, belongs
    to the job's next run.
    """
    with io.BufferedReader(_FileHead(path, size), _BUFFER) as file:
        if not zipped:
            yield file
            return
        with gzip.open(file) as unzipped:
            yield unzipped


class _FileHead(io.RawIOBase):
    """The first `size` bytes of a file."""

    def __init__(self, path: Path, size: int):
        self._file = path.open("rb", buffering=0)
        self._bytes_left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._file.readinto(memoryview(buffer)[: self._bytes_left]) or 0
        self._bytes_left -= read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


def _format_of(path: Path) -> str:
    format = _suffix_format(path)
    if format is None:
        raise JobError(f"cannot tell the format of {path.name} from its name; add --format ({', '.join(FORMATS)})")
    return format


def _suffix_format(path: Path) -> str | None:
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _stream_source(name: str, format: str, stream: Iterable[bytes], options: TableOptions) -> Source:
    """Return the source of the records in a stream, which can only be read once.

    Raise JobError for a format that cannot be read from a stream.

    Args:
        name: "-", or the path of a pipe.
    """
    subject = "standard input" if name == "-" else name
    if format == "parquet":
        raise JobError(f"a Parquet file cannot be read from {subject}; give the path of the file")
    lines = lines_of(stream)
    with file_errors(subject, 0):
        head = next(lines, b"")
        # Different tables may have equal headers, so the identity includes the first record.
        second = next(lines, b"") if format in ("csv", "tsv") else b""
    if head[:2] == b"\x1f\x8b":
        raise JobError(f"{subject} is gzipped; pipe it through `gzip -dc`")
    identity = {"stdin": hashlib.blake2b(head + second, digest_size=16).hexdigest()}
    is_consumed = False

    @contextmanager
    def opener() -> Iterator[Iterator[bytes]]:
        nonlocal is_consumed
        # A table's header is read twice: when the source is made, and with the records. All other lines are read once.
        if is_consumed:
            raise JobError(f"{subject} can only be read once; write it to a file, and give the file")
        yield consume()

    def consume() -> Iterator[bytes]:
        nonlocal is_consumed
        yield from filter(None, (head, second))
        is_consumed = True
        yield from lines

    return LineSource.make(name, format, identity, head, opener, options)


def open_stream(name: str) -> BinaryIO:
    """Return a pipe, or for "-" standard input, as a stream of bytes. Raise JobError if it cannot be read."""
    if name != "-":
        try:
            return open(name, "rb")
        except OSError as error:
            raise JobError(f"cannot read {name}: {error.strerror}; check the path") from None
    if sys.stdin is None:
        raise JobError("standard input is closed; give a file, or pipe something into it")
    return sys.stdin.buffer


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, read from its file descriptor if it has one.

    A thread that waits inside sys.stdin's buffer holds a lock. Python takes this lock when the process ends, and aborts
    if it cannot. A thread that waits in os.read holds no lock.
    """
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        yield from stream
        return
    parts: list[bytes] = []
    while block := os.read(number, 1 << 16):
        first, *lines = block.split(b"\n")
        parts.append(first)
        for part in lines:
            yield b"".join(parts) + b"\n"
            parts = [part]
    if last := b"".join(parts):
        yield last


def open_sources(
    names: Sequence[str],
    format: str | None = None,
    options: TableOptions | None = None,
    *,
    stdin: Iterable[bytes] | None = None,
) -> Source:
    """Return the source of the records of files, patterns ("data/*.jsonl") and folders, in this order.

    Raise JobError if a file cannot be opened, or if the files have different formats.

    Args:
        names: Paths, patterns, folders, or "-" for standard input.
        format: As in `open_source`, for all files.
        options: How CSV and TSV are read.
        stdin: Lines to read instead of standard input.
    """
    files = expand_names(names)
    if len(files) == 1:
        return open_source(files[0], format, options, stdin=stdin)
    for name in files:
        if name == "-" or is_stream(name):
            subject = "standard input" if name == "-" else f"the pipe {name}"
            raise JobError(f"{subject} cannot be combined with other inputs; give files only")
    sources = [open_source(name, format, options) for name in files]
    second = next((source for source in sources if source.format != sources[0].format), None)
    if second is not None:
        raise JobError(
            f"{sources[0].name} is {sources[0].format} and {second.name} is {second.format}; give files of one format"
        )
    return _Files(sources)


def expand_names(names: Sequence[str]) -> list[str]:
    """Return the files that names stand for: a file, the matches of a pattern, the input files of a folder.

    The files of a pattern or folder are sorted. A folder stands for the files in it and in its subfolders that end in a
    known format. Files and folders whose names start with "." or "_" are skipped. Raise JobError for a pattern without
    a match, and for a folder without such a file.
    """
    out: list[str] = []
    for name in names:
        path = Path(name)
        if name != "-" and path.is_dir():
            files = [str(file) for file in path.rglob("*") if file.is_file() and _is_input(file, path)]
            nothing = f"the folder {name} holds no file that ends in {', '.join(SUFFIXES)}"
        elif name != "-" and glob.has_magic(name) and not path.exists():
            files = [file for file in glob.glob(name, recursive=True) if Path(file).is_file()]
            nothing = f"no file matches {name}"
        else:
            out.append(name)
            continue
        if not files:
            raise JobError(nothing)
        out += sorted(files)
    return out


def holds_records(name: str) -> bool:
    """Return whether a name ends like an input file, or is a folder with input files."""
    path = Path(name)
    if not name or len(name) > 4096 or "\0" in name:  # Path("") is the current folder
        return False
    if _has_suffix(path):
        return True
    # Before Python 3.13, Path.is_dir raises OSError for a text that is too long for a file name.
    return os.path.isdir(path) and any(file.is_file() and _is_input(file, path) for file in path.rglob("*"))


def _is_input(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return not hidden and _has_suffix(file)


def _has_suffix(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return bool(suffixes) and (suffixes[-1] in SUFFIXES or (suffixes[-1] == ".gz" and bool({*suffixes} & {*SUFFIXES})))


class _Files(Source):
    """The records of several sources of one format, with consecutive numbers."""

    def __init__(self, sources: list[Source]):
        headers = [source.columns for source in sources]
        columns = None if None in headers else list(dict.fromkeys(name for names in headers for name in names or ()))
        name = f"{sources[0].name} and {len(sources) - 1} more"
        super().__init__(name, sources[0].format, {"files": [source.identity for source in sources]}, columns)
        self._sources = sources
        self.paths = tuple(path for source in sources for path in source.paths)
        by_name: dict[str, list[Any]] = {}
        for source in sources:
            for column, type in source.types.items():
                by_name.setdefault(column, []).append(type)
        # A column has a type only if all files that have the column agree on it.
        self.types = {column: types[0] for column, types in by_name.items() if all(t == types[0] for t in types)}

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        before = 0
        for source in self._sources:
            number = 0
            for record in source.records(columns):
                number, error = record.number, record.error
                if error is not None:
                    message = f"{source.name}: {error.message}"
                    error = InputError(message, field=error.field, remedy=error.remedy, code=error.code)
                yield Record(before + number, record.data, error, record.size)
            before += number

    def peek(self) -> dict[str, Any] | None:
        return next((data for source in self._sources if (data := source.peek()) is not None), None)
