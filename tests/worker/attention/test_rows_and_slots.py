"""What holds of attention over rows as they lie and over slots alike: layouts, threads, numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import RowCase, SlotCase, groups
from machines import threads_in_use
from nests import random_nest

pytestmark = pytest.mark.parametrize("make", [RowCase, SlotCase], ids=["rows", "slots"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_pytorch_form(make, dtype):
    make(random_nest(np.random.default_rng(2), 90, 0.2), dtype=dtype).check()


def test_head_dim_beyond_the_kernel(make):
    make(random_nest(np.random.default_rng(2), 30, 0.2), dim=272).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_fused_buffer(backend, make, dtype):
    case = make(random_nest(np.random.default_rng(4), 60, 0.2), dim=20, dtype=dtype)
    plain = case.run()
    fused = torch.cat((case.q, case.k, case.v), 1).flatten(1)
    case.q, case.k, case.v = fused.unflatten(1, (-1, 20)).split((6, 2, 2), 1)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_thread_count_gives_the_same(backend, make, dtype):
    nest, queries = groups([40, 2, 1, 1], 300, 90)
    case = make(nest, query_rows=np.sort(np.append(queries, np.arange(50, 100))), dtype=dtype)
    results = []
    for count in (1, 2, 5):
        with threads_in_use(count):
            results.append(case.run())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_stays_in_its_sequence(backend, make, where, bad, dtype):
    rng = np.random.default_rng(7)
    nest = random_nest(rng, 120, 0.3)
    for row in rng.choice(nest.rows, 12, replace=False).tolist():
        make(nest, heads=(4, 2), dtype=dtype, every=row % 2 + 1, seed=row).check_not_finite(where, row, bad)


def test_scores_far_apart_and_far_from_zero(backend, make):
    nest, queries = groups([9, 1], 80, 80)
    case = make(nest, query_rows=queries)
    case.k *= 40
    case.scale = 3.0
    # A score of 2000 is rounded by 1e-4, so its probability by as much of itself.
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=0, atol=2e-3)
