"""Log-probabilities of a batch's targets, with gradients, and losses computed from them.

Each loss is a mean over targets, pairs or sequences. For a part of a larger batch (see `micro_batches`), pass the
number in the whole batch as `count`. The losses of the parts then add up to the loss of the whole.
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
    """Return log p(target | tokens before it) of all targets, with gradients.

    Under `torch.no_grad`, compiled kernels do the work if they can.

    Args:
        model: The model, from `load_model`.
        batch: The batch, built with `model.config`.

    Returns:
        float32 [targets], sequence by sequence; float64 for a model in float64.

    Raises:
        InputError: The model has no LM head, has an LM head with a bias or scales, is split over ranks, has packed
            weights (and gradients are enabled), or does not fit the batch's config.

    Example:
        >>> values = logprobs(model, batch)
        >>> sft_loss(values).backward()
    """
    check_trained(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    hidden = model(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    weight = model.embedding if model.lm_head is None else model.lm_head
    return target_logprobs(hidden, weight, batch.target_reads, batch.target_ids, model.shape_logits)


def check_trained(model: CausalLM, batch: TrainBatch) -> None:
    """Raise the errors of `logprobs`."""
    config = model.config
    if not config.lm_head:
        raise no_lm_head()
    if model.program.head_vectors:
        raise InputError(
            "the model's LM head has a bias or scales, which training does not support",
            field="model",
        )
    if model.ranks.size > 1:
        raise InputError(
            "the model is split over ranks, which do not compute gradients",
            field="model",
            remedy="load it without tensor_parallel",
        )
    if (config.planes, config.vocab_size) != (batch.config.planes, batch.config.vocab_size):
        raise InputError("the batch was built for another model", field="batch", remedy="build it with model.config")
    if torch.is_grad_enabled() and any(isinstance(m, Linear) and m.weight is None for m in model.modules()):
        raise InputError(
            "the model's weights are packed, which have no gradients", field="model", remedy="load it with pack=False"
        )


def sft_loss(logprobs: Tensor, *, count: int | None = None) -> Tensor:
    """Return the cross entropy, the mean of -log p over targets.

    Args:
        logprobs: float [targets], from `logprobs`.
        count: Number of targets of the whole batch, if this is a part of it. None: the number of `logprobs`.

    Returns:
        The loss in nats, a tensor [].

    Raises:
        InputError: `logprobs` is not a tensor of one dimension.

    Example:
        >>> loss = sft_loss(logprobs(model, batch))
    """
    _check("logprobs", logprobs)
    return -logprobs.sum() / (count or len(logprobs))


def dpo_margins(logprobs: Tensor, reference: Tensor, batch: TrainBatch) -> Tensor:
    """Return the DPO margin of each pair.

    The margin is (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)), where log p is summed
    over the targets of a sequence. It is positive if training moved the model towards the chosen sequence.

    Args:
        logprobs: float [targets], from `logprobs`.
        reference: float [targets], the log-probabilities of the same batch under the reference model.
        batch: The batch. Sequences 2 i and 2 i + 1 are a pair: chosen, rejected.

    Returns:
        The margins in nats, [pairs].

    Raises:
        InputError: The batch has an odd number of sequences, or a tensor has a wrong shape.

    Example:
        >>> accuracy = (dpo_margins(values, reference, batch) > 0).float().mean()
    """
    if batch.num_sequences % 2:
        raise InputError(
            f"a batch of {batch.num_sequences} sequences does not consist of pairs",
            field="batch",
            remedy="pass pairs: chosen, rejected, chosen, rejected, ...",
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
    """Return the loss of direct preference optimisation (DPO), a mean over pairs.

    The loss of a pair is -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m), with its margin m from `dpo_margins`
    and s = `label_smoothing` (Rafailov et al. 2023, equation 7; smoothing: Mitchell 2023).

    Args:
        logprobs: float [targets], from `logprobs`.
        reference: float [targets], the log-probabilities of the same batch under the reference model.
        batch: The batch. Sequences 2 i and 2 i + 1 are a pair: chosen, rejected.
        beta: Scale of the margins.
        label_smoothing: Probability that a pair is labelled the wrong way round.
        count: Number of pairs of the whole batch, if this is a part of it. None: the pairs of `batch`.

    Returns:
        The loss, a tensor [].

    Raises:
        InputError: The batch has an odd number of sequences, or a tensor has a wrong shape.

    Example:
        >>> with torch.no_grad():
        ...     reference = logprobs(reference_model, batch)
        >>> loss = dpo_loss(logprobs(model, batch), reference, batch)
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
    """Return the negated clipped objective of group-relative policy optimisation (GRPO).

    The loss of a target is -min(r A, clamp(r, 1 - clip, 1 + clip_high) A) + kl (e^d - d - 1), with r = p / p_old, the
    advantage A of its sequence, and d = log p_ref - log p (Shao et al. 2024, equations 3 and 4). Losses are averaged
    over the targets of a sequence, then over sequences.

    Args:
        logprobs: float [targets], from `logprobs`.
        old: float [targets], log-probabilities under the policy that generated the completions.
        advantages: float [sequences], in the batch's order: `advantages[batch.numbers]` for a part of a larger batch.
        batch: The batch.
        clip: Maximum distance of the ratio r below 1, and above 1 unless `clip_high` is given.
        clip_high: Maximum distance of r above 1. None: `clip`.
        reference: float [targets], log-probabilities under the reference model. Needed exactly if `kl` is above 0.
        kl: Weight of the estimated divergence from the reference.
        count: Number of sequences of the whole batch, if this is a part of it. None: the sequences of `batch`.

    Returns:
        The loss, a tensor [].

    Raises:
        InputError: Only one of `kl` and `reference` is given, or a tensor has a wrong shape.

    Example:
        >>> advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        >>> loss = group_loss(logprobs(model, batch), old, advantages, batch)
    """
    if (kl > 0) != (reference is not None):
        raise InputError("only one of kl and reference is given", field="kl", remedy="pass both or none")
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
    """Raise InputError unless `values` is a tensor [count], or of one dimension if `count` is None."""
    if not isinstance(values, Tensor):
        message = f"{name} is of type {type(values).__name__}, not a tensor"
        raise InputError(message, field=name, remedy="pass a torch tensor", code="wrong_type")
    if values.ndim != 1 or (count is not None and len(values) != count):
        size = "" if count is None else f"; the batch has {count} {of}"
        message = f"{name} has the shape {[*values.shape]}{size}"
        raise InputError(message, field=name, remedy=f"pass a tensor [{of}], in the batch's order", code="wrong_shape")


