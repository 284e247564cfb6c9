"""Keeps data that does not fit in memory in temporary files without names, of which nothing stays on disk however a
process ends."""

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
    """A TempFile is a temporary file without a name: it vanishes when nothing refers to it any more, or its process
    ends. Any thread may use it."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Makes a file in `directory`, by default the system's for temporary files. Raises OSError."""
        self._file: Any = TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115  (it is closed with this object)
        self._lock = threading.Lock()
        self.end = 0  # where `append` goes on

    def append(self, parts: Iterable[bytes]) -> tuple[int, int]:
        """Appends parts to the file, and returns where they begin and end. Raises OSError."""
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
        """Writes data at a place. Raises OSError."""
        rest = memoryview(data)
        with self._lock:
            self._file.seek(place)
            while rest:
                rest = rest[self._file.write(rest) :]

    def read(self, place: int, size: int) -> bytes:
        """Returns bytes at a place: `size` of them, or fewer where the file ends."""
        with self._lock:
            self._file.seek(place)
            return bytes(self._file.read(size))

    def reader(self, place: int, stop: int, buffering: int) -> io.BufferedReader:
        """Returns a stream of the bytes place <= byte < stop, read `buffering` bytes at a time."""
        return io.BufferedReader(_Part(self, place, stop), buffering)

    def mapped(self) -> mmap:
        """Returns the content, at least a byte, as mapped memory."""
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
    """A BlobStore holds blobs, such as images of items, as long as something refers to them: in memory up to a limit,
    then on disk, and in memory again if the disk is full. Any thread may use it.

    memory     the limit, in bytes
    directory  of the temporary file; None: the system's default
    """

    def __init__(self, memory: int = MEMORY, directory: str | os.PathLike[str] | None = None):
        self._memory, self._directory = memory, directory
        self.used = 0
        self._file: TempFile | None = None
        self.size = 0  # bytes of the file
        self.free: defaultdict[int, list[int]] = defaultdict(list)  # {size: places in the file that are free}
        # The garbage collector may delete a blob at any time, and so also in the thread that holds the lock.
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
        """Returns a blob in memory; None if the store would then have more than `most` bytes there."""
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
        blob = Blob(self, place, len(data))  # which gives its place back if writing fails
        # Not under the lock: a thread that holds the file's lock may delete a blob, and wait for this lock.
        self._file.write(data, place)
        return blob

    def read(self, place: int, size: int) -> bytes:
        assert self._file is not None
        return self._file.read(place, size)

    def give_back(self, content: bytes | int, size: int) -> None:
        """Frees the memory, or the place in the file, of a blob."""
        with self._lock:
            if isinstance(content, bytes):
                self.used -= size
            else:
                self.free[_room(size)].append(content)


def _room(size: int) -> int:
    """Returns the bytes that a blob takes in the file: a power of two, so that other blobs fit into its place later."""
    return 1 << max(12, (size - 1).bit_length())


class Blob:
    """A Blob refers to bytes in a store, which frees them when nothing refers to the Blob any more."""

    __slots__ = ("_content", "_size", "_store")

    def __init__(self, store: BlobStore, content: bytes | int, size: int):
        """content: the blob's bytes, or its place in the store's file."""
        self._store, self._content, self._size = store, content, size

    def __del__(self) -> None:
        self._store.give_back(self._content, self._size)

    def read(self) -> bytes:
        """Returns the content. Raises OSError."""
        return self._content if isinstance(self._content, bytes) else self._store.read(self._content, self._size)
