from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from counts import most_bytes
from hypothesis import given
from hypothesis import strategies as st

from prefold.errors import InputError
from prefold.spec.requests import Namespace, Request, Sampling
from prefold.trie import Spool

requests = st.lists(
    st.tuples(
        st.lists(st.one_of(st.integers(0, 2), st.integers(0, 2**31 - 1)), min_size=1, max_size=6),
        st.one_of(st.none(), st.integers(0, 6)),  # number of targets, at most
        st.binary(max_size=5),
    ),
    max_size=40,
)


def fill(job, **options) -> Spool:
    filled = Spool(**options)
    for tokens, num_targets, tag in job:
        targets = None if num_targets is None else np.arange(min(num_targets, len(tokens)))
        filled.add(Request(np.array(tokens), targets), tag)
    return filled


def expected(job) -> list[tuple[list[int], list[int], bytes]]:
    return [(t, list(range(min(m or 0, len(t)))), tag) for t, m, tag in job]


def contents(windows) -> list[tuple[list[int], list[int], bytes]]:
    found = []
    for w in windows:
        assert w.tokens.dtype == w.targets.dtype == np.int32
        assert w.offsets.dtype == w.target_offsets.dtype == np.int64
        assert len(w.offsets) == len(w.target_offsets) == len(w.tags) + 1 == w.num_requests + 1
        assert w.offsets[-1] == len(w.tokens) == w.num_tokens and w.target_offsets[-1] == len(w.targets)
        tokens = np.split(w.tokens, w.offsets[1:-1])
        targets = np.split(w.targets, w.target_offsets[1:-1])
        found += [(a.tolist(), b.tolist(), c) for a, b, c in zip(tokens, targets, w.tags, strict=True)]
    return found


@given(requests, st.sampled_from([1, 700, 1 << 20]), st.integers(1, 50))
def test_windows_hold_the_job_in_order(job, memory_bytes, max_tokens):
    with fill(job, memory_bytes=memory_bytes) as filled:
        assert filled.num_requests == len(job)
        assert filled.num_tokens == sum(len(t) for t, _, _ in job)
        in_order = sorted(expected(job), key=lambda r: r[0])  # stable: ties as they came
        assert contents(filled.windows(max_tokens=max_tokens)) == in_order
        assert contents(filled.windows(max_tokens=max_tokens, share=False)) == expected(job)
        assert contents(filled.windows(max_tokens=max_tokens)) == in_order  # once more


@given(requests, st.sampled_from([1, 700, 1 << 20]), st.integers(1, 50), st.randoms())
def test_requests_of_one_adapter_come_together(job, memory_bytes, max_tokens, random):
    """Sorted within each adapter, and nothing is said to be shared between two."""
    names = [random.choice(["", "b", "ä"]) for _ in job]
    with Spool(memory_bytes=memory_bytes) as filled:
        for (tokens, num_targets, tag), name in zip(job, names, strict=True):
            targets = None if num_targets is None else np.arange(min(num_targets, len(tokens)))
            filled.add(Request(np.array(tokens), targets, namespace=Namespace(name)), tag)
        for share in (True, False):
            windows = list(filled.windows(max_tokens=max_tokens, share=share))
            assert [w.namespace for w in windows] == sorted(w.namespace for w in windows)
            for name in (None, "b", "ä"):
                some = [record for record, other in zip(expected(job), names, strict=True) if other == name]
                own = [w for w in windows if w.namespace.adapter == name]
                assert contents(own) == (sorted(some, key=lambda r: r[0]) if share else some)
                assert not own or own[0].common == 0
                unique = {tuple(tokens[: i + 1]) for tokens, _, _ in some for i in range(len(tokens))}
                assert not share or sum(w.unique_tokens for w in own) == len(unique)


def test_more_runs_than_can_be_merged_at_once():
    rng = np.random.default_rng(0)
    job = [(rng.integers(0, 3, rng.integers(1, 8)).tolist(), None, str(i).encode()) for i in range(1000)]
    with fill(job, memory_bytes=5000, fan_in=3) as filled:
        assert len(filled._runs) > 27  # three levels
        for _ in range(2):
            assert contents(filled.windows(max_tokens=100)) == sorted(expected(job), key=lambda r: r[0])
        assert contents(filled.windows(max_tokens=100, share=False)) == expected(job)


def test_nothing_is_written_before_memory_is_full(tmp_path):
    with Spool(memory_bytes=2000, directory=tmp_path) as filled:
        filled.add(Request(np.arange(10)))
        assert filled._file is None
        for _ in range(10):
            filled.add(Request(np.arange(100)))
        assert filled._file is not None
        windows = filled.windows(max_tokens=50)
        next(windows)
    assert not os.listdir(tmp_path)
    filled.close()