# Maximum number of logits of a block, and minimum number of its columns for any number of rows.
BLOCK = 1 << 22
MIN_COLUMNS = 512


def target_logprobs(
    hidden: Tensor, weight: Tensor, reads: np.ndarray, ids: np.ndarray, shape: LogitShape | None = None
) -> Tensor:
    """Return log softmax(hidden weight^T) at (reads, ids), with gradients.

    The log-sum-exp of a row is computed once for all its targets. The vocabulary is processed in blocks of columns, and
    again in the backward pass. The backward pass recomputes a block's logits and finishes the gradient of the block's
    part of the weight before the next block.

    Args:
        hidden: [rows, hidden].
        weight: [vocabulary, hidden].
        reads: int64 [targets], the row of `hidden` of each target.
        ids: int64 [targets], the token id of each target.
        shape: Turns products into logits. None: products are logits.

    Returns:
        float32 [targets]; float64 for hidden states in float64.
    """
    return _TargetLogprobs.apply(hidden, weight, Pairs(reads, ids, hidden.device), shape)


class Pairs:
    """Targets sorted by id, so that the targets of a block of columns are a slice.

    Attributes:
        order: int64 [targets], the original index of each sorted target.
    """

    def __init__(self, reads: np.ndarray, ids: np.ndarray, device: torch.device):
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self.order, self.reads, self.ids = (torch.from_numpy(x).to(device) for x in (order, reads[order], self._ids))

    def within(self, start: int, stop: int) -> slice:
        """Return the slice of the targets with ids in [start, stop)."""
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
    """Yield blocks of the vocabulary, (first, one past the last)."""
    columns = max(MIN_COLUMNS, BLOCK // max(1, len(rows)))
    for start in range(0, len(weight), columns):
        yield start, min(start + columns, len(weight))
