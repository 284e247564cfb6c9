"""Tenants in one cache: from whom rows are taken when room is needed."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.engine.cache import CacheOptions, RadixCache, SlotPool
from prefold.engine.cache.accounts import IDLE_SECONDS
from prefold.engine.cache.tree import RowTrie
from prefold.spec.requests import Share
from prefold.trie import token_bytes


class Tenants:
    """A cache that tenants share: the first part of a namespace is its tenant."""

    def __init__(self, slots=100, check=True, share_of=lambda tenant: Share(), **options):
        self.now = 0.0
        self.tree, self.pool, self.is_checked = RowTrie(), SlotPool(slots), check
        options.setdefault("min_overlap", 0)
        self.cache = RadixCache(self.tree, self.pool, CacheOptions(**options), clock=lambda: self.now)
        self.cache.set_tenants(lambda namespace: namespace[0], share_of)

    def begin(self, tenant, *tokens, salt=""):
        """A sequence comes and has its rows computed. Returns its nodes, and how many rows were there; None where there
        is no room for it."""
        self.now += 1e-3
        leaf = self.tree.insert((tenant, salt), token_bytes(tokens))
        path = leaf.path()
        self.cache.take(path)
        found = sum(node.num_computed for node in path)
        for node in path:
            node.users += 1
        for node in path:
            if not len(node.slots):
                missing = len(node) - self.pool.free_slots
                if missing > 0 and self.cache.evict(missing) < missing:
                    self.end(path)
                    return None
                node.claim(self.pool.allocate(len(node)))
                node.num_computed = len(node)
        if self.is_checked:
            self.check()
        return leaf, found

    def end(self, path):
        """A sequence ends."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self.cache.keep(node)
        if self.is_checked:
            self.check()

    def use(self, tenant, *tokens, salt=""):
        """A sequence comes, has its rows computed, and ends. Returns how many rows were there; None: no room."""
        begun = self.begin(tenant, *tokens, salt=salt)
        if begun is None:
            return None
        self.end(begun[0].path())
        return begun[1]

    def check(self):
        check_books(self.cache)
        nodes = list(self.tree.nodes())
        for account in self.cache.accounts:
            assert account.num_slots == sum(len(node.slots) for node in nodes if node.account is account)

    def rows(self, tenant):
        return self.cache.accounts.of(tenant).rows


def test_who_floods_the_cache_takes_from_itself():
    cache = Tenants(slots=100)
    work = [[100 + number] * 10 for number in range(4)]
    for tokens in work:
        cache.use("steady", *tokens)
    hits = 0
    for number in range(200):
        cache.use("flood", number, *[1] * 9)
        hits += cache.use("steady", *work[number % 4])
    assert hits == 200 * 10  # 40 of 100 rows are less than its half
    assert cache.rows("flood") == 60


def test_weights():
    shares = {"a": Share(3.0), "b": Share(1.0)}
    cache = Tenants(slots=400, share_of=shares.__getitem__)
    for number in range(200):
        for tenant in "ab":
            cache.use(tenant, number, 1, 2, 3)
    assert cache.rows("a") == pytest.approx(300, abs=8) and cache.rows("b") == pytest.approx(100, abs=8)
    shares |= {"a": Share(1.0), "b": Share(3.0)}
    cache.cache.set_tenants(lambda namespace: namespace[0], shares.__getitem__)
    for number in range(200, 400):
        for tenant in "ab":
            cache.use(tenant, number, 1, 2, 3)
    assert cache.rows("a") == pytest.approx(100, abs=8)


def test_rows_in_use_are_part_of_what_a_tenant_has():
    cache = Tenants(slots=100)
    cache.use("runs", 0, *[1] * 9)
    cache.use("small", 0, *[1] * 39)
    running = [cache.begin("runs", number, *[1] * 9)[0] for number in range(1, 6)]
    assert cache.pool.free_slots == 0
    running.append(cache.begin("runs", 6, *[1] * 9)[0])
    assert (cache.rows("runs"), cache.rows("small")) == (0, 40)  # it had 60, of which only 10 may go
    running.append(cache.begin("runs", 7, *[1] * 9)[0])
    assert cache.rows("small") == 30  # nobody else has any that may
    # A third takes from who has most of all, also where that one keeps less than another.
    for leaf in running[:2]:
        cache.end(leaf.path())
    cache.use("third", 0, *[1] * 9)
    assert (cache.rows("runs"), cache.rows("small")) == (10, 30)


