"""Read the files that options name, write files atomically, and digest files.

If a disk is full or read-only, a write raises one clear error and leaves no partial file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import JobError

_BLOCK = 1 << 16


def is_stream(name: str) -> bool:
    """Return whether a path exists but is neither a file nor a folder.

    Examples are a named pipe, /dev/stdin, and the /dev/fd/N that a shell makes for <(COMMAND).
    """
    return os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)


def same_file(a: Path | str, b: Path | str) -> bool:
    """Return whether two paths name the same file, also through a symbolic link or a hard link."""
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    try:
        return os.path.samefile(a, b)
    except OSError:  # one of them does not exist
        return False


_piped: dict[str, bytes] = {}  # content of each pipe by path, because a pipe can be read only once


def read_bytes(path: Path | str) -> bytes:
    """Return a file's bytes. Raise JobError if it cannot be read."""
    name = str(path)
    if name in _piped:
        return _piped[name]
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}; check the path") from None
    if is_stream(name):
        _piped[name] = data
    return data


def read_text(path: Path | str) -> str:
    """Return the text of a file that an option names, such as labels, a template, a schema or TOML; see `text_of`."""
    return text_of(read_bytes(path), str(path))


def read_toml(path: Path | str) -> dict[str, object]:
    """Return the values of a TOML file. Raise JobError if the file cannot be read or is not valid TOML."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not valid TOML: {error}; correct that line") from None


def text_of(data: bytes, name: str) -> str:
    """Decode UTF-8. Remove a byte order mark, and change line ends to "\\n".

    Args:
        name: The file's name, for errors.

    Raises:
        JobError: The bytes are UTF-16, are not UTF-8, or contain only line ends.
    """
    # UTF-16 without a byte order mark: the first ASCII character has a zero byte, which UTF-8 text does not contain.
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[:2].count(0) == 1:
        raise JobError(f"{name} is UTF-16; convert it to UTF-8 first: iconv -f UTF-16 -t UTF-8")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise JobError(f"{name} is not valid UTF-8; re-encode it as UTF-8") from None
    if not text.strip("\n"):
        raise JobError(f"{name} is empty; write the text into it, or leave the option out")
    return text


def as_utf8(argument: str) -> str:
    """Decode a command-line argument whose UTF-8 bytes the locale, such as POSIX, did not decode."""
    if not argument.isascii():
        with contextlib.suppress(UnicodeError):
            return argument.encode("ascii", "surrogateescape").decode()
    return argument


def read_argument(text: str) -> str:
    """Return the value of an option. @FILE means the text of that file, without its last newline. Raise JobError."""
    if not text.startswith("@"):
        return as_utf8(text)
    return read_text(text[1:]).removesuffix("\n")


@contextmanager
def writing(subject: Path | str, state: str = "", remedy: str = "") -> Iterator[None]:
    """Turn an OSError in this context into a JobError about `subject`.

    A BrokenPipeError is not converted: the reader of a pipe has closed it, and this machine did not fail.

    Args:
        subject: The file or stream that is written.
        state: What remains valid after the error, such as "written lines are kept".
        remedy: What to do after the cause is removed.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"cannot write {subject}: {error.strerror or error}"
        if state:
            message += f"; {state}"
        if remedy:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            message += f": {'free disk space' if full else 'fix that'} and {remedy}"
        raise JobError(message) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. On success the new file replaces `path`; after an exception it is deleted."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sampled_digest(path: Path, size: int, blocks: int, whole: int) -> str:
    """Return a BLAKE2b hex digest of the first `size` bytes of a file.

    If `size` is more than `whole`, digest only `blocks` blocks of 64 KiB, evenly spaced from the first to the last.
    """
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= whole:
            remaining = size
            while block := file.read(min(remaining, 1 << 20)):
                digest.update(block)
                remaining -= len(block)
        else:
            for i in range(blocks):
                file.seek((size - _BLOCK) * i // (blocks - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
