"""Files that wait for their use: in memory where there is room, else on disk, and gone with the last who has them."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

from prefold.stream.folder import Shelf


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.file"))


def test_what_does_not_fit_is_on_disk(tmp_path):
    shelf = Shelf(memory=10, directory=tmp_path)
    small, large, last = shelf.put(b"12345"), shelf.put(b"1234567"), shelf.put(b"abcde")
    assert (small.read(), large.read(), last.read()) == (b"12345", b"1234567", b"abcde")
    (file,) = files_in(tmp_path)
    assert file.read_bytes() == b"1234567"
    del small
    assert shelf.put(b"67890").read() == b"67890" and len(files_in(tmp_path)) == 1, "there is room again"
    del large
    assert not files_in(tmp_path)
    large = shelf.put(bytes(11))
    del shelf
    gc.collect()
    assert large.read() == bytes(11), "whoever has a file has its shelf"
    del large, last
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_the_disk_does_not_take_stays_in_memory(tmp_path, monkeypatch):
    shelf = Shelf(memory=2, directory=tmp_path / "none")
    one = shelf.put(b"123")
    assert one.read() == b"123" and not list(tmp_path.iterdir())
    (tmp_path / "none").mkdir()

    def fill(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", fill)
        two = shelf.put(b"45")
    assert two.read() == b"45" and not files_in(tmp_path / "none"), "there is nothing left of it on the disk"
    three = shelf.put(b"6")
    assert three.read() == b"6" and len(files_in(tmp_path / "none")) == 1, "there is room on the disk again"
    del one, two
    four = shelf.put(b"78")
    assert four.read() == b"78" and len(files_in(tmp_path / "none")) == 1, "there is room in memory again"
