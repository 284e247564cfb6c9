"""Blobs that wait for their use: in memory where there is room, else on disk, and gone with the last reference."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from prefold.trie.tempfiles import BlobStore, TempFile


def test_what_does_not_fit_is_on_disk(tmp_path):
    store = BlobStore(memory=10, directory=tmp_path)
    small, large, last = store.put(b"12345"), store.put(b"1234567"), store.put(b"abcde")
    assert (small.read(), large.read(), last.read()) == (b"12345", b"1234567", b"abcde")
    assert store.size == 4096 and not os.listdir(tmp_path), "a file without a name holds one of them"
    del small
    assert store.put(b"67890").read() == b"67890" and store.size == 4096, "there is room again"
    del large
    large = store.put(bytes(11))
    assert store.size == 4096, "it lies where the other blob was"
    larger = store.put(b"x" * 5000)
    assert store.size == 4096 + 8192
    del store
    assert (large.read(), larger.read(), last.read()) == (bytes(11), b"x" * 5000, b"abcde")


@pytest.fixture
def write_by(monkeypatch):
    """Lets a function write to temporary files. It is called with the function that it stands for, and what that is
    given."""

    def put(function):
        write = TempFile.write
        monkeypatch.setattr(TempFile, "write", lambda *given: function(write, *given))

    return put


def test_what_the_disk_does_not_take_stays_in_memory(tmp_path, monkeypatch, write_by):
    store = BlobStore(memory=2, directory=tmp_path / "none")
    one = store.put(b"123")
    assert one.read() == b"123" and not list(tmp_path.iterdir())
    (tmp_path / "none").mkdir()

    def fill(write, file, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_by(fill)
    two = store.put(b"45")
    monkeypatch.undo()
    assert two.read() == b"45" and store.used == 5
    three = store.put(b"6")
    assert three.read() == b"6" and store.size == 4096, "there is room on the disk again, where that was to lie"
    del one, two
    four = store.put(b"78")
    assert four.read() == b"78" and store.size == 4096, "there is room in memory again"


def test_a_blob_may_be_given_up_while_another_is_written(tmp_path, write_by):
    store = BlobStore(memory=4, directory=tmp_path)
    others = [store.put(b"123")]

    def give_up_and_write(write, file, data, place):
        thread = threading.Thread(target=others.clear, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and store.used == 0
        write(file, data, place)

    write_by(give_up_and_write)
    assert store.put(b"45").read() == b"45" and store.size == 4096
