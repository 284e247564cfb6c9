from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.spec.requests import Request, Sampling
from prefold.trie import Spool, Trie

jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(0, 7)), min_size=1, max_size=25
)


def windows_of(job, **options) -> list:
    with Spool() as spool:
        for tokens, num_targets in job:
            spool.add(Request(np.array(tokens), np.zeros(min(num_targets, len(tokens)), int)))
        return list(spool.windows(**options))


def sequences_of(window) -> list[list[int]]:
    return [a.tolist() for a in np.split(window.tokens, window.offsets[1:-1])]


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@settings(max_examples=300)
@given(jobs, st.integers(1, 40))
def test_what_a_window_has_in_common_with_the_one_before(job, max_tokens):
    last: list[int] = []
    for window in windows_of(job, max_tokens=max_tokens):
        sequences = sequences_of(window)
        assert window.common == common(last, sequences[0])
        assert window.shared.tolist() == [0, *(common(a, b) for a, b in pairwise(sequences))]
        last = sequences[-1]


@given(jobs, st.integers(1, 40))
def test_nothing_is_in_common_in_order_of_arrival(job, max_tokens):
    for window in windows_of(job, max_tokens=max_tokens, share=False):
        assert window.common == 0 and not window.is_sorted


@given(jobs, st.integers(1, 40), st.booleans())
def test_windows_are_full_and_not_too_full(job, max_tokens, share):
    windows = windows_of(job, max_tokens=max_tokens, share=share)
    assert all(w.num_tokens <= max_tokens or w.num_requests == 1 for w in windows)
    for window, following in pairwise(windows):
        room = max_tokens - window.num_tokens
        assert following.offsets[1] > room or (share and room <= max_tokens // 4)


def test_windows_are_cut_between_groups():
    # Groups of 10 prompts of 10 tokens, 8 of them shared: a window of 350 tokens has room for 3 groups and a half.
    job = [([g, *range(7), i, 0], 1) for g in range(20) for i in range(10)]
    windows = windows_of(job, max_tokens=350)
    assert [w.num_tokens for w in windows] == [300] * 6 + [200]
    assert all(w.common == 0 for w in windows)


def test_of_equal_cuts_the_latest_is_taken():
    windows = windows_of([([i, 5], 0) for i in range(100)], max_tokens=21)
    assert [w.num_tokens for w in windows] == [20] * 10


def test_what_windows_compute_is_the_stream():
    """Rows of each window's trie beyond the common ones are the stream's rows."""
    rng = np.random.default_rng(0)
    job = [(rng.integers(0, 2, rng.integers(4, 12)).tolist(), 2) for _ in range(500)]
    tokens = np.concatenate([t for t, _ in job])
    whole = Trie.build(tokens, np.cumsum([0, *(len(t) for t, _ in job)])).num_rows
    windows = windows_of(job, max_tokens=200)
    own = [Trie.build(w.tokens, w.offsets, is_sorted=True).num_rows for w in windows]
    assert sum(n - w.common for n, w in zip(own, windows, strict=True)) == whole
    assert len(windows) > 10


@pytest.mark.parametrize("share", [True, False])
def test_a_request_longer_than_a_window_is_a_window(share):
    windows = windows_of([([5], 0), ([6] * 100, 0), ([7], 0)], max_tokens=10, share=share)
    assert [w.num_tokens for w in windows] == [1, 100, 1]


def test_twins_are_reads_of_the_prompt_that_came_just_before():
    prompts = [[1, 2], [1, 2], [1, 2], [3], [1, 2], [1], [1], [1, 2]]
    with Spool() as spool:
        new = [spool.add(Request(np.array(tokens, np.int32)), b"%d" % i) for i, tokens in enumerate(prompts)]
        for share in (True, False):
            (window,) = spool.windows(max_tokens=100, share=share)
            twins = {int(tag) for tag, twin in zip(window.tags, window.twins, strict=True) if twin}
            assert twins == {1, 2, 6} == {i for i, is_new in enumerate(new) if not is_new}
            kept = window.without_twins()
            assert {int(tag) for tag in kept.tags} == set(range(8)) - twins and not kept.twins.any()
            assert kept.unique_tokens == window.unique_tokens or not share
    with Spool() as spool:
        request = Request(np.array([1, 2], np.int32), sampling=Sampling())
        assert spool.add(request) and spool.add(request)
        (window,) = spool.windows(max_tokens=100)
        assert not window.twins.any() and window.without_twins() is window
