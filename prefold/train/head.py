"""Computes log-probabilities of targets in blocks, so that neither the logits nor their gradients are ever whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..model.ops import log_sum_exp, wide

# The most logits that a block has; and the fewest columns that it has, however many rows there are.
BLOCK = 1 << 22
MIN_COLUMNS = 512


def target_logprobs(hidden: Tensor, weight: Tensor, reads: np.ndarray, ids: np.ndarray) -> Tensor:
    """Returns log softmax(hidden weight^T) at (reads, ids): float32 [targets], or float64 for hidden states in float64.

    hidden      [rows, hidden]
    weight      [vocabulary, hidden]
    reads, ids  int64 [targets]: for each target its row of `hidden` and its id. The log-sum-exp of a row is
                computed once, however many targets are read at it

    It goes through the vocabulary in blocks of columns, and again in the backward pass: a block's logits are made
    anew, and the gradient of its part of the weight is complete when the block is.
    """
    return _TargetLogprobs.apply(hidden, weight, Pairs(reads, ids, hidden.device))


class Pairs:
    """Holds targets sorted by their ids, so that those of a block of columns are a slice.

    order   int64 [targets]: the number of each target, in this order
    """

    def __init__(self, reads: np.ndarray, ids: np.ndarray, device: torch.device):
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self.order, self.reads, self.ids = (torch.from_numpy(x).to(device) for x in (order, reads[order], self._ids))

    def within(self, start: int, stop: int) -> slice:
        """Returns the slice of the targets whose ids are in start .. stop."""
        return slice(*np.searchsorted(self._ids, (start, stop)).tolist())


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            h = wide(hidden)
            sums = h.new_full((len(h),), -torch.inf)
            picked = h.new_empty(len(pairs.order))
            for start, stop in _blocks(h, weight):
                logits = h @ weight[start:stop].to(h.dtype).T
                sums = torch.logaddexp(sums, log_sum_exp(logits)[0])
                at = pairs.within(start, stop)
                picked[pairs.order[at]] = logits[pairs.reads[at], pairs.ids[at] - start]
            picked[pairs.order] -= sums[pairs.reads]
        ctx.save_for_backward(hidden, weight, sums)
        ctx.pairs = pairs
        return picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, sums = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        for_hidden, for_weight, _ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            h = wide(hidden)
            grad = grad[pairs.order]
            # d log p(t) / d logits = one-hot(t) - softmax, summed over the targets of a row.
            of_rows = h.new_zeros(len(h)).index_add_(0, pairs.reads, grad)[:, None]
            hidden_grad = torch.zeros_like(h) if for_hidden else None
            weight_grad = torch.empty_like(weight) if for_weight else None
            for start, stop in _blocks(h, weight):
                columns = weight[start:stop].to(h.dtype)
                logits_grad = (h @ columns.T).sub_(sums[:, None]).exp_().mul_(-of_rows)
                at = pairs.within(start, stop)
                where = (pairs.reads[at], pairs.ids[at] - start)
                logits_grad.index_put_(where, grad[at], accumulate=True)
                if hidden_grad is not None:
                    hidden_grad.addmm_(logits_grad, columns)
                if weight_grad is not None:
                    weight_grad[start:stop] = logits_grad.T @ h
        return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, None


def _blocks(rows: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Yields blocks of the vocabulary, (first, past last)."""
    columns = max(MIN_COLUMNS, BLOCK // max(1, len(rows)))
    for start in range(0, len(weight), columns):
        yield start, min(start + columns, len(weight))
