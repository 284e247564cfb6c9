"""The merged order of a spool: its index against the requests, and ranges read by several readers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefold.spec.requests import Namespace, Request, Sampling
from prefold.trie import Spool
from prefold.trie.window import cut_into_windows

JOBS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["", "s", "ä"]),
    ),
    max_size=40,
)
MEMORY = st.sampled_from([1, 700, 1 << 20])


def fill(job, memory_bytes, generate=True) -> Spool:
    spool = Spool(memory_bytes=memory_bytes)
    for number, (tokens, adapter, salt) in enumerate(job):
        ids, tag = np.array(tokens), str(number).encode()
        if generate:
            spool.add(Request(ids, None, Sampling(seed=number), Namespace(adapter, salt)), tag)
        else:
            spool.add(Request(ids, namespace=Namespace(adapter)), tag)
    return spool


def shared(a, b) -> int:
    """Leading tokens two (adapter, salt, tokens) have in common."""
    if a[:2] != b[:2]:
        return 0
    return next((i for i, (x, y) in enumerate(zip(a[2], b[2], strict=False)) if x != y), min(len(a[2]), len(b[2])))


@given(JOBS, MEMORY, st.booleans(), st.data())
def test_the_order_is_that_of_adapter_salt_and_tokens(job, memory_bytes, generate, data):
    salts = [salt if generate else "" for _, _, salt in job]
    keys = [(adapter or "", salt, tokens) for (tokens, adapter, _), salt in zip(job, salts, strict=True)]
    places = sorted(range(len(job)), key=lambda i: (keys[i], i))
    with fill(job, memory_bytes, generate) as spool:
        order = spool.order()
        assert order is spool.order() and len(order) == len(job)
        assert order.lengths.tolist() == [len(keys[i][2]) for i in places]
        before = [None, *places]
        expected = [0 if b is None else shared(keys[b], keys[i]) for b, i in zip(before, places, strict=False)]
        assert order.shared.tolist() == expected
        start = data.draw(st.integers(0, len(job)))
        stop = data.draw(st.integers(start, len(job)))
        assert [int(r.tag) for r in order.read(start, stop)] == places[start:stop]
        windows = list(spool.windows(max_tokens=15))
        assert [int(tag) for w in windows for tag in w.tags] == places
        assert sum(w.unique_tokens for w in windows) == sum(order.lengths.tolist()) - sum(expected)


@given(JOBS, MEMORY, st.data())
def test_windows_of_ranges_make_up_the_stream(job, memory_bytes, data):
    with fill(job, memory_bytes) as spool:
        order = spool.order()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(job)), max_size=4)))
        unique = tags = 0
        for start, stop in zip([0, *cuts], [*cuts, len(job)], strict=True):
            for window in cut_into_windows(order.read(start, stop), max_tokens=12, is_sorted=True):
                names = {r.namespace for r in map(window.request, range(window.num_requests))}
                assert len(names) == 1
                unique, tags = unique + window.unique_tokens, tags + window.num_requests
        assert tags == len(job)
        again = sum(int(order.shared[c]) for c in {*cuts} if 0 < c < len(job))
        assert unique == int((order.lengths - order.shared).sum()) + again


@pytest.mark.parametrize("memory_bytes", [5000, 1 << 20])
def test_several_threads_read_ranges(memory_bytes, tmp_path):
    rng = np.random.default_rng(0)
    with Spool(memory_bytes=memory_bytes, directory=tmp_path) as spool:
        for number in range(3000):
            spool.add(Request(rng.integers(0, 3, rng.integers(1, 9))), str(number).encode())
        order = spool.order()
        bounds = range(0, 3000, 100)
        with ThreadPoolExecutor(8) as pool:
            parts = pool.map(lambda a: list(order.read(a, a + 100)), bounds)
        found = [request for part in parts for request in part]
        assert found == list(order.read(0, len(order))) == sorted(found) and len(found) == 3000
        assert spool.unique_tokens() == int((order.lengths - order.shared).sum())
        assert (spool._file is not None) == (memory_bytes == 5000)
    assert not os.listdir(tmp_path)
