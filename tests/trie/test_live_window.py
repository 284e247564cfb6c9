"""The live window against a brute-force form of its buckets, and who leaves when."""

from __future__ import annotations

import numpy as np
import pytest
from books import buckets_of, check_books
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.errors import InputError
from prefold.trie.live import LiveWindow


def brute_force(prompts: dict, threshold: float, depth: int = 0) -> set[frozenset]:
    """The buckets, as sets of keys: prompts that share their first `depth` tokens, parted by the next one."""
    found: set[frozenset] = set()
    parts: dict = {}
    for key, (namespace, tokens) in prompts.items():
        parts.setdefault((namespace if depth == 0 else None, tokens[depth]), {})[key] = (namespace, tokens)
    for part in parts.values():
        lists = [tokens for _, tokens in part.values()]
        columns = enumerate(zip(*lists, strict=False))
        common = next((i for i, column in columns if len(set(column)) > 1), min(map(len, lists)))
        if common * len(lists) >= threshold * sum(map(len, lists)):
            found.add(frozenset(part))
            continue
        ending = frozenset(key for key, (_, tokens) in part.items() if len(tokens) == common)
        if ending:
            found.add(ending)
        found |= brute_force({k: v for k, v in part.items() if k not in ending}, threshold, common)
    return found


def keys_of(window: LiveWindow, bucket) -> frozenset:
    return frozenset(waiting.key for waiting in window.requests_of(bucket))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_buckets_are_those_of_the_definition(seed, threshold):
    rng = np.random.default_rng(seed)
    holders: dict[int, set] = {}  # of the first token
    window = LiveWindow(
        max_tokens=150, threshold=threshold, grown_tokens=20, max_age=5.0,
        homes=lambda namespace, prefix: holders.get(int(prefix[0]), ()),
    )  # fmt: skip
    inside: dict = {}
    left: list = []
    now = 0.0
    for key in range(150):
        now += rng.random()
        if not window.is_full:
            tokens = rng.integers(0, 2, rng.integers(1, 24)).astype(np.int32)
            if inside and rng.random() < 0.6:  # goes on from another
                start = list(inside.values())[rng.integers(len(inside))][1]
                tokens = np.concatenate((start[: rng.integers(0, len(start) + 1)], tokens)).astype(np.int32)
            namespace = ("a",) if rng.random() < 0.1 else ()
            window.put(key, tokens, now=now, namespace=namespace)
            inside[key] = (namespace, tuple(tokens.tolist()))
            check_books(window)
        act = rng.random()
        if act < 0.2:
            holders[int(rng.integers(2))] = set("ab"[: rng.integers(3)])
        elif act < 0.6 or window.is_full:
            queue = [None, "a", "b"][rng.integers(3)]
            bucket = window.overdue(now) or window.largest(queue, grown=bool(rng.integers(2)))
            if bucket is not None:
                most = int(rng.integers(1, 100)) if rng.random() < 0.5 else None
                expected = keys_of(window, bucket)
                assert expected in brute_force(inside, threshold)
                taken = window.take(bucket, most)
                assert taken and {w.key for w in taken} <= expected
                assert most is not None or {w.key for w in taken} == expected
                assert most is None or len(taken) == 1 or sum(len(w.tokens) for w in taken) <= most
                for waiting in taken:
                    assert tuple(waiting.tokens.tolist()) == inside.pop(waiting.key)[1]
                    assert tuple(bucket.prefix.tolist()) == tuple(waiting.tokens[: len(bucket.prefix)].tolist())
                    left.append(waiting.key)
                check_books(window)
        assert {keys_of(window, bucket) for bucket in buckets_of(window)} == brute_force(inside, threshold)
    window.close()
    while len(window):
        # What is not held any more where it was queued goes to the queue None, which may have been looked at already.
        bucket = next(b for queue in (None, "a", "b", None) if (b := window.largest(queue)) is not None)
        left += [waiting.key for waiting in window.take(bucket)]
    check_books(window)
    assert len(left) == len(set(left)) and window.num_tokens == 0 and not window.trie.roots


