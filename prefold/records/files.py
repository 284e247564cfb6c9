"""Reads several files as one input: names, patterns and folders stand for files, whose records are numbered on."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, JobError
from .record import Record, Source
from .source import SUFFIXES, open_source
from .textual import TableOptions


def open_sources(
    names: Sequence[str],
    format: str | None = None,
    options: TableOptions | None = None,
    *,
    stdin: Iterable[bytes] | None = None,
) -> Source:
    """Returns the source of the records of all these files, patterns ("data/*.jsonl") and folders, in this order.

    format   see `open_source`; it holds for all files
    stdin    lines to read in place of standard input, which the name "-" stands for

    Raises JobError when one of the files cannot be opened, or when they are not all of one format.
    """
    files = expand_names(names)
    if len(files) == 1:
        return open_source(files[0], format, options, stdin=stdin)
    if "-" in files:
        raise JobError("standard input goes with no other input; give files only")
    sources = [open_source(name, format, options) for name in files]
    other = next((source for source in sources if source.format != sources[0].format), None)
    if other is not None:
        raise JobError(
            f"{sources[0].name} is {sources[0].format} and {other.name} is {other.format}; give files of one format"
        )
    return _Files(sources)


def expand_names(names: Sequence[str]) -> list[str]:
    """Returns the files that the names stand for: a file itself, those that match a pattern, those in a folder.

    The files of a pattern or folder are sorted. Of a folder and its subfolders those files are taken whose name ends in
    a known format, but none whose name, or whose folder's name, begins with "." or "_". Raises JobError for a pattern
    that matches nothing, and for a folder without such a file.
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
    """Returns whether a name ends as an input file's does, or is that of a folder with such files."""
    path = Path(name)
    if not name or len(name) > 4096 or "\0" in name:  # Path("") is the folder one is in
        return False
    if _has_suffix(path):
        return True
    # Path.is_dir raises OSError for a text that is too long for a name, before Python 3.13.
    return os.path.isdir(path) and any(file.is_file() and _is_input(file, path) for file in path.rglob("*"))


def _is_input(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return not hidden and _has_suffix(file)


def _has_suffix(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return bool(suffixes) and (suffixes[-1] in SUFFIXES or (suffixes[-1] == ".gz" and bool({*suffixes} & {*SUFFIXES})))


class _Files(Source):
    """Reads the records of several sources of one format, numbered on from one to the next."""

    def __init__(self, sources: list[Source]):
        known = [source.columns for source in sources]
        columns = None if None in known else list(dict.fromkeys(name for names in known for name in names or ()))
        name = f"{sources[0].name} and {len(sources) - 1} more"
        super().__init__(name, sources[0].format, {"files": [source.identity for source in sources]}, columns)
        self._sources = sources
        self.paths = tuple(path for source in sources for path in source.paths)
        self.types = self._common_types()

    def _common_types(self) -> dict[str, Any]:
        """Returns the type of each column that has the same type in all files that have the column."""
        by_name: dict[str, list[Any]] = {}
        for source in self._sources:
            for name, type in source.types.items():
                by_name.setdefault(name, []).append(type)
        return {name: types[0] for name, types in by_name.items() if all(type == types[0] for type in types)}

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
