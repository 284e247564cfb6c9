"""Folding tensors of PyTorch, with gradients."""

from __future__ import annotations

import numpy as np
import torch
from slow_trie import ragged

from prefold.trie import PrefixMap


def test_tensors():
    tokens, offsets = ragged([(1, 2, 3), (1, 2, 4), (5,)])
    maps = PrefixMap.build(tokens, offsets)
    x = torch.arange(7.0)[:, None].requires_grad_()
    folded = maps.fold(x)
    assert folded[:, 0].tolist() == [0, 1, 2, 5, 6]
    assert maps.unfold(folded)[:, 0].tolist() == [0, 1, 2, 0, 1, 5, 6]
    folded.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 1, 1]
    large = PrefixMap.build(np.arange(2**24, 2**24 + 3), [0, 3])
    assert large.fold(torch.zeros(3, dtype=torch.bfloat16)).shape == (3,)


def test_a_long_index_is_not_rounded_by_the_values_type():
    maps = PrefixMap.build(np.arange(1001), [0, 1001])
    x = torch.zeros(1001, dtype=torch.float16)
    x[1000] = 1
    assert maps.fold(x)[1000] == 1