def test_most_tokens_first():
    window = LiveWindow(max_tokens=10**6, grown_tokens=0)
    rng = np.random.default_rng(0)
    sizes = [5, 40, 12, 33]
    for number, size in enumerate(sizes):
        for i in range(size):
            tokens = np.concatenate((np.full(50, number), rng.integers(10, 1000, 50)))
            window.put((number, i), tokens, now=0.0)
    order = []
    while (bucket := window.largest()) is not None:
        assert bucket.tokens == 100 * bucket.requests and len(bucket.prefix) >= 50
        order.append(window.take(bucket)[0].key[0])
    assert order == [1, 3, 2, 0]


def test_small_buckets_wait_until_pressed():
    window = LiveWindow(max_tokens=1000, grown_tokens=400, max_age=5.0)
    for i in range(3):
        window.put(i, np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, i]), now=float(i))
    assert window.largest() is None and window.overdue(4.9) is None
    assert window.largest(grown=False).requests == 3  # a replica has nothing else to do
    assert window.next_deadline() == 5.0 and window.overdue(5.0).requests == 3
    window.put("long", np.arange(100, 1090), now=6.0)
    assert window.is_full and window.largest().requests == 1
    with pytest.raises(RuntimeError, match="full"):
        window.put("more", np.arange(3), now=7.0)
    window.take(window.largest())
    assert not window.is_full and window.largest() is None
    window.close()
    assert window.largest().requests == 3
    with pytest.raises(InputError, match="closed"):
        window.put("late", np.arange(3), now=8.0)
    with pytest.raises(InputError, match="waits already"):
        window.put(1, np.arange(3), now=8.0)


def test_what_has_left_is_forgotten_however_many_come():
    window = LiveWindow(max_tokens=10**6, grown_tokens=0)
    rng = np.random.default_rng(0)
    for number in range(1000):
        window.put(number, np.concatenate(([number % 7] * 20, rng.integers(10, 1000, 20))), now=0.0)
        if len(window) > 20:
            window.take(window.bucket_of(next(window.waiting()).key), 1)
        if number % 100 == 0:
            check_books(window)
    check_books(window)
    assert sum(map(len, window.heaps.values())) <= 2 * 21 + 64


def test_a_bucket_that_has_changed_is_not_taken():
    window = LiveWindow(max_tokens=1000)
    window.put(0, np.arange(10), now=0.0)
    bucket = window.largest(grown=False)
    window.put(1, np.arange(10), now=0.0)
    with pytest.raises(KeyError):
        window.take(bucket)


def test_a_bucket_is_followed_while_others_leave_and_come():
    window = LiveWindow(max_tokens=10**6)
    for key in range(5):
        window.put(key, np.array([1] * 100 + [10 + key], np.int32), now=0.0)
    bucket = window.largest(grown=False)
    assert len(window.take(bucket, 202)) == 2
    assert keys_of(window, window.current(bucket)) == {2, 3, 4}
    window.put("half", np.array([1] * 60 + [9] * 20, np.int32), now=1.0)  # the bucket is now at a place above
    assert keys_of(window, window.current(bucket)) == {2, 3, 4, "half"}
    window.take(window.current(bucket))
    assert window.current(bucket) is None
    check_books(window)


def test_a_prompt_goes_in_in_the_time_of_its_own_length():
    """Not of what waits."""
    rng = np.random.default_rng(0)

    def put(window: LiveWindow, first: int, count: int) -> None:
        for i in range(first, first + count):
            window.put(i, np.concatenate((np.full(20, i % 64), rng.integers(100, 10**6, 20))), now=0.0)

    def lines(count: int) -> int:
        window = LiveWindow(max_tokens=10**9)
        put(window, 0, count)
        return lines_run(lambda: put(window, count, 64))

    assert lines(4096) < 1.1 * lines(256)