def test_many_threads_may_add():
    with Spool(memory_bytes=20_000) as filled:

        def work(k: int) -> None:
            for i in range(500):
                filled.add(Request(np.array([i % 7, k, i])), f"{k}/{i}".encode())

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        found = contents(filled.windows(max_tokens=1000))
    assert [t for t, _, _ in found] == sorted([i % 7, k, i] for k in range(4) for i in range(500))
    assert {tag for _, _, tag in found} == {f"{k}/{i}".encode() for k in range(4) for i in range(500)}


def test_adding_ends_with_reading():
    filled = fill([([1], None, b"")])
    list(filled.windows(max_tokens=1))
    with pytest.raises(RuntimeError, match="complete"):
        filled.add(Request(np.array([1])))
    filled.close()
    with pytest.raises(RuntimeError, match="closed"):
        filled.windows(max_tokens=1)
    with pytest.raises(RuntimeError, match="closed"):
        filled.add(Request(np.array([1])))


def test_an_empty_job_has_no_windows():
    with Spool() as filled:
        assert list(filled.windows(max_tokens=10)) == []
        assert filled.unique_tokens() == 0


@pytest.mark.parametrize(
    "tokens, targets, field, words",
    [
        ([], None, "tokens", ["empty"]),
        ([1, -2], None, "tokens", ["tokens[1] is -2"]),
        ([1, 2**31], None, "tokens", [f"tokens[1] is {2**31}"]),
        ([1.5], None, "tokens", ["float64"]),
        ([[1]], None, "tokens", ["2 dimensions"]),
        ([1, 2], [0, -1], "targets", ["targets[1] is -1"]),
        ([1, 2], [0, 1, 2], "targets", ["3 targets for 2 tokens"]),
    ],
)
def test_bad_requests_are_refused_and_not_kept(tokens, targets, field, words):
    with Spool() as filled:
        with pytest.raises(InputError) as error:
            filled.add(Request(np.array(tokens), None if targets is None else np.array(targets)))
        assert error.value.field == field
        assert all(word in str(error.value) for word in words)
        assert filled.num_requests == filled.num_tokens == 0
        assert not list(filled.windows(max_tokens=1))


def test_bad_options_are_refused():
    with pytest.raises(InputError, match="memory_bytes"):
        Spool(memory_bytes=0)
    with Spool() as filled, pytest.raises(InputError, match="max_tokens"):
        filled.windows(max_tokens=0)


@given(requests, st.sampled_from([1, 1 << 20]), st.integers(1, 50))
def test_unique_tokens(job, memory_bytes, max_tokens):
    prefixes = {tuple(t[:n]) for t, _, _ in job for n in range(1, len(t) + 1)}
    with fill(job, memory_bytes=memory_bytes) as filled:
        assert filled.unique_tokens() == len(prefixes)
        assert sum(w.unique_tokens for w in filled.windows(max_tokens=max_tokens)) == len(prefixes)
        off = filled.windows(max_tokens=max_tokens, share=False)
        assert sum(w.unique_tokens for w in off) == filled.num_tokens


def request(tokens: np.ndarray, number: int, generate: bool) -> Request:
    sampling = Sampling(max_tokens=64, temperature=0.7, seed=number)
    return Request(tokens, sampling=sampling if generate else None)


def peak_bytes(num: int, generate: bool = False) -> int:
    """Returns how many bytes a job of so many requests holds at most."""

    def run() -> None:
        rng = np.random.default_rng(0)
        with Spool(memory_bytes=1 << 18) as filled:
            for i in range(num):
                filled.add(request(rng.integers(0, 50_000, 12, dtype=np.int32), i, generate), b"%d" % i)
            total = sum(w.num_requests for w in filled.windows(max_tokens=16_384))
        assert total == num

    return most_bytes(run)


@pytest.mark.parametrize("generate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_does_not_grow_with_the_job(generate):
    peak_bytes(100, generate)  # what is made once, whatever the job
    most = 4000 * 32  # less than an object has
    # Threads that other tests have left may allocate meanwhile, but not each time.
    assert any(peak_bytes(8000, generate) < peak_bytes(4000, generate) + most for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("generate", [False, True])
def test_memory_does_not_grow_with_a_large_job(generate):
    peak_bytes(100, generate)
    assert peak_bytes(200_000, generate) < peak_bytes(50_000, generate) + 150_000 * 32
