"""What leaves the live window, and for whom."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from books import check_books
from fleet_books import check_router
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.cluster.online import Dispatcher, Limits
from prefold.cluster.router import POLICIES, Prompt, Router, Speed, policy_named
from prefold.engine.cache.events import CacheCleared, CacheEvents, RowsStored

SPEED = Speed(prefill=1e-3, decode=1e-2)


def dispatcher(replicas: str, backlog: int = 1000, policy: str = "prefix", **window) -> Dispatcher:
    router = Router(policy_named(policy))
    found = Dispatcher(router, limit_of=lambda what: what or 0, **({"max_tokens": 10**6, "grown_tokens": 300} | window))
    for name in replicas:
        router.join(name, speed=Speed(SPEED.prefill, SPEED.decode))
        found.join(name, Limits(backlog))
    return found


def prompt(prefix: int, number: int, shared: int = 100, own: int = 20) -> np.ndarray:
    return np.concatenate((np.full(shared, prefix), [10_000 + number], np.full(own - 1, 7))).astype(np.int32)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(POLICIES)))
def test_nobody_is_lost_and_nobody_goes_twice(seed, policy):
    rng = np.random.default_rng(seed)
    max_age = 20.0
    d = dispatcher("abc", backlog=600, policy=policy, max_tokens=5000, max_age=max_age)
    came: dict[int, float] = {}
    sent: dict[int, str] = {}
    now, key = 0.0, 0
    while key < 200 or len(d.window) or d.router.in_flight:
        now += 0.5
        for _ in range(int(rng.integers(0, 5))):
            if key < 200 and not d.window.is_full:
                d.window.put(key, prompt(int(rng.integers(4)), key), now=now, payload=8)
                came[key] = now
                key += 1
        if key == 200 and not d.window.is_closed:
            d.window.close()
        for order in d.dispatch(now):
            for waiting in order.requests:
                assert waiting.key not in sent
                sent[waiting.key] = order.replica
        check_books(d.window)
        check_router(d.router)
        has_room = any(d.room(replica) > 0 for replica in "abc")
        assert not has_room or len(d.window) == 0 or now - d.window.next_deadline() < 0
        for one in list(d.router.in_flight):
            if rng.random() < 0.4:
                d.router.end(one, output_rows=int(rng.integers(1, 9)))
        assert now < 1000
    assert sorted(sent) == list(range(200))


def test_the_first_request_starts_at_once():
    d = dispatcher("ab")
    d.window.put(0, prompt(1, 0), now=0.0)
    (order,) = d.dispatch(0.0)
    assert [waiting.key for waiting in order.requests] == [0] and order.prefix == 120
    d.window.put(1, prompt(2, 1), now=0.1)
    (order,) = d.dispatch(0.1)  # the other one had nothing to do
    assert order.replica == "b"
    d.window.put(2, prompt(2, 2), now=0.2)
    assert d.dispatch(0.2) == []  # both are at work: it waits for more of its kind
    d.window.put(3, prompt(2, 3), now=0.3)
    d.window.put(4, prompt(2, 4), now=0.3)
    (order,) = d.dispatch(0.3)
    assert order.replica == "b" and [waiting.key for waiting in order.requests] == [2, 3, 4]


def test_a_replica_goes_on_with_what_it_holds():
    d = dispatcher("ab", backlog=300)
    for i in range(40):
        d.window.put(i, prompt(i % 4, i), now=0.0)
    places: dict[int, set] = {}
    for _ in range(40):
        for order in d.dispatch(0.0):
            for waiting in order.requests:
                places.setdefault(int(waiting.tokens[0]), set()).add(order.replica)
        for key in list(d.router.in_flight)[:2]:
            d.router.end(key)
    assert not len(d.window)
    assert sum(map(len, places.values())) <= 6  # at most two prefixes are copied


def test_a_bucket_is_left_to_its_holder_unless_that_has_much_to_do():
    d = dispatcher("ab", backlog=500, grown_tokens=0)
    d.window.put("warm", prompt(1, 0), now=0.0)
    d.window.put("cold", prompt(2, 1), now=0.0)
    assert {order.replica for order in d.dispatch(0.0)} == {"a", "b"}
    holder = d.router.in_flight["warm"].replica
    for i in range(3):
        d.window.put(i, prompt(1, 2 + i), now=0.0, payload=5)
    orders = d.dispatch(0.0)
    assert {order.replica for order in orders} == {holder}
    for i in range(3, 60):
        d.window.put(i, prompt(1, 2 + i), now=0.0, payload=5)
    assert {order.replica for order in d.dispatch(0.0)} == {"a", "b"}


def test_a_replica_ends_the_bucket_that_it_has_begun_before_the_next():
    d = dispatcher("a", backlog=250, grown_tokens=0)
    for i in range(40):
        d.window.put(i, prompt(i % 2, i), now=0.0)
    order: list[int] = []
    for now in range(60):
        if now == 3:
            d.window.put(40, prompt(0, 40), now=3.0)  # it comes later, and joins them
        for one in d.dispatch(float(now)):
            order += [int(waiting.tokens[0]) for waiting in one.requests]
        for key in list(d.router.in_flight)[:1]:
            d.router.end(key)
    assert len(order) == 41
    assert sum(a != b for a, b in pairwise(order)) == 2, "one prefix, the other, and what came later"


def test_what_is_overdue_goes_before_larger_buckets():
    d = dispatcher("a", backlog=130, grown_tokens=300)
    d.window.put("old", prompt(9, 0), now=0.0)
    key, sent = 0, {}
    for now in range(1, 12):
        for _ in range(4):  # more comes than leaves, and all of it in large buckets
            d.window.put(key, prompt(key % 2, key), now=float(now))
            key += 1
        if now == 1:
            d.router.send("busy", Prompt(prompt(8, 1)), "a")
            continue
        for one in d.dispatch(float(now)):
            sent |= {waiting.key: now for waiting in one.requests}
        for other in list(d.router.in_flight)[:1]:
            d.router.end(other)
    assert 4 <= sent["old"] <= 8


def test_all_replicas_end_at_the_same_time_when_nothing_comes_any_more():
    speeds = {"a": 1e-3, "b": 3e-3}  # seconds a row
    d = dispatcher("ab", backlog=1500, grown_tokens=0)
    for i in range(80):
        d.window.put(i, prompt(i, i), now=0.0)  # 120 rows, nothing shared
    d.window.close()
    open_: dict[str, list] = {"a": [], "b": []}
    ends = dict.fromkeys(open_, 0.0)
    now, at_work = 0.0, {}
    while len(d.window) or d.router.in_flight:
        for one in d.dispatch(now):
            open_[one.replica] += [waiting.key for waiting in one.requests]
        for name, keys in open_.items():
            if keys and name not in at_work:
                at_work[name] = now + 120 * speeds[name]
        name = min(at_work, key=at_work.get)
        now = ends[name] = at_work.pop(name)
        d.router.worked(name, 120, 0, 120 * speeds[name])
        d.router.end(open_[name].pop(0), output_rows=0, cached_rows=0)
    assert abs(ends["a"] - ends["b"]) <= 120 * speeds["b"] + 1e-9
    assert max(ends.values()) <= 1.05 * 80 * 120 / (1 / speeds["a"] + 1 / speeds["b"])


@pytest.mark.parametrize(("reserves", "leave"), [(True, 3), (False, 10)])
def test_room_is_what_the_replica_sets_aside(reserves, leave):
    d = dispatcher("a", grown_tokens=0)
    d.join("a", Limits(2300, reserves=reserves))
    for i in range(500):  # outputs are a tenth of what they might be
        d.router.send(i, Prompt(prompt(7, i), 1000), "a")
        d.router.end(i, output_rows=100)
    for i in range(10):
        d.window.put(500 + i, prompt(1, i), now=0.0, payload=1000)
    assert sum(len(order.requests) for order in d.dispatch(0.0)) == leave


def test_a_prefix_that_is_held_takes_no_room():
    d = dispatcher("ab", backlog=150, grown_tokens=0)
    stored = RowsStored(1, None, np.full(100, 1, np.int32))
    d.router.take("a", CacheEvents(0, 0, (CacheCleared(), stored)))
    d.router.take("b", CacheEvents(0, 0, (CacheCleared(),)))
    for i in range(15):
        d.window.put(i, prompt(1, i, own=10), now=0.0)
    first = d.dispatch(0.0)[0]
    assert first.replica == "a" and len(first.requests) == 15


@pytest.mark.parametrize("seed", range(40))
def test_the_shares_of_the_end_are_all_that_waits(seed):
    """Where there is room, one division gives away everything, whatever replicas have to do before."""
    rng = np.random.default_rng(seed)
    d = dispatcher("abc", backlog=10**6, grown_tokens=0)
    for name, busy in zip("abc", rng.integers(0, 9, 3).tolist(), strict=True):
        for i in range(busy):
            d.router.send((name, i), Prompt(prompt(100 + i, i)), name)
    for i in range(int(rng.integers(1, 12))):
        d.window.put(i, prompt(i, i), now=0.0)
    d.window.close()
    d.dispatch(0.0)
    assert not len(d.window)
