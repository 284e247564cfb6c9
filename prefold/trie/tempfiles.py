"""Temporary files for data that does not fit in memory.

The files have no names, so nothing stays on disk, even if the process is killed.
"""

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
    """A temporary file without a name.

    The file disappears when nothing refers to this object or when the process ends. Any thread may use it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Create a file in `directory`, by default the system's temporary folder. Raise OSError."""
        self._file: Any = TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115  (closed with this object)
        self._lock = threading.Lock()
        self.end = 0  # byte position at which `append` writes next

    def append(self, parts: Iterable[bytes]) -> tuple[int, int]:
        """Append parts to the file. Return the places of their first byte and of the end. Raise OSError."""
        start, buffer, size = self.end, list[bytes](), 0
        for part in chain(parts, (None,)):
            if size >= _BUFFER or part is None:
                self.write(b"".join(buffer), self.end)
                self.end, buffer, size = self.end + size, [], 0
            if part is not None:
                buffer.append(part)
                size += len(part)
        return start, self.end

    def write(self, data: bytes, place: int) -> None:
        """Write data at a place. Raise OSError."""
        rest = memoryview(data)
        with self._lock:
            self._file.seek(place)
            while rest:
                rest = rest[self._file.write(rest) :]

    def read(self, place: int, size: int) -> bytes:
        """Return `size` bytes from a place; fewer at the end of the file."""
        with self._lock:
            self._file.seek(place)
            return bytes(self._file.read(size))

    def reader(self, place: int, stop: int, buffering: int) -> io.BufferedReader:
        """Return a stream of the bytes place <= byte < stop, which reads `buffering` bytes at a time."""
        return io.BufferedReader(_Part(self, place, stop), buffering)

    def mapped(self) -> mmap:
        """Return the content as mapped memory. The file must have at least one byte."""
        return mmap(self._file.fileno(), 0, access=ACCESS_READ)


class _Part(io.RawIOBase):
    """A raw stream over a part of a TempFile."""

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
    """Blobs, such as images: in memory up to a limit, then on disk, and in memory again if the disk is full.

    A blob stays as long as something refers to it. Any thread may use the store.

    Args:
        memory: The limit in bytes.
        directory: Folder for the temporary file; None for the system's default.
    """

    def __init__(self, memory: int = MEMORY, directory: str | os.PathLike[str] | None = None):
        self._memory, self._directory = memory, directory
        self.used = 0
        self._file: TempFile | None = None
        self.size = 0  # bytes of the file, free places included
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # size -> free places in the file
        # The garbage collector may delete a blob at any time, even in the thread that has the lock. Hence an RLock.
        self._lock = threading.RLock()

    def put(self, data: bytes) -> Blob:
        """Return a blob with this content."""
        try:
            return self._in_memory(data, self._memory) or self._on_disk(data)
        except OSError:  # a full disk or a read-only folder must not fail a request
            blob = self._in_memory(data)
            assert blob is not None
            return blob

    def _in_memory(self, data: bytes, most: float = math.inf) -> Blob | None:
        """Return a blob in memory, or None if the store would then have more than `most` bytes in memory."""
        with self._lock:
            if self.used + len(data) > most:
                return None
            self.used += len(data)
        return Blob(self, data, len(data))

    def _on_disk(self, data: bytes) -> Blob:
        with self._lock:
            if self._file is None:
                self._file = TempFile(self._directory)
            free = self.free[_room(len(data))]
            if free:
                place = free.pop()
            else:
                place, self.size = self.size, self.size + _room(len(data))
        blob = Blob(self, place, len(data))  # created before the write, so that its place is freed if the write fails
        # Write without the lock: a thread that has the file's lock may delete a blob, which waits for this lock.
        self._file.write(data, place)
        return blob

    def read(self, place: int, size: int) -> bytes:
        assert self._file is not None
        return self._file.read(place, size)

    def give_back(self, content: bytes | int, size: int) -> None:
        """Free the memory, or the place in the file, of a blob."""
        with self._lock:
            if isinstance(content, bytes):
                self.used -= size
            else:
                self.free[_room(size)].append(content)


def _room(size: int) -> int:
    """Return the bytes reserved for a blob in the file: a power of two, so that later blobs fit into its place."""
    return 1 << max(12, (size - 1).bit_length())


class Blob:
    """A reference to bytes in a store. The store frees the bytes when the Blob is deleted."""

    __slots__ = ("_content", "_size", "_store")

    def __init__(self, store: BlobStore, content: bytes | int, size: int):
        """Create the reference; `content` is the bytes, or their place in the store's file."""
        self._store, self._content, self._size = store, content, size

    def __del__(self) -> None:
        self._store.give_back(self._content, self._size)

    def read(self) -> bytes:
        """Return the content. Raise OSError."""
        return self._content if isinstance(self._content, bytes) else self._store.read(self._content, self._size)
