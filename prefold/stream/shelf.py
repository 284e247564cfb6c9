"""The shelf holds files that requests will need later, such as images that came within items, in bounded memory."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path

from .folder import SpoolFolder

MEMORY = 64 << 20


class Shelf:
    """A Shelf holds files as long as somebody has them: in memory where there is room, else on disk, and in memory
    again where the disk takes no more. Any thread may use it.

    memory     bytes of files that are held in memory as long as there is a disk to hold more
    directory  where the temporary folder is made, once there is something to write; None: the system's default
    """

    def __init__(self, memory: int = MEMORY, directory: str | os.PathLike[str] | None = None):
        self._memory, self._directory = memory, directory
        self._held = 0
        self._folder: SpoolFolder | None = None
        self._numbers = count()
        # A file may be given up wherever memory is cleared, and so also by who holds the lock.
        self._lock = threading.RLock()

    def put(self, data: bytes) -> Shelved:
        """Returns a file with this content."""
        with self._lock:
            if self._held + len(data) <= self._memory:
                self._held += len(data)
                return Shelved(self, data)
        try:
            return self._on_disk(data)
        except OSError:  # a full disk, or a folder that is not to be written to, is the fault of no request
            with self._lock:
                self._held += len(data)
            return Shelved(self, data)

    def _on_disk(self, data: bytes) -> Shelved:
        with self._lock:
            if self._folder is None:
                self._folder = SpoolFolder(self._directory)
                weakref.finalize(self, self._folder.close)
            found = Shelved(self, self._folder.path / f"{next(self._numbers)}.file")
        found.write(data)
        return found

    def give_back(self, size: int) -> None:
        """Gives back the memory of a file."""
        with self._lock:
            self._held -= size


class Shelved:
    """A Shelved is a file on a shelf. It is gone when nobody has it any more.

    content  the file's, or where it lies on disk
    """

    __slots__ = ("_content", "_shelf")

    def __init__(self, shelf: Shelf, content: bytes | Path):
        self._shelf, self._content = shelf, content

    def __del__(self) -> None:
        if isinstance(self._content, bytes):
            self._shelf.give_back(len(self._content))
        else:
            with suppress(OSError):
                self._content.unlink()

    def write(self, data: bytes) -> None:
        """Writes the content of a file that lies on disk. Raises OSError."""
        assert isinstance(self._content, Path)
        self._content.write_bytes(data)

    def read(self) -> bytes:
        """Returns the content. Raises OSError."""
        return self._content if isinstance(self._content, bytes) else self._content.read_bytes()
