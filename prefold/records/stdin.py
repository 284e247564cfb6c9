"""Reads standard input, as a source of records or as lines."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ..errors import JobError
from .record import Source
from .textual import LineSource, TableOptions, file_errors


def open_stdin(format: str, stream: Iterable[bytes], options: TableOptions) -> Source:
    """Returns the source of the records in `stream`, which are read once. Raises JobError where that cannot be done."""
    if format == "parquet":
        raise JobError("a Parquet file cannot be read from standard input; give its path")
    lines = lines_of(stream)
    with file_errors("standard input", 0):
        head = next(lines, b"")
        # Tables of two days have one header; their first records tell them apart.
        second = next(lines, b"") if format in ("csv", "tsv") else b""
    if head[:2] == b"\x1f\x8b":
        raise JobError("standard input is gzipped; pipe it through `gzip -dc`")
    identity = {"stdin": hashlib.blake2b(head + second, digest_size=16).hexdigest()}
    taken = False

    @contextmanager
    def opener() -> Iterator[Iterator[bytes]]:
        nonlocal taken
        # A table's header is read when the source is made and again with its records; the lines behind it only once.
        if taken:
            raise JobError("standard input can be read only once; write it to a file, and give the file")
        yield consume()

    def consume() -> Iterator[bytes]:
        nonlocal taken
        yield from filter(None, (head, second))
        taken = True
        yield from lines

    return LineSource.make("-", format, identity, head, opener, options)


def standard_input() -> BinaryIO:
    """Returns standard input as a stream of bytes. Raises JobError where it is closed."""
    if sys.stdin is None:
        raise JobError("standard input is closed; give a file, or pipe something into it")
    return sys.stdin.buffer


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a stream, read from its file descriptor where it has one.

    A thread that waits for input in sys.stdin's own buffer holds a lock which Python takes when the process ends, and
    Python aborts when it cannot take it. A thread that waits in os.read holds no lock.
    """
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        yield from stream
        return
    parts: list[bytes] = []
    while block := os.read(number, 1 << 16):
        first, *others = block.split(b"\n")
        parts.append(first)
        for part in others:
            yield b"".join(parts) + b"\n"
            parts = [part]
    if last := b"".join(parts):
        yield last
