"""Reads the log-probabilities of a batch's targets under one of prefold's own models, with gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..model import CausalLM, LoopedLM
from ..model.layers import Linear
from ..worker.attend import Path, StepAttend
from .batch import TrainBatch, dtype_on
from .head import target_logprobs

__all__ = ["logprobs", "visit_logprobs"]


def logprobs(model: CausalLM, batch: TrainBatch) -> Tensor:
    """Returns log p(target | what comes before it) of all targets, in order of the sequences: float32 [targets], or
    float64 for a model in float64.

    The result is differentiable. Under torch.no_grad the compiled kernels are used where they can be.
    Raises InputError for a model without an LM head, one that is split over ranks, one with another config than the
    batch's, and one whose weights are packed, which have no gradients.
    """
    _check(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    hidden = model(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    weight = model.embedding if model.lm_head is None else model.lm_head
    return target_logprobs(hidden, weight, batch.target_reads, batch.target_ids)


def visit_logprobs(model: LoopedLM, batch: TrainBatch, ids: np.ndarray | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns what a looped model says of each target after each visit: log-probabilities, and the gate's logits of
    leaving, both float32 [visits, targets]. A model without a gate gives None for the latter.

    ids  int64 [visits, targets]: what each target is after each visit; by default what it is in its sequence

    The result is differentiable. Errors are those of `logprobs`; InputError is also raised for a model that does not
    loop, and for one with a coda.
    """
    if not isinstance(model, LoopedLM):
        raise InputError("the model does not loop, so it is read once", field="model", remedy="use `logprobs`")
    _check(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    states = model.after_each_visit(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    weight = model.embedding if model.lm_head is None else model.lm_head
    ids = np.broadcast_to(batch.target_ids, (len(states), batch.num_targets)) if ids is None else ids
    reads = np.arange(len(states))[:, None] * len(states[0]) + batch.target_reads
    found = target_logprobs(torch.cat(states), weight, reads.ravel(), ids.ravel()).view(ids.shape)
    if model.gate is None:
        return found, None
    return found, model.leaving(torch.stack(states))[:, torch.from_numpy(batch.target_reads).to(found.device)]


def _check(model: CausalLM, batch: TrainBatch) -> None:
    config = model.config
    if not config.lm_head:
        raise InputError("this checkpoint has no LM head, so it gives no logits", field="model", code="no_lm_head")
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
