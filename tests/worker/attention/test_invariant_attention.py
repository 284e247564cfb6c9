"""Attention that gives a query the same bits whatever other queries a step has, over rows and over slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import Case, RowCase, SlotCase, groups
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import Nest, chains, nest_of, random_nest, with_spans

DTYPES = (torch.float32, torch.bfloat16)
# (query heads, KV heads), numbers of a head: some fill tiles and vectors, some do not.
HEADS = ((6, 2), (1, 1), (14, 2), (4, 4))
DIMS = (16, 32, 40, 64, 96)


def path_of(nest: Nest, row: int) -> np.ndarray:
    """The rows that a row sees, ascending: its path, and in a span the rows of the span."""
    first = np.arange(nest.rows) if nest.first is None else nest.first
    return np.flatnonzero((first <= row) & (nest.end > row))


def alone(case: Case, query: int, make: type[Case] = RowCase) -> torch.Tensor:
    """The result of a query of a case if its path is all there is, [heads, dim]."""
    row = int(case.query_rows[query])
    path = path_of(case.nest, row)
    nest, place = chains([len(path)]), int(np.searchsorted(path, row))
    if case.nest.first is not None:
        nest = nest._replace(first=np.searchsorted(path, case.nest.first[path]))
    single = make(nest, window=case.window, query_rows=np.array([place]), heads=case.q.shape[1:2] + case.k.shape[1:2])
    single.q, single.k, single.v = case.q[query : query + 1], case.k[path], case.v[path]
    single.scale, single.cap, single.sinks, single.invariant = case.scale, case.cap, case.sinks, True
    return single.run()[0]


@pytest.mark.parametrize("make", [RowCase, SlotCase], ids=["rows", "slots"])
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=25)
def test_a_query_gets_the_same_bits_alone(make, dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    nest = random_nest(rng, data.draw(st.integers(1, 400)), data.draw(st.sampled_from([0.01, 0.05, 0.3])))
    if data.draw(st.booleans()):
        nest = with_spans(rng, nest, 0.05)
    heads, dim = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(DIMS))
    window = data.draw(st.sampled_from([None, None, 1, 30, 90]))
    every = data.draw(st.sampled_from([1, 3, 20]))
    case = make(nest, heads=heads, dim=dim, dtype=dtype, every=every, window=window)
    case.invariant, case.cap = True, data.draw(st.sampled_from([None, 5.0]))
    case.sinks = torch.randn(heads[0]) if data.draw(st.booleans()) else None
    case.check()
    found = case.run()
    for query in rng.choice(len(case.q), min(len(case.q), 4), replace=False).tolist():
        assert torch.equal(found[query], alone(case, query)), "alone, over rows"
        assert torch.equal(found[query], alone(case, query, SlotCase)), "alone, over slots"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shared", "own"), [(0, 70), (64, 1), (200, 5), (130, 300)])
def test_sequences_that_share_a_prefix_decode_as_each_alone(dtype, shared, own):
    nest, queries = groups([40, 2, 1], max(1, shared), own)
    case = SlotCase(nest, query_rows=queries, dtype=dtype, heads=(9, 3), dim=64)
    case.invariant = True
    case.check()
    found = case.run()
    for query in (0, 17, 39, 40, 42):
        assert torch.equal(found[query], alone(case, query))


@pytest.mark.parametrize("make", [RowCase, SlotCase], ids=["rows", "slots"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_changes_no_bit_of_other_sequences(make, where, bad, dtype):
    rng = np.random.default_rng(7)
    nest = random_nest(rng, 150, 0.2)
    for row in rng.choice(nest.rows, 6, replace=False).tolist():
        case = make(nest, heads=(4, 2), dtype=dtype, seed=row)
        case.invariant = True
        before = case.run()
        case.check_not_finite(where, row, bad)
        hidden = torch.from_numpy(~case.visible[:, row])
        assert torch.equal(case.run()[hidden], before[hidden])


def test_kept_as_bfloat16_under_float32_a_query_gets_the_same_bits_alone():
    nest = random_nest(np.random.default_rng(3), 200, 0.05)
    case = SlotCase(nest, dim=40)
    case.invariant = True
    case.keep(torch.bfloat16)
    case.check()
    found = case.run()
    for query in (5, 100, 199):
        assert torch.equal(found[query], alone(case, query))


def test_without_it_the_bits_depend_on_the_batch():
    """The tests above would find it: the sums of the usual kernels do have another order in another batch."""
    case = RowCase(nest_of([-1, *range(299)]), dtype=torch.float32)
    others = RowCase(random_nest(np.random.default_rng(1), 400, 0.05), dtype=torch.float32)
    differing = 0
    for one in (case, others):
        found = one.run()
        single = [RowCase(chains([len(path_of(one.nest, row))])) for row in (70, 150, 299)]
        for row, alone_case in zip((70, 150, 299), single, strict=True):
            path = path_of(one.nest, row)
            alone_case.query_rows, alone_case.q = np.array([len(path) - 1]), one.q[row : row + 1]
            alone_case.k, alone_case.v = one.k[path], one.v[path]
            differing += not torch.equal(alone_case.run()[0], found[row])
    assert differing
