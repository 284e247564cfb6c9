"""Reads the log-probabilities of a batch's targets under a looped model, after each visit, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..model import CausalLM
from ..train.batch import TrainBatch, dtype_on
from ..train.losses import check_trained, target_logprobs
from ..worker.rows import Path, StepAttend
from .loop import Routing
from .model import LoopedLM
from .routed_model import routed

__all__ = ["RoutedLogprobs", "routed_logprobs", "visit_logprobs", "whole_sequences"]


def visit_logprobs(
    model: LoopedLM, batch: TrainBatch, ids: np.ndarray | None = None, order: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns what a looped model says of each target after each visit: log-probabilities, and the gate's logits of
    leaving, both float32 [visits, targets]. A model without a gate gives None for the latter.

    ids    int64 [visits, targets]: what each target is after each visit; by default what it is in its sequence
    order  the blocks that are visited, as many as by default; None: those of the config

    The result is differentiable. Errors are those of `logprobs`; InputError is also raised for a model that does not
    loop, and for one with a coda.
    """
    if not isinstance(model, LoopedLM):
        raise InputError("the model does not loop, so it is read once", field="model", remedy="use `logprobs`")
    check_trained(model, batch)
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    rows = model.start(prepared.tokens, prepared.positions, attend, prepared.read_rows)
    states = model.after_each_visit(rows, order)
    return _read(model, batch, states, ids)


def _read(
    model: LoopedLM, batch: TrainBatch, states: list[Tensor], ids: np.ndarray | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what `visit_logprobs` does, of the hidden states after each visit."""
    weight = model.embedding if model.lm_head is None else model.lm_head
    ids = np.broadcast_to(batch.target_ids, (len(states), batch.num_targets)) if ids is None else ids
    reads = np.arange(len(states))[:, None] * len(states[0]) + batch.target_reads
    found = target_logprobs(torch.cat(states), weight, reads.ravel(), ids.ravel()).view(ids.shape)
    if model.gate is None:
        return found, None
    return found, model.leaving(torch.stack(states))[:, torch.from_numpy(batch.target_reads).to(found.device)]


@dataclass(frozen=True, slots=True)
class RoutedLogprobs:
    """A RoutedLogprobs is what a routed model says of a batch's targets after each visit, with gradients.

    logprobs  float32 [visits, targets]
    gate      float32 [visits, targets]: the gate's logits of leaving; None without a gate
    choices   float32 [visits, n, blocks + 1]: the router's logits before each visit, of each sequence, or of each row
              where the router reads rows; None where it was not asked
    weights   float32 [visits, n, blocks + 1]: what was made of them, see `prefold.looped.routed_model.Visit`
    """

    logprobs: Tensor
    gate: Tensor | None
    choices: Tensor | None
    weights: Tensor


def routed_logprobs(
    model: LoopedLM,
    batch: TrainBatch,
    ids: np.ndarray | None = None,
    *,
    routing: Routing | None = None,
    routes: Sequence[Sequence[int]] | None = None,
) -> RoutedLogprobs:
    """Returns what a looped model with a router says of each target after each visit.

    batch    with sharing "off": a route is chosen from a whole sequence, so that sequences share no rows
    ids      int64 [visits, targets], as of `visit_logprobs`
    routing  how the router picks; by default as the config says
    routes   the blocks that each sequence visits, where the router is not to be asked

    Errors are those of `visit_logprobs`, and InputError for a batch with sharing.
    """
    if not isinstance(model, LoopedLM):
        raise InputError("the model does not loop, so it has no routes", field="model", remedy="use `logprobs`")
    check_trained(model, batch)
    visits = list(routed(model, *whole_sequences(model, batch), routing=routing, routes=routes))
    found, gate = _read(model, batch, [visit.state[batch.step.read_rows] for visit in visits], ids)
    logits = [visit.logits for visit in visits if visit.logits is not None]
    weights = torch.stack([visit.weights for visit in visits])
    return RoutedLogprobs(found, gate, torch.stack(logits) if logits else None, weights)


def whole_sequences(model: CausalLM, batch: TrainBatch) -> tuple[Tensor, Tensor, StepAttend, Tensor]:
    """Returns a batch for a model that reads whole sequences: tokens and positions of its rows, int64 [rows], who
    attends, and how many rows each sequence has, int64 [sequences]. Raises InputError where rows are shared."""
    if batch.sharing != "off":
        message = f"the batch was laid out with sharing {batch.sharing!r}, and the model reads whole sequences"
        raise InputError(message, field="sharing", remedy='build it with sharing="off"')
    prepared = batch.prepared(model.device, dtype_on(model.device, model.dtype))
    attend = StepAttend(prepared, Path(), model.config.planes, model.config.scale)
    starts = np.flatnonzero(batch.step.positions == 0)
    lengths = torch.from_numpy(np.diff([*starts, batch.num_rows])).to(model.device)
    return prepared.tokens, prepared.positions, attend, lengths
