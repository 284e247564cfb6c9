"""Ids of the rows of images: who has them, for how long, and that nobody has those of another."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest

from prefold.engine.cache.tree import RowTrie
from prefold.errors import InputError
from prefold.features.images import table as media_module
from prefold.features.images.table import MediaTable
from prefold.trie import MEDIA_BASE, SPAN_BASE, span_starts, token_bytes


def take(table: MediaTable, key: bytes, *, tiles=1, rows=4, span=True, salt=""):
    return table.medium(key, tiles=tiles, rows_per_tile=rows, span=span, load=lambda: np.zeros(1), salt=salt)


class Held(list):
    """A store of what a tower made: first ids."""

    __hash__ = object.__hash__

    def firsts(self):
        return self


def test_equal_images_of_one_tenant_have_the_same_ids():
    table = MediaTable()
    one, twin, other = take(table, b"a"), take(table, b"a"), take(table, b"b")
    stranger = take(table, b"a", salt="somebody else's")
    assert one is twin
    ids = [set(medium.ids.tolist()) for medium in (one, other, stranger)]
    assert all(len(some) == 4 for some in ids) and len(set.union(*ids)) == 12
    assert one.ids.dtype == np.int32 and not one.ids.flags.writeable


@pytest.mark.parametrize("span", [True, False])
def test_ids_of_tiles_and_of_neighbours(span):
    table = MediaTable()
    media = [take(table, bytes([i]), tiles=2, rows=3, span=span) for i in range(3)]
    tokens = np.concatenate([medium.ids for medium in media])
    assert (np.diff(tokens) > 0).all()
    assert (tokens >= (SPAN_BASE if span else MEDIA_BASE)).all() and (tokens < (2**31 if span else SPAN_BASE)).all()
    if span:
        assert span_starts(tokens).tolist() == [i - i % 3 for i in range(18)], "each tile is a span of its own"
    else:
        assert span_starts(tokens) is None
    assert table.find(tokens[::-1]) == media[::-1]
    assert table.find(tokens[4:5]) == [media[0]]
    assert table.find(np.empty(0, np.int32)) == []


def test_ids_are_free_when_nobody_holds_them():
    table, tree = MediaTable(), RowTrie()
    table.add_tree(tree)
    held, in_tree, gone = (take(table, key) for key in (b"held", b"in the tree", b"gone"))
    ids = {key: medium.ids.copy() for key, medium in (("held", held), ("tree", in_tree), ("gone", gone))}
    node = tree.insert((), token_bytes(np.concatenate(([1, 2], in_tree.ids, [3]))))
    del in_tree, gone
    gc.collect()
    assert take(table, b"gone").ids.tolist() == ids["gone"].tolist(), "nothing is freed before it is looked for"
    gc.collect()
    table.sweep()
    assert len(table) == 2
    fresh = take(table, b"new")
    assert fresh.ids.tolist() == ids["gone"].tolist()
    assert take(table, b"in the tree").ids.tolist() == ids["tree"].tolist(), "its rows are found again"
    tree.remove(node)
    gc.collect()
    table.sweep()
    assert len(table) == 2 and held.ids.tolist() == ids["held"].tolist()
    # What only the store of a tower's results has.
    store = Held([int(fresh.ids[0])])
    table.add_store(store)
    del fresh
    gc.collect()
    table.sweep()
    assert len(table) == 2
    del store
    gc.collect()
    table.sweep()
    assert len(table) == 1


def test_a_flood_of_images_does_not_keep_ids():
    table = MediaTable()
    for number in range(10 * media_module.SLACK):
        take(table, number.to_bytes(4, "big"))
    assert len(table) <= 2 * media_module.SLACK
    assert max(table._owners) < SPAN_BASE + 5 * 3 * media_module.SLACK


def test_no_ids_left(monkeypatch):
    monkeypatch.setattr(media_module, "SPAN_BASE", MEDIA_BASE + 10)
    table = MediaTable()
    held = [take(table, bytes([i]), span=False) for i in range(2)]
    with pytest.raises(InputError, match=r"2 different images .* the 10 ids .* are used up; .* divide a job"):
        take(table, b"one more", span=False)
    assert len(held) == 2


def test_what_is_not_held_is_not_found():
    table = MediaTable()
    ids = take(table, b"a").ids
    gc.collect()
    with pytest.raises(KeyError):
        table.find(ids)


def test_many_threads():
    """Media come and go; at any time those that are held have ids that differ."""
    table, tree = MediaTable(), RowTrie()
    table.add_tree(tree)
    failures = []

    def work(seed):
        rng = random.Random(seed)
        held = {}
        try:
            for _ in range(300):
                key = bytes([rng.randrange(20)])
                if rng.random() < 0.4:
                    held.pop(key, None)
                else:
                    held[key] = take(table, key, rows=1 + key[0] % 3)
                    assert table.find(held[key].ids) == [held[key]]
                if rng.random() < 0.05:
                    table.sweep()
                every = [i for medium in held.values() for i in medium.ids.tolist()]
                assert len(every) == len(set(every))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
