"""Blobs that wait for their use: in memory where there is room, else on disk, and gone with the last reference."""

from __future__ import annotations

import errno
import os

from prefold.stream.tempfiles import Shelf, TempFile


def test_what_does_not_fit_is_on_disk(tmp_path):
    shelf = Shelf(memory=10, directory=tmp_path)
    small, large, last = shelf.put(b"12345"), shelf.put(b"1234567"), shelf.put(b"abcde")
    assert (small.read(), large.read(), last.read()) == (b"12345", b"1234567", b"abcde")
    assert shelf._end == 4096 and not os.listdir(tmp_path), "a file without a name holds one of them"
    del small
    assert shelf.put(b"67890").read() == b"67890" and shelf._end == 4096, "there is room again"
    del large
    large = shelf.put(bytes(11))
    assert shelf._end == 4096, "it lies where the other blob was"
    larger = shelf.put(b"x" * 5000)
    assert shelf._end == 4096 + 8192
    del shelf
    assert (large.read(), larger.read(), last.read()) == (bytes(11), b"x" * 5000, b"abcde")


def test_what_the_disk_does_not_take_stays_in_memory(tmp_path, monkeypatch):
    shelf = Shelf(memory=2, directory=tmp_path / "none")
    one = shelf.put(b"123")
    assert one.read() == b"123" and not list(tmp_path.iterdir())
    (tmp_path / "none").mkdir()

    def fill(file, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(TempFile, "write", fill)
        two = shelf.put(b"45")
    assert two.read() == b"45" and shelf._held == 5
    three = shelf.put(b"6")
    assert three.read() == b"6" and shelf._end == 4096, "there is room on the disk again, where that was to lie"
    del one, two
    four = shelf.put(b"78")
    assert four.read() == b"78" and shelf._end == 4096, "there is room in memory again"
