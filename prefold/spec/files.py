"""Read side files, write files so that a full or read-only disk leaves no torn file and gives one error, and tell files
apart by their content."""

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
    """Return whether a name is a path that can be read but is no regular file: a named pipe, /dev/stdin, or the
    /dev/fd/N that a shell makes of <(COMMAND)."""
    return os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)


def same_file(a: Path | str, b: Path | str) -> bool:
    """Return whether two paths name one file: the same path, a symbolic link, or a hard link."""
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    try:
        return os.path.samefile(a, b)
    except OSError:  # one of them does not exist
        return False


_piped: dict[str, bytes] = {}  # what was read from pipes, by path: a pipe can be read once


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
    """Return the text of a side file: labels, a template, a schema, tools, TOML, a prompt, documents. Every option that
    names such a file reads it here; see `text_of`."""
    return text_of(read_bytes(path), str(path))


def read_toml(path: Path | str) -> dict[str, object]:
    """Return the values of a TOML file. Raise JobError if the file cannot be read or is not valid TOML."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not valid TOML: {error}; correct that line") from None


def text_of(data: bytes, name: str) -> str:
    """Return the text of UTF-8 bytes without a byte order mark, with lines that end in a line feed.

    Raise JobError for UTF-16, for bytes that are no UTF-8, and for nothing but line ends. name: the file's, for errors
    """
    # Without a byte order mark, the first letter in UTF-16 has a zero byte, and no text file in UTF-8 has one.
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
    """Return an argument of the command line whose UTF-8 the locale, such as POSIX, did not decode."""
    if not argument.isascii():
        with contextlib.suppress(UnicodeError):
            return argument.encode("ascii", "surrogateescape").decode()
    return argument


def read_argument(text: str) -> str:
    """Return the value of an option: for @FILE the text of that file without its last newline. Raise JobError."""
    if not text.startswith("@"):
        return as_utf8(text)
    return read_text(text[1:]).removesuffix("\n")


@contextmanager
def writing(subject: Path | str, state: str = "", remedy: str = "") -> Iterator[None]:
    """Returns a context that turns an OSError into a JobError that says what could not be written.

    state   what is true all the same ("what is written is kept")
    remedy  what to do when there is room, or whatever else it was is mended

    A BrokenPipeError passes: the reader of a pipe has gone, which is no failure of this machine.
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
            message += f": {'make room' if full else 'mend that'} and {remedy}"
        raise JobError(message) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Returns a context with a name beside `path` to write to. At its end the new file takes the place of `path`; after
    an exception it is removed."""
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
    """Returns BLAKE2b, in hex, of the first `size` bytes of a file: of all of them where they are at most `whole`, else
    of so many blocks of 64 KiB at equal distances from the first to the last."""
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
