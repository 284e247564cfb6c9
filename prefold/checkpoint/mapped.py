"""Bytes of an open file as read-only arrays. Imports no torch."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

# Fewer bytes are read, not mapped: mapping is not faster, and uses a file descriptor (before Python 3.13).
LEAST_MAPPED = 1 << 16


class MappedFile:
    """An open file; its bytes are mapped while an array over them exists.

    Arrays over the same bytes share a mapping, because a stack of experts is read one matrix at a time.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.file = open(path, "rb")  # noqa: SIM115  # stays open: bytes are read later, even if the path changes
        weakref.finalize(self, self.file.close)
        self._alive: weakref.WeakValueDictionary[tuple[int, int], NDArray[np.uint8]] = weakref.WeakValueDictionary()

    def bytes(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of the file as a read-only array [size].

        Raise CheckpointError beyond the end of the file, and MemoryError if the process may not map that many bytes.
        """
        values = self._alive.get((start, size))
        if values is None:
            values = self._alive[start, size] = _mapped(self.file, start, size)
        return values[:]


def _mapped(file: BinaryIO, start: int, size: int) -> NDArray[np.uint8]:
    if start + size > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{file.name} is damaged or incomplete: {start + size:,} bytes are expected")
    if size < LEAST_MAPPED:
        return np.frombuffer(os.pread(file.fileno(), size, start), np.uint8)
    before = start % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_READ, offset=start - before)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size / 1e9:.2f} GB of {file.name} cannot be mapped") from error
    return np.frombuffer(mapping, np.uint8, size, before)


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a file with a tensor."""

    file: BinaryIO | None  # the owner of the tensors closes it; None: the tensor is not in a file
    start: int
    size: int

    def read(self, most: int) -> int:
        """Read at most `most` of the bytes, and return how many were read."""
        return 0 if self.file is None else len(os.pread(self.file.fileno(), min(most, self.size), self.start))

    def read_ahead(self) -> None:
        """Ask the operating system to read the bytes into its cache, if it supports that. Does not wait."""
        if self.file is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # some file systems do not support it
                os.posix_fadvise(self.file.fileno(), self.start, self.size, os.POSIX_FADV_WILLNEED)
