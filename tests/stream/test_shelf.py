"""Files that wait for their use: in memory where there is room, else on disk, and gone with the last who has them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from prefold.stream.shelf import Shelf


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


def test_a_file_that_cannot_be_written(tmp_path):
    shelf = Shelf(memory=0, directory=tmp_path / "none")
    with pytest.raises(OSError, match="none"):
        shelf.put(b"1")
