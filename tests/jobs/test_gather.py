"""Gathering: a record's results come back together, in any order of its requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefold.jobs.reader import Gather, with_tags
from prefold.spec.requests import Request, Result
from prefold.tasks.base import Work

RECORDS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)


@given(shapes=RECORDS, seed=st.integers(0, 2**32 - 1))
def test_every_record_comes_back_once_with_its_results_in_order(shapes, seed):
    entries, want = [], {}
    for number, items in enumerate(shapes):
        meta = {"id": f"ü{number}\ud800", "many": len(items) > 1}
        works, value = [], 0
        for i, parts in enumerate(items):
            requests = [Request(np.array([i, p], np.int32)) for p in range(parts)]
            works.append(Work(requests, {"note": i} if i % 2 else None))
        for i, (request, tag) in enumerate(with_tags(number, meta, works)):
            entries.append((tag, Result(np.array([number, *request.tokens], np.float32))))
            value = i + 1
        want[number] = (meta, [(w.note, len(w.requests)) for w in works], value)
    gather, got = Gather(), {}
    for place in np.random.default_rng(seed).permutation(len(entries)):
        done = gather.add(*entries[place])
        if done is not None:
            assert done.number not in got
            got[done.number] = done
    assert gather.waiting == 0 and got.keys() == want.keys()
    for number, done in got.items():
        meta, items, _ = want[number]
        assert done.meta == meta
        assert [(note, len(results)) for note, results in done.items] == items
        for i, (_, results) in enumerate(done.items):
            assert [r.values.tolist() for r in results] == [[number, i, p] for p in range(len(results))]
