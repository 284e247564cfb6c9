"""What a step over slots gives: the tokens of its reads, and what is read as numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..device import send
from ..model import CausalLM
from ..schedule.steps import Numbers, SlotResult, SlotStep
from ..types import TokenLogprobs
from .runner import Reads, head_blocks, log_probs
from .sampler import choose

__all__ = ["SlotReads"]


class SlotReads:
    """A ticket of a step over slots has its tokens and numbers, on their way from the device.

    ids   int64 [reads], on the device, as of SlotResult

    On a rank other than 0 nothing is read; the rows of the head are computed, for they take all ranks.
    """

    def __init__(self, model: CausalLM, hidden: Tensor, step: SlotStep):
        """hidden: [rows that are read, hidden]"""
        self.ids = torch.full((len(step.reads),), -1, dtype=torch.int64, device=hidden.device)
        self._logprobs: dict[int, TokenLogprobs] = {}
        parts: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in step.numbers]
        for block in head_blocks(len(hidden)):
            logits = model.logits(hidden[block]) if step.head else None
            if model.ranks.rank:
                continue
            if logits is not None:
                self._choose(logits, step, block)
            for some, found in zip(step.numbers, parts, strict=True):
                rows = step.reads[some.reads]
                place = np.flatnonzero((rows >= block.start) & (rows < block.stop))
                if place.size:
                    found.append(_read(model, some, place, rows[place] - block.start, hidden[block], logits))
        if step.head:
            for some in step.numbers:
                self.ids[send(some.reads, hidden.device)] = -1
        self._numbers = [Reads(*_joined(found)) for found in parts if found]
        self._came = Reads(self.ids)

    def result(self) -> SlotResult:
        """Waits for the device, and returns what the step gave."""
        return SlotResult(
            self._came.result().values, self._logprobs, tuple(numbers.result() for numbers in self._numbers)
        )

    def _choose(self, logits: Tensor, step: SlotStep, block: slice) -> None:
        """Takes the tokens of the reads in a block of rows."""
        first, stop = np.searchsorted(step.reads, (block.start, block.stop)).tolist()
        drawing = step.drawing
        if drawing is not None:
            drawing = drawing.part(*np.searchsorted(drawing.reads, (first, stop)).tolist())
            drawing = replace(drawing, reads=drawing.reads - first)
        self.ids[first:stop], logprobs = choose(logits, step.reads[first:stop] - block.start, drawing)
        self._logprobs |= {first + read: found for read, found in logprobs.items()}


def _read(
    model: CausalLM, some: Numbers, place: np.ndarray, rows: np.ndarray, hidden: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what is read at the given places among the reads of `some`, which are at these rows of hidden and logits:
    values float32 [places, ...], and for "logprobs" whether the target is the arg-max. Twins are computed once."""
    kind = some.readout.kind
    once, twin_of = np.unique(rows, return_inverse=True)
    at, back = send(once, hidden.device), send(twin_of.reshape(-1), hidden.device)
    if kind == "logprobs":
        assert logits is not None
        targets = send(some.targets[place].astype(np.int64), hidden.device)
        return log_probs(logits[at], back, targets, some.readout.top)
    if kind == "logits":
        assert logits is not None
        values = logits[at][:, torch.as_tensor(some.readout.ids, device=logits.device)]
    else:
        values = model.head(hidden[at]) if kind == "head" else hidden[at].float()
    return values[back], None


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    values = torch.cat([values for values, _ in parts])
    return values, None if parts[0][1] is None else torch.cat([greedy for _, greedy in parts])  # type: ignore[misc]
