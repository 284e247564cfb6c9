"""Sinks: a number for each head in the denominator of the softmax, over rows and over slots, by every form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import RowCase, SlotCase
from dense import dense_attention
from nests import random_nest

from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention


def sinks_of(heads: int) -> torch.Tensor:
    """Of which one is far below all scores, and one far above."""
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(7))
    sinks[0], sinks[-1] = -200.0, 200.0
    return sinks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RowCase, SlotCase])
@pytest.mark.parametrize("every", [1, 9])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_sinks_take_their_share(backend, kind, dtype, every, cap):
    case = kind(random_nest(np.random.default_rng(3), 120, 0.2), dtype=dtype, window=30, every=every)
    plain = case.run()
    case.cap, case.sinks = cap, sinks_of(6)
    case.check()
    found = case.run()
    assert (found[:, -1] == 0).all()
    if cap is None:
        assert torch.allclose(found[:, 0], plain[:, 0], atol=3e-2)
        assert (found[:, 1:5] - plain[:, 1:5]).abs().max() > 0.05


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", [RowCase, SlotCase])
def test_what_is_not_finite_reaches_those_that_see_it(backend, kind, where, bad):
    case = kind(random_nest(np.random.default_rng(3), 60, 0.2), heads=(4, 2))
    case.sinks = torch.tensor([0.5, -1.0, 2.0, 0.1])
    case.check_not_finite(where, 11, bad)


def test_gradients_of_sinks():
    case = RowCase(random_nest(np.random.default_rng(8), 50, 0.2), dtype=torch.float64, path=10, window=20)
    case.sinks = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    leaves = case.q, case.k, case.v, case.sinks
    for leaf in leaves:
        leaf.requires_grad_(True)
    weights = torch.randn(case.q.shape, dtype=torch.float64)
    found = torch.autograd.grad((case.run() * weights).sum(), leaves)
    dense = dense_attention(case.q, case.k, case.v, case.visible, scale=case.scale, sinks=case.sinks)
    wanted = torch.autograd.grad((dense * weights).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_sinks_of_other_heads_are_refused():
    case = RowCase(random_nest(np.random.default_rng(8), 20, 0.2))
    attention = RowAttention(Heads(6, 2, 32, torch.float32), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"sinks \[2\] do not fit 6 heads"):
        attention.attend(case.q, case.k, case.v, case.plan(), scale=1.0, sinks=torch.zeros(2))
