"""Blobs that wait for their use: in memory where there is room, else on disk, and gone with the last reference."""

from __future__ import annotations

import errno
import os
import threading

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


def test_what_the_disk_does_not_take_stays_in_memory(tmp_path, monkeypatch):
    store = BlobStore(memory=2, directory=tmp_path / "none")
    one = store.put(b"123")
    assert one.read() == b"123" and not list(tmp_path.iterdir())
    (tmp_path / "none").mkdir()

    def fill(file, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(TempFile, "write", fill)
        two = store.put(b"45")
    assert two.read() == b"45" and store.used == 5
    three = store.put(b"6")
    assert three.read() == b"6" and store.size == 4096, "there is room on the disk again, where that was to lie"
    del one, two
    four = store.put(b"78")
    assert four.read() == b"78" and store.size == 4096, "there is room in memory again"


def test_a_blob_may_be_given_up_while_another_is_written(tmp_path, monkeypatch):
    store = BlobStore(memory=4, directory=tmp_path)
    others = [store.put(b"123")]
    write = TempFile.write

    def give_up_and_write(file, data, place):
        thread = threading.Thread(target=others.clear, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and store.used == 0
        write(file, data, place)

    monkeypatch.setattr(TempFile, "write", give_up_and_write)
    assert store.put(b"45").read() == b"45" and store.size == 4096
