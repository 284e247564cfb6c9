"""Holds what does not fit in memory in temporary files without names, so that nothing is left of them on the disk,
however a process ends."""

from __future__ import annotations

import io
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import Any

MEMORY = 64 << 20
_BUFFER = 1 << 20


class TempFile:
    """A TempFile is a temporary file without a name: the system takes its room back when nothing refers to it any more,
    or when its process has ended. Any thread may use it."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Makes a file in `directory`, by default the system's for temporary files. Raises OSError."""
        self._file: Any = TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115  (it is closed with this object)
        self._lock = threading.Lock()
        self.end = 0  # where `append` goes on

    def append(self, parts: Iterable[bytes]) -> tuple[int, int]:
        """Writes parts behind those that were appended before; returns where they begin and end. Raises OSError."""
        start, held, size = self.end, list[bytes](), 0
        for part in chain(parts, (None,)):
            if size >= _BUFFER or part is None:
                self.write(b"".join(held), self.end)
                self.end, held, size = self.end + size, [], 0
            if part is not None:
                held.append(part)
                size += len(part)
        return start, self.end

    def write(self, data: bytes, place: int) -> None:
        """Writes data at a place. Raises OSError."""
        left = memoryview(data)
        with self._lock:
            self._file.seek(place)
            while left:
                left = left[self._file.write(left) :]

    def read(self, place: int, size: int) -> bytes:
        """Returns bytes at a place: `size` of them, or fewer where the file ends."""
        with self._lock:
            self._file.seek(place)
            return bytes(self._file.read(size))

    def reader(self, place: int, stop: int, buffering: int) -> io.BufferedReader:
        """Returns a stream of the bytes place <= byte < stop, read `buffering` bytes at a time."""
        return io.BufferedReader(_Part(self, place, stop), buffering)

    def mapped(self) -> mmap:
        """Returns the content, at least a byte, as memory that is mapped and takes none of its own."""
        return mmap(self._file.fileno(), 0, access=ACCESS_READ)


class _Part(io.RawIOBase):
    """A _Part reads a part of a TempFile."""

    def __init__(self, file: TempFile, place: int, stop: int):
        self._file, self._place, self._stop = file, place, stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._place, min(len(buffer), self._stop - self._place))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class BlobStore:
    """A BlobStore holds blobs that requests will need later, such as images that came within items, as long as
    something refers to them: in memory where there is room, else on disk, and in memory again where the disk takes no
    more. Any thread may use it.

    memory     bytes of blobs that are held in memory as long as there is a disk to hold more
    directory  where the temporary file is made, once there is something to write; None: the system's default
    """

    def __init__(self, memory: int = MEMORY, directory: str | os.PathLike[str] | None = None):
        self._memory, self._directory = memory, directory
        self._held = 0
        self._file: TempFile | None = None
        self._end = 0  # bytes of the file
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # {size: places in the file that are free}
        # A blob may be given up wherever memory is cleared, and so also by the thread that holds the lock.
        self._lock = threading.RLock()

    def put(self, data: bytes) -> Blob:
        """Returns a blob with this content."""
        try:
            return self._in_memory(data, self._memory) or self._on_disk(data)
        except OSError:  # a full disk, or a folder that is not to be written to, is the fault of no request
            blob = self._in_memory(data)
            assert blob is not None
            return blob

    def _in_memory(self, data: bytes, most: float = math.inf) -> Blob | None:
        """Returns a blob in memory; None where the store would then hold more than `most` bytes there."""
        with self._lock:
            if self._held + len(data) > most:
                return None
            self._held += len(data)
        return Blob(self, data, len(data))

    def _on_disk(self, data: bytes) -> Blob:
        with self._lock:
            if self._file is None:
                self._file = TempFile(self._directory)
            free = self._free[_room(len(data))]
            if free:
                place = free.pop()
            else:
                place, self._end = self._end, self._end + _room(len(data))
        blob = Blob(self, place, len(data))  # it gives its place back where it cannot be written
        # Not under the lock: a thread that holds the file's lock may give up a blob, and wait for this one.
        self._file.write(data, place)
        return blob

    def read(self, place: int, size: int) -> bytes:
        assert self._file is not None
        return self._file.read(place, size)

    def give_back(self, content: bytes | int, size: int) -> None:
        """Gives back the memory, or the place in the file, of a blob."""
        with self._lock:
            if isinstance(content, bytes):
                self._held -= size
            else:
                self._free[_room(size)].append(content)


def _room(size: int) -> int:
    """Returns the bytes of the file that a blob takes: a power of two, so that other blobs fit where it was."""
    return 1 << max(12, (size - 1).bit_length())


class Blob:
    """A Blob is a blob in a store. It is gone when nothing refers to it any more."""

    __slots__ = ("_content", "_size", "_store")

    def __init__(self, store: BlobStore, content: bytes | int, size: int):
        """content: the blob's bytes, or its place in the store's file."""
        self._store, self._content, self._size = store, content, size

    def __del__(self) -> None:
        self._store.give_back(self._content, self._size)

    def read(self) -> bytes:
        """Returns the content. Raises OSError."""
        return self._content if isinstance(self._content, bytes) else self._store.read(self._content, self._size)
