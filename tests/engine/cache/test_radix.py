"""The radix cache's policies, on a trie and a pool of its own."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books

from prefold.engine.cache import CacheOptions, RadixCache, SlotPool
from prefold.engine.cache.tree import RowTrie
from prefold.errors import InputError
from prefold.trie import token_bytes


class Cached:
    """A cache with a clock that a test moves."""

    def __init__(self, slots=100, min_overlap=0, **options):
        self.now = 0.0
        options["min_overlap"] = min_overlap
        self.tree, self.pool = RowTrie(), SlotPool(slots)
        self.cache = RadixCache(self.tree, self.pool, CacheOptions(**options), clock=lambda: self.now)

    def use(self, *tokens, priority=0):
        """A sequence comes, has its rows computed, and ends."""
        self.now += 1
        leaf = self.tree.insert((), token_bytes(tokens))
        self.cache.take(leaf.path())
        self.cache.use(leaf.path())
        for node in leaf.path():
            node.users += 1
            node.priority = max(node.priority, priority)
            if not len(node.slots):
                node.claim(self.pool.allocate(len(node)))
                node.num_computed = len(node)
        for node in reversed(leaf.path()):
            node.users -= 1
            self.cache.keep(node)
        check_books(self.cache)

    def has(self, *tokens):
        found = list(self.tree.match((), token_bytes(tokens)))
        assert all(node.num_computed == len(node) for node, _ in found)
        return sum(same for _, same in found)


def test_lru():
    c = Cached()
    c.use(1, 2, 3)
    c.use(1, 2, 4)
    c.use(5, 6)
    c.use(1, 2, 3)
    c.cache.evict(1)
    check_books(c.cache)
    assert (c.has(1, 2, 3), c.has(1, 2, 4), c.has(5, 6)) == (3, 2, 2)
    c.cache.evict(1)
    assert c.has(5, 6) == 1, "the last row goes first"


def test_lfu_and_priority():
    c = Cached(policy="lfu")
    for _ in range(3):
        c.use(1, 2)
    c.use(3, 4)
    c.cache.evict(2)
    assert (c.has(1, 2), c.has(3, 4)) == (2, 0)
    c = Cached(policy="priority")
    c.use(1, 2, priority=5)
    c.use(3, 4)
    c.cache.evict(2)
    assert (c.has(1, 2), c.has(3, 4)) == (2, 0)


def test_time_to_live():
    c = Cached(ttl=10)
    c.use(1, 2, 3)
    c.now += 5
    c.use(1, 2, 4)
    c.now += 5.5
    c.cache.expire()
    check_books(c.cache)
    assert (c.has(1, 2, 3), c.has(1, 2, 4)) == (2, 3)
    c.now += 20
    c.cache.expire()
    assert c.has(1) == 0 and c.pool.used_slots == 0


def test_most_tokens_and_least_overlap():
    c = Cached(max_tokens=4)
    c.use(1, 2, 3)
    c.use(4, 5, 6)
    assert c.cache.rows == 4 and c.pool.used_slots == 4
    c = Cached(min_overlap=3)
    c.use(1, 2)
    assert c.pool.used_slots == 0
    c.use(1, 2, 3)
    assert c.has(1, 2, 3) == 3
    kept = next(c.tree.match((), token_bytes([1, 2])))[0].slots
    c.use(1, 2, 4)
    found = next(c.tree.match((), token_bytes([1, 2])))[0]
    assert found.num_computed == 2 and found.slots is not kept, "two rows are not worth using"
    c.use(1, 2, 3)
    assert c.has(1, 2, 3) == 3


def test_pins():
    c = Cached()
    c.use(1, 2, 3, 4)
    c.use(5, 6)
    assert c.cache.pin((), np.array([1, 2, 9])) == 2
    check_books(c.cache)
    assert c.cache.evict(100) == 4
    assert (c.has(1, 2, 3), c.has(5)) == (2, 0)
    c.use(1, 2, 3)
    assert c.cache.unpin((), np.array([1, 2])) == 2
    check_books(c.cache)
    c.cache.clear()
    assert c.pool.used_slots == 0


def test_what_was_pinned_counts_as_kept_afterwards():
    c = Cached(max_tokens=4)
    c.use(1, 2, 3)
    c.cache.pin((), np.array([1, 2, 3]))
    c.use(4, 5, 6)
    assert c.pool.used_slots == 6
    c.cache.unpin((), np.array([1, 2, 3]))
    check_books(c.cache)
    assert c.cache.rows == c.pool.used_slots == 4


def test_options_are_checked():
    with pytest.raises(InputError, match="policy"):
        CacheOptions(policy="fifo")
    with pytest.raises(InputError, match="ttl"):
        CacheOptions(ttl=-1)


@pytest.mark.parametrize("begins", [False, True])
def test_what_lies_below_rows_that_are_gone_goes_too(begins):
    c = Cached(min_overlap=3)
    c.use(1, 2, 3, 4)
    leaf = c.tree.insert((), token_bytes([1, 2, 5]))  # comes, and is cancelled before its rows are there
    c.cache.take(leaf.path())
    if begins:
        assert [node.tokens.tolist() for node in c.cache.use(leaf.path())] == [[1, 2]]
    for node in leaf.path():
        node.users += 1
    for node in reversed(leaf.path()):
        node.users -= 1
        c.cache.keep(node)
    check_books(c.cache)
    assert c.has(1, 2, 3, 4) == c.pool.used_slots == (0 if begins else 4)


def test_rows_below_one_that_is_still_to_be_computed_are_not_pinned():
    """A prompt that shares too little gives up the first rows and waits: what lies below cannot be used meanwhile."""
    c = Cached(min_overlap=4)
    c.use(1, 2, 3, 4, 5, 6)
    waiting = c.tree.insert((), token_bytes([1, 2]))
    c.cache.take(waiting.path())
    c.cache.use(waiting.path())
    waiting.users += 1
    tokens = np.array([1, 2, 3, 4, 5, 6])
    assert c.cache.pin((), tokens) == 0
    waiting.claim(c.pool.allocate(2))
    waiting.num_computed = 1
    assert c.cache.pin((), tokens) == 1, "its first row is there"
    waiting = waiting if len(waiting) == 2 else list(c.tree.match((), token_bytes(tokens[:2])))[-1][0]
    waiting.users -= 1
    c.cache.keep(waiting)
    top = next(c.tree.match((), token_bytes(tokens[:1])))[0]
    top.users = 0
    c.cache.keep(top)
    check_books(c.cache)
    assert c.cache.rows == 0 and c.has(1, 2) == 1
    assert c.cache.unpin((), tokens) == 1
    c.cache.clear()
    assert c.cache.rows == 0 and c.pool.used_slots == 0


def test_evicting_one_by_one_does_not_look_at_all_that_is_kept():
    c = Cached(slots=2000)
    for first in range(400):
        c.use(first, 1, 2)
    compared = 0
    worth = c.cache.worth

    def counted(node):
        nonlocal compared
        compared += 1
        return worth(node)

    c.cache.worth = counted
    for _ in range(100):
        assert c.cache.evict(3) == 3
    assert compared <= 100
    c.cache.worth = worth
    check_books(c.cache)
    assert [c.has(first) for first in (0, 99, 100, 399)] == [0, 0, 1, 1]


def test_eviction_goes_in_order_of_worth():
    """Against a sort of all that could go, with uses, pins and ends mixed at random."""
    rng = np.random.default_rng(0)
    for policy in ("lru", "lfu", "priority"):
        c = Cached(slots=3000, policy=policy)
        for _ in range(300):
            c.use(*rng.integers(0, 3, rng.integers(1, 9)).tolist(), priority=int(rng.integers(3)))
            if rng.random() < 0.2:
                c.cache.pin((), rng.integers(0, 3, 4))
            if rng.random() < 0.2:
                c.cache.unpin((), rng.integers(0, 3, 4))
            if rng.random() < 0.3:
                leaves = [n for n in c.tree.nodes() if n.kept and not n.children and not n.pins]
                least = min(map(c.cache.worth, leaves), default=None)
                before = {n: c.cache.worth(n) for n in leaves if len(n) == 1}
                c.cache.evict(1)
                gone = [worth for n, worth in before.items() if not n.kept]
                assert all(worth == least for worth in gone)
            check_books(c.cache)
