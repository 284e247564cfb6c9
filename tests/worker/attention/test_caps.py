"""Soft caps on scores, over rows and over slots, by the compiled kernels and by PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import RowCase, SlotCase
from nests import random_nest

CAPS = (0.5, 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RowCase, SlotCase])
@pytest.mark.parametrize("every", [1, 9])
@pytest.mark.parametrize("cap", CAPS)
def test_scores_are_capped(backend, kind, cap, dtype, every):
    nest = random_nest(np.random.default_rng(3), 120, 0.2)
    case = kind(nest, dtype=dtype, window=30, every=every)
    case.cap = cap
    case.check()
    plain = kind(nest, dtype=dtype, window=30, every=every)
    assert (case.run() - plain.run()).abs().max() > 0.05  # the cap shows


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", [RowCase, SlotCase])
def test_what_is_not_finite_reaches_those_that_see_it(backend, kind, where, bad):
    case = kind(random_nest(np.random.default_rng(3), 60, 0.2), heads=(4, 2))
    case.cap = 4.0
    case.check_not_finite(where, 11, bad)


def test_gradients_of_capped_scores():
    nest = random_nest(np.random.default_rng(8), 50, 0.2)
    case = RowCase(nest, dtype=torch.float64, path=10, window=20)
    case.cap = 0.5
    for name in ("q", "k", "v"):
        getattr(case, name).requires_grad_(True)
    weights = torch.randn(case.q.shape, dtype=torch.float64)
    found = torch.autograd.grad((case.run() * weights).sum(), (case.q, case.k, case.v))
    k, v = case.k.repeat_interleave(3, 1), case.v.repeat_interleave(3, 1)
    scores = case.cap * torch.tanh(torch.einsum("ihd,jhd->hij", case.q, k) * case.scale / case.cap)
    probabilities = scores.masked_fill(~torch.from_numpy(case.visible), -torch.inf).softmax(-1)
    result = torch.einsum("hij,jhd->ihd", probabilities, v)
    wanted = torch.autograd.grad((result * weights).sum(), (case.q, case.k, case.v))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
