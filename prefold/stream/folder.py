"""Makes the temporary folders of spools, and removes those whose process was killed before it could do so itself.

A folder's owner keeps a lock on the file `lock` in it, which the system lets go of when the owner ends in whatever way.
The file gets its name only once it is locked, and is the last one to be removed. Where locks are not to be had, folders
have no such file, and a folder without one is never touched by others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
