"""Makes temporary folders of spools and of files that requests need later, and removes those of killed processes.

A folder's owner keeps a lock on the file `lock` in it, which the system lets go of when the owner ends in whatever way.
The file gets its name only once it is locked, and is the last one to be removed. Where locks are not to be had, folders
have no such file, and a folder without one is never touched by others.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

PREFIX = "prefold-spool-"
LOCK = "lock"


class SpoolFolder:
    """A SpoolFolder is a temporary folder that is removed by `close`, or when its process has died, by the next one.

    path  where it is
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Makes a folder in `directory`, by default the system's for temporary files. Raises OSError."""
        parent = Path(gettempdir() if directory is None else directory)
        with suppress(OSError):
            _sweep(parent)
        self._folder = TemporaryDirectory(prefix=PREFIX, dir=parent)
        self.path = Path(self._folder.name)
        self._lock = _make_lock(self.path)

    def close(self) -> None:
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_lock(folder: Path) -> int | None:
    """Returns the descriptor of the folder's lock; None where the system has no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    new = folder / f"{LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / LOCK)
    except OSError:
        os.close(descriptor)
        new.unlink()
        return None
    return descriptor


def _sweep(parent: Path) -> None:
    """Removes this user's folders whose owner has died."""
    try:
        import fcntl
    except ImportError:
        return
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        # Each file is opened by descriptors of its folder, and never through a symbolic link.
        with suppress(OSError), _opened(parent / name, os.O_DIRECTORY) as folder:
            with _opened(LOCK, os.O_NONBLOCK, folder) as lock:
                mine = all(os.fstat(one).st_uid == os.getuid() for one in (folder, lock))
                if not mine or not stat.S_ISREG(os.fstat(lock).st_mode):
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for file in sorted(os.listdir(folder), key=LOCK.__eq__):
                    os.unlink(file, dir_fd=folder)
            os.rmdir(parent / name)


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