def test_slots_that_no_row_came_to_are_given_back():
    cache = Tenants(slots=20)
    leaf, _ = cache.begin("a", 1, 2, 3)
    leaf.claim(cache.pool.allocate(4))
    cache.end(leaf.path())
    assert cache.pool.free_slots == 17


def test_who_is_away_has_no_share():
    cache = Tenants(slots=100)
    for number in range(5):
        cache.use("away", number, *[1] * 9)
    cache.now += IDLE_SECONDS
    for number in range(20):
        cache.use("here", number, *[1] * 9)
    assert (cache.rows("away"), cache.rows("here")) == (0, 100)


def test_most_rows_of_a_tenant():
    shares = {"a": Share(max_kept_rows=25), "b": Share()}
    cache = Tenants(slots=100, share_of=shares.__getitem__)
    for number in range(6):
        cache.use("a", number, *[1] * 9)
        cache.use("b", number, *[1] * 9)
    assert (cache.rows("a"), cache.rows("b")) == (25, 60)
    assert cache.use("a", 5, *[1] * 9) > 0  # the one used last is among them
    shares["b"] = Share(max_kept_rows=0)
    cache.cache.set_tenants(lambda namespace: namespace[0], shares.__getitem__)
    assert cache.rows("b") == 0
    check_books(cache.cache)


@settings(max_examples=75)
@given(
    seed=st.integers(0, 2**32 - 1),
    tenants=st.integers(1, 5),
    policy=st.sampled_from(["lru", "lfu", "priority"]),
    ttl=st.sampled_from([None, 0.02]),
    most=st.sampled_from([None, 30]),
)
def test_random_traces(seed, tenants, policy, ttl, most):
    rng = np.random.default_rng(seed)
    shares = [Share(float(rng.integers(1, 4)), max_kept_rows=rng.choice([None, 10])) for _ in range(tenants)]
    cache = Tenants(60, share_of=lambda tenant: shares[tenant], policy=policy, ttl=ttl, max_tokens=most)
    running = []
    for _ in range(60):
        tenant = int(rng.integers(tenants))
        tokens = rng.integers(0, 3, int(rng.integers(1, 9)))
        salt = str(rng.integers(2))
        draw = rng.random()
        if draw < 0.5:
            cache.use(tenant, *tokens, salt=salt)
        elif draw < 0.65:
            begun = cache.begin(tenant, *tokens, salt=salt)
            running += [begun[0]] if begun else []
        elif draw < 0.75:
            if running:
                cache.end(running.pop(int(rng.integers(len(running)))).path())
        elif draw < 0.82:
            cache.cache.pin((tenant, salt), tokens[:2].astype(np.int32))
        elif draw < 0.9:
            cache.cache.unpin((tenant, salt), tokens[:2].astype(np.int32))
        elif draw < 0.95:
            cache.now += 0.05 if rng.random() < 0.8 else IDLE_SECONDS
            cache.cache.expire()
        else:
            shares[tenant] = Share(float(rng.integers(1, 4)))
            cache.cache.set_tenants(lambda namespace: namespace[0], lambda tenant: shares[tenant])
        cache.check()
    for leaf in running:
        cache.end(leaf.path())
    cache.cache.clear()
    check_books(cache.cache)
    assert not cache.cache.rows


@pytest.mark.parametrize(("tenants", "limit"), [(1, None), (2500, None), (2500, 90)])
def test_a_request_costs_the_same_with_many_nodes_and_tenants(tenants, limit):
    """With 5,000 nodes kept by 2,500 tenants, and all room taken, so that each request evicts."""

    def lines(nodes, tenants):
        cache = Tenants(10 * nodes, check=False, share_of=lambda tenant: Share(max_kept_rows=limit), min_overlap=0)
        for number in range(nodes):
            cache.use(number % tenants, number, *range(9))
        more = range(nodes, nodes + 250)
        count = lines_run(lambda: [cache.use(number % tenants, number, *range(9)) for number in more])
        check_books(cache.cache)
        return count

    assert lines(5000, tenants) < 2.5 * lines(250, min(tenants, 25))
