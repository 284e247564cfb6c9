"""Computes the log-probabilities of a batch's targets, with gradients, and losses from them.

Each loss is a mean: over targets, pairs or sequences. `count` is how many of them the mean is over where the batch is a
part of a larger one (see `micro_batches`): the losses of the parts then add up to the loss of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..errors import InputError, no_lm_head
from ..worker.torch.layers import Linear
from ..worker.torch.logits import LogitShape
from ..worker.torch.model import CausalLM
from ..worker.torch.ops import log_sum_exp, wide
from ..worker.torch.rows import Path, StepAttend
from .batch import TrainBatch, dtype_on


def logprobs(model: CausalLM, batch: TrainBatch) -> Tensor:
    """Returns log p(target | what comes before it) of all targets, in order of the sequences: float32 [targets], or
    float64 for a model in float64.

    The result is differentiable. Under torch.no_grad the compiled kernels are used where they can be.
    Raises InputError for a model without an LM head, one that is split over ranks, one with another config than the
    batch's, and one whose weights are packed, which have no gradients.
    """
    check_trained(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    hidden = model(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    weight = model.embedding if model.lm_head is None else model.lm_head
    return target_logprobs(hidden, weight, batch.target_reads, batch.target_ids, model.shape_logits)


def check_trained(model: CausalLM, batch: TrainBatch) -> None:
    """Raises the errors of `logprobs`."""
    config = model.config
    if not config.lm_head:
        raise no_lm_head()
    if model.program.head_vectors:
        raise InputError(
            "the model's LM head has a number for each token beside its weight, which training does not compute",
            field="model",
        )
    if model.ranks.size > 1:
        raise InputError(
            "the model is split over ranks, which generate and read; they have no gradients",
            field="model",
            remedy="load it without splitting it",
        )
    if (config.planes, config.vocab_size) != (batch.config.planes, batch.config.vocab_size):
        raise InputError("the batch was laid out for another model", field="batch", remedy="build it with model.config")
    if torch.is_grad_enabled() and any(isinstance(m, Linear) and m.weight is None for m in model.modules()):
        raise InputError(
            "the model's weights are packed, which have no gradients", field="model", remedy="load it with pack=False"
        )


def sft_loss(logprobs: Tensor, *, count: int | None = None) -> Tensor:
    """Returns the cross entropy: the mean of -log p over targets."""
    _check("logprobs", logprobs)
    return -logprobs.sum() / (count or len(logprobs))


def dpo_margins(logprobs: Tensor, reference: Tensor, batch: TrainBatch) -> Tensor:
    """Returns, for each pair, how much the chosen sequence gained on the rejected one in log p, against the reference;
    [pairs].

    Sequences 2 i and 2 i + 1 of the batch are a pair: chosen, rejected. reference: log-probabilities of the same
    batch under the model that training began with. Positive where the pair is ranked as it should be.
    """
    if batch.num_sequences % 2:
        raise InputError(
            f"a batch of {batch.num_sequences} sequences is not made of pairs",
            field="batch",
            remedy="give pairs: chosen, rejected, chosen, rejected, ...",
        )
    _check("logprobs", logprobs, batch.num_targets, "targets")
    _check("reference", reference, batch.num_targets, "targets")
    ratios = batch.sums(logprobs - reference)
    return ratios[::2] - ratios[1::2]


def dpo_loss(
    logprobs: Tensor,
    reference: Tensor,
    batch: TrainBatch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    count: int | None = None,
) -> Tensor:
    """Returns the loss of direct preference optimisation, the mean of -log sigmoid(beta margin) over pairs.

    The source is Rafailov et al. 2023, equation 7. The margins are those of `dpo_margins`. label_smoothing: how likely
    a pair is the wrong way round (Mitchell 2023). Raises InputError for an odd number of sequences.
    """
    margins = beta * dpo_margins(logprobs, reference, batch)
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    return losses.sum() / (count or len(losses))


def group_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    batch: TrainBatch,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    reference: Tensor | None = None,
    kl: float = 0.0,
    count: int | None = None,
) -> Tensor:
    """Returns the clipped objective of group-relative policy optimisation, negated (GRPO, Shao et al. 2024, equations
    3, 4).

    old         float32 [targets]: log-probabilities under the policy that the completions were drawn from
    advantages  float32 [sequences], in the batch's order (advantages[batch.numbers] for a part of a larger batch)
    clip        how far the ratio of probabilities counts below 1, and above it unless `clip_high` says otherwise
    reference   float32 [targets], with kl > 0: kl times the estimate of the divergence from it is added

    It is the mean over a sequence's targets, then over sequences.
    """
    if (kl > 0) != (reference is not None):
        raise InputError("only one of kl and reference is given", field="kl", remedy="give both, or none")
    _check("logprobs", logprobs, batch.num_targets, "targets")
    _check("old", old, batch.num_targets, "targets")
    _check("advantages", advantages, batch.num_sequences, "sequences")
    if reference is not None:
        _check("reference", reference, batch.num_targets, "targets")
    owner = torch.repeat_interleave(batch.target_counts(logprobs.device))
    weights = advantages.to(logprobs)[owner]
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    losses = -torch.minimum(ratio * weights, clipped * weights)
    if reference is not None:
        ahead = reference - logprobs
        losses = losses + kl * (ahead.exp() - ahead - 1)
    return batch.means(losses).sum() / (count or batch.num_sequences)


def _check(name: str, values: object, count: int | None = None, of: str = "numbers") -> None:
    """Raise InputError unless `values` is a tensor of numbers, [count]."""
    if not isinstance(values, Tensor):
        message = f"{name} is of type {type(values).__name__}, not a tensor"
        raise InputError(message, field=name, remedy="give a tensor of torch", code="wrong_type")
    if values.ndim != 1 or (count is not None and len(values) != count):
        size = "" if count is None else f"; the batch has {count} {of}"
        message = f"{name} has the shape {[*values.shape]}{size}"
        raise InputError(message, field=name, remedy=f"give a tensor [{of}], in the batch's order", code="wrong_shape")


# The most logits that a block has; and the fewest columns that it has, however many rows there are.
BLOCK = 1 << 22
MIN_COLUMNS = 512


def target_logprobs(
    hidden: Tensor, weight: Tensor, reads: np.ndarray, ids: np.ndarray, shape: LogitShape | None = None
) -> Tensor:
    """Returns log softmax(hidden weight^T) at (reads, ids): float32 [targets], or float64 for hidden states in float64.

    hidden      [rows, hidden]
    weight      [vocabulary, hidden]
    reads, ids  int64 [targets]: for each target its row of `hidden` and its id. The log-sum-exp of a row is
                computed once, however many targets are read at it
    shape       what makes logits of the products; None: they are the logits

    It goes through the vocabulary in blocks of columns, and again in the backward pass: a block's logits are made
    anew, and the gradient of its part of the weight is complete when the block is.
    """
    return _TargetLogprobs.apply(hidden, weight, Pairs(reads, ids, hidden.device), shape)


class Pairs:
    """A Pairs holds targets sorted by their ids, so that those of a block of columns are a slice.

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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, pairs: Pairs, shape: LogitShape | None) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            h = wide(hidden)
            sums = h.new_full((len(h),), -torch.inf)
            picked = h.new_empty(len(pairs.order))
            for start, stop in _blocks(h, weight):
                logits = h @ weight[start:stop].to(h.dtype).T
                logits = logits if shape is None else shape(logits)
                sums = torch.logaddexp(sums, log_sum_exp(logits)[0])
                at = pairs.within(start, stop)
                picked[pairs.order[at]] = logits[pairs.reads[at], pairs.ids[at] - start]
            picked[pairs.order] -= sums[pairs.reads]
        ctx.save_for_backward(hidden, weight, sums)
        ctx.pairs, ctx.shape = pairs, shape
        return picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, sums = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        shape: LogitShape | None = ctx.shape
        for_hidden, for_weight, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            h = wide(hidden)
            grad = grad[pairs.order]
            # d log p(t) / d logits = one-hot(t) - softmax, summed over the targets of a row.
            of_rows = h.new_zeros(len(h)).index_add_(0, pairs.reads, grad)[:, None]
            hidden_grad = torch.zeros_like(h) if for_hidden else None
            weight_grad = torch.empty_like(weight) if for_weight else None
            for start, stop in _blocks(h, weight):
                columns = weight[start:stop].to(h.dtype)
                logits = h @ columns.T
                logits = logits if shape is None else shape(logits)
                slope = None if shape is None else shape.gradient(logits)
                logits_grad = logits.sub_(sums[:, None]).exp_().mul_(-of_rows)
                at = pairs.within(start, stop)
                places = (pairs.reads[at], pairs.ids[at] - start)
                logits_grad.index_put_(places, grad[at], accumulate=True)
                if slope is not None:
                    logits_grad *= slope
                if hidden_grad is not None:
                    hidden_grad.addmm_(logits_grad, columns)
                if weight_grad is not None:
                    weight_grad[start:stop] = logits_grad.T @ h
        return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, None, None


def _blocks(rows: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    """Yields blocks of the vocabulary, (first, past last)."""
    columns = max(MIN_COLUMNS, BLOCK // max(1, len(rows)))
    for start in range(0, len(weight), columns):
        yield start, min(start + columns, len(weight))
