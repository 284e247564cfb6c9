"""What a step over slots gives: the tokens of its reads, and what is read as numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..device import send
from ..model import CausalLM
from ..schedule.steps import NOTHING, Numbers, SlotResult, SlotStep
from ..types import TokenLogprobs
from .pool import mean_of_rows
from .runner import Reads, head_blocks, logprobs_of
from .sampler import choose


class SlotReads:
    """A ticket of a step over slots has its tokens and numbers, on their way from the device.

    ids   int64 [reads], on the device, as of SlotResult

    Logits take all ranks, and rank 0 alone reads them.
    """

    def __init__(self, model: CausalLM, hidden: Tensor, step: SlotStep, states: Tensor | None = None):
        """hidden: [rows that are read, hidden]; states: [slots, hidden], of rows that are kept; None: none are"""
        self.ids = torch.full((len(step.reads),), -1, dtype=torch.int64, device=hidden.device)
        self._logprobs: dict[int, TokenLogprobs] = {}
        is_token = np.ones(len(step.reads), bool)
        for some in step.numbers:
            is_token[some.reads] = False
        tokens = np.flatnonzero(is_token)
        if len(tokens):
            self._choose(model, hidden, step, tokens)
        self._numbers = [Reads(*_read(model, some, hidden, step, states)) for some in step.numbers]
        self._came = Reads(self.ids)

    def result(self) -> SlotResult:
        """Waits for the device, and returns what the step gave."""
        return SlotResult(
            self._came.result().values, self._logprobs, tuple(numbers.result() for numbers in self._numbers)
        )

    def _choose(self, model: CausalLM, hidden: Tensor, step: SlotStep, tokens: np.ndarray) -> None:
        """Takes the tokens of those of the reads that give tokens."""
        reads, drawing = step.reads[tokens], step.drawing
        is_all = len(tokens) == len(step.reads) and not len(step.kept)
        if not is_all:  # of other rows no logits are wanted
            rows, reads = np.unique(reads, return_inverse=True)
            hidden = hidden.index_select(0, send(rows, hidden.device))
            if drawing is not None:
                drawing = replace(drawing, reads=np.searchsorted(tokens, drawing.reads))
        for block in head_blocks(len(hidden)):
            logits = model.logits(hidden[block])
            if model.ranks.rank:
                continue
            first, stop = np.searchsorted(reads, (block.start, block.stop)).tolist()
            part = drawing
            if part is not None:
                part = part.part(*np.searchsorted(part.reads, (first, stop)).tolist())
                part = replace(part, reads=part.reads - first)
            ids, logprobs = choose(logits, reads[first:stop] - block.start, part)
            self.ids[slice(first, stop) if is_all else send(tokens[first:stop], hidden.device)] = ids
            self._logprobs |= {int(tokens[first + read]): found for read, found in logprobs.items()}


def _read(
    model: CausalLM, some: Numbers, hidden: Tensor, step: SlotStep, states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what some of a step's reads give: values float32, as many rows for each as `Numbers.sizes` says, and for
    "logprobs" whether each target is the most likely token. What several reads have in common is computed once."""
    kind, counts = some.readout.kind, some.counts
    if counts is None:
        rows = step.reads[some.reads]
    else:
        assert states is not None
        hidden = states
        above = zip(some.reads.tolist(), counts.tolist(), strict=True)
        rows = np.concatenate([NOTHING, *(_slots_above(step, read, count) for read, count in above)])
    once, places = np.unique(rows, return_inverse=True)
    hidden, places = hidden.index_select(0, send(once, hidden.device)), places.reshape(-1)
    if kind == "mean":
        assert counts is not None
        return mean_of_rows(hidden.float(), places, counts), None
    if kind == "logprobs":
        order = np.argsort(places, kind="stable")
        where, targets = send(places[order], hidden.device), send(some.targets[order].astype(np.int64), hidden.device)
        values, greedy = logprobs_of(model, hidden, places[order], where, targets, some.readout.top)
        back = send(np.argsort(order), hidden.device)
        return values[back], greedy[back]
    if kind == "logits":
        values = model.logits(hidden, some.readout.ids)
    else:
        values = model.head(hidden) if kind == "head" else hidden.float()
    return values[send(places, hidden.device)], None


def _slots_above(step: SlotStep, read: int, count: int) -> np.ndarray:
    """Returns the slots of the last `count` rows that the row of a read sees, in the order of their positions."""
    row = step.read_rows[step.reads[read]]
    seen = np.flatnonzero((step.run_first <= row) & (row < step.run_last))
    sizes = step.run_count[seen]
    slots = np.repeat(step.run_start[seen] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    return slots[len(slots) - count :]
