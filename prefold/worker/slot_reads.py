"""What a step over slots gives: the tokens of its reads, and what is read as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..device import send
from ..model import CausalLM
from ..model.ops import log_sum_exp
from ..schedule.steps import Numbers, SlotResult, SlotStep
from ..types import TokenLogprobs
from .runner import Reads, head_blocks
from .sampler import Asked, Sampler, asked_of, most_likely

__all__ = ["SlotReads"]


class SlotReads:
    """The ticket of a step over slots.

    ids   int64 [reads], on the device, as of SlotResult

    On a rank other than 0 nothing is read; the rows of the head are computed, for they take all ranks.
    """

    def __init__(self, model: CausalLM, hidden: Tensor, step: SlotStep):
        """hidden: [rows that are read, hidden]"""
        self._model, self._step = model, step
        self.ids = torch.full((len(step.reads),), -1, dtype=torch.int64, device=hidden.device)
        self._logprobs: dict[int, TokenLogprobs] = {}
        parts: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in step.numbers]
        asked: list[Asked | None] = [*asked_of(step.drawing, len(step.reads))]
        for some in step.numbers:
            for read in some.reads.tolist():
                asked[read] = None
        draws = np.array([i for i, one in enumerate(asked) if one is not None], np.int64)
        for block in head_blocks(len(hidden)):
            logits = model.logits(hidden[block]) if step.head else None
            if model.ranks.rank:
                continue
            if logits is not None:
                reads = draws[_within(step.reads[draws], block)]
                self._choose(logits, reads, step.reads[reads] - block.start, [asked[i] for i in reads.tolist()])  # type: ignore[misc]
            for some, found in zip(step.numbers, parts, strict=True):
                place = _within(step.reads[some.reads], block)
                if place.size:
                    found.append(
                        _read(model, some, place, step.reads[some.reads[place]] - block.start, hidden[block], logits)
                    )
        self._numbers = [Reads(*_joined(found)) for found in parts if found]
        self._came = Reads(self.ids)

    def result(self) -> SlotResult:
        """Waits for the device."""
        return SlotResult(
            self._came.result().values, self._logprobs, tuple(numbers.result() for numbers in self._numbers)
        )

    def _choose(self, logits: Tensor, reads: np.ndarray, rows: np.ndarray, asked: Sequence[Asked]) -> None:
        sampler = Sampler()
        if not len(reads):
            return
        if self._step.drawing is None:
            self.ids[send(reads, logits.device)] = most_likely(logits, rows)
            return
        if sampler.can_start(logits.device, asked):
            self.ids[send(reads, logits.device)] = sampler.start(logits, asked, rows.tolist(), [0] * len(asked))
            return
        choice = sampler.choose(logits, asked, rows)
        ids = np.array([-1 if token is None else token for token in choice.ids], np.int64)
        self.ids[send(reads, logits.device)] = send(ids, logits.device)
        found = zip(reads.tolist(), choice.logprobs, strict=True)
        self._logprobs |= {read: one for read, one in found if one is not None}


def _within(rows: np.ndarray, block: slice) -> np.ndarray:
    return np.flatnonzero((rows >= block.start) & (rows < block.stop))


def _read(
    model: CausalLM, some: Numbers, place: np.ndarray, rows: np.ndarray, hidden: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What is read at the given places among the reads of `some`, which are at these rows of hidden and logits: values
    float32 [places, ...], and for "logprobs" whether the target is the arg-max. Twins are computed once."""
    kind = some.readout.kind
    once, twin_of = np.unique(rows, return_inverse=True)
    at, back = send(once, hidden.device), send(twin_of.reshape(-1), hidden.device)
    if kind == "logprobs":
        assert logits is not None
        sums, largest = log_sum_exp(logits[at])
        ids = send(some.targets[place].astype(np.int64), hidden.device)
        return logits[at[back], ids] - sums[back], largest[back] == ids
    if kind == "logits":
        assert logits is not None
        values = logits[at][:, torch.as_tensor(some.readout.ids, device=logits.device)]
    else:
        values = model.head(hidden[at]) if kind == "head" else hidden[at].float()
    return values[back], None


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    values = torch.cat([values for values, _ in parts])
    return values, None if parts[0][1] is None else torch.cat([greedy for _, greedy in parts])  # type: ignore[misc]
