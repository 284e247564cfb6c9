"""Bytes of an open file as read-only arrays. No torch."""

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

# Fewer bytes are read, not mapped. A mapping takes as long, and holds a file descriptor (before Python 3.13).
LEAST_MAPPED = 1 << 16


class MappedFile:
    """An open file whose bytes are mapped while an array over them lives. Arrays over the same bytes share a mapping:
    a stack of experts is read matrix by matrix."""

    def __init__(self, path: str | os.PathLike[str]):
        self.file = open(path, "rb")  # noqa: SIM115  # its bytes are read later, whatever the path is then
        weakref.finalize(self, self.file.close)
        self._alive: weakref.WeakValueDictionary[tuple[int, int], NDArray[np.uint8]] = weakref.WeakValueDictionary()

    def bytes(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of the file as a read-only array [size].

        Raises CheckpointError for bytes beyond the end of the file, and MemoryError if the process may not map as many.
        """
        values = self._alive.get((start, size))
        if values is None:
            values = self._alive[start, size] = _mapped(self.file, start, size)
        return values[:]


def _mapped(file: BinaryIO, start: int, size: int) -> NDArray[np.uint8]:
    if start + size > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{file.name} is damaged, or was not copied whole: {start + size:,} bytes are expected")
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
    """The bytes of a file that a tensor is read from. file: of the tensors' owner, which closes it when it goes; None:
    the tensor is in no file"""

    file: BinaryIO | None
    start: int
    size: int

    def read(self, most: int) -> int:
        """Read the bytes, at most so many, and return how many were read."""
        return 0 if self.file is None else len(os.pread(self.file.fileno(), min(most, self.size), self.start))

    def read_ahead(self) -> None:
        """Let the system read the bytes into its cache now. It does so beside the caller, if it knows how to."""
        if self.file is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system without it
                os.posix_fadvise(self.file.fileno(), self.start, self.size, os.POSIX_FADV_WILLNEED)
