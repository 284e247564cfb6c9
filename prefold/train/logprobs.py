"""Reads the log-probabilities of a batch's targets under one of prefold's own models, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..model import CausalLM
from ..model.layers import Linear
from ..worker.attend import Path, StepAttend
from .batch import TrainBatch, dtype_on
from .head import target_logprobs


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
    return target_logprobs(hidden, weight, batch.target_reads, batch.target_ids)


def check_trained(model: CausalLM, batch: TrainBatch) -> None:
    """Raises the errors of `logprobs`."""
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
