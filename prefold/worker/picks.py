"""The tokens that the reads of a step get: chosen on the host, or on the device while the host plans the next step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..device import send
from ..model import CausalLM
from ..schedule.generate_step import GenerateStep
from .probes import Probe, read_probes
from .runner import Reads, head_blocks
from .sampler import Choice, Sampler
from .samples import Sample

__all__ = ["Flight", "Reader", "can_start", "choose", "start"]

# Who takes what a read gives; None: it has ended meanwhile.
Reader = Sample | Probe | None


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the device was given, and the tokens that come of it.

    ids      int64 [reads], on the device; -1: none, or NOT_FINITE
    came     the same, on its way to the host
    readers  of its reads
    started  when its planning began
    """

    step: GenerateStep
    ids: Tensor
    came: Reads
    readers: list[Reader]
    started: float

    def choice(self) -> Choice:
        """Waits for the device."""
        ids = self.came.result().values.tolist()
        return Choice([None if token == -1 else token for token in ids], [None] * len(ids))


def can_start(device: torch.device, readers: Iterable[Reader]) -> bool:
    """Whether the tokens of all reads can be chosen on the device, without those of the step before."""
    states = [reader.state if isinstance(reader, Sample) else None for reader in readers]
    return None not in states and Sampler.can_start(device, states)


@torch.inference_mode()
def start(model: CausalLM, sampler: Sampler, hidden: Tensor, step: GenerateStep, readers: Sequence[Reader]) -> Tensor:
    """hidden [rows that are read, hidden] -> tokens int64 [reads] on the device, not waited for; -1: none, or
    NOT_FINITE."""
    ids = torch.empty(len(readers), dtype=torch.int64, device=hidden.device)
    for block, reads in _by_block(step, len(hidden)):
        samples: list[Any] = [readers[i] for i in reads]
        rows = [step.reads[i][1] - block.start for i in reads]
        ahead = [step.reads[i][0].unknown for i in reads]
        chosen = sampler.start(model.logits(hidden[block]), [sample.state for sample in samples], rows, ahead)
        ids[send(np.array(reads), hidden.device)] = chosen
    return ids


@torch.inference_mode()
def choose(
    model: CausalLM, sampler: Sampler, hidden: Tensor, step: GenerateStep, readers: Sequence[Reader], *, head: bool
) -> tuple[Choice, float]:
    """As `start`, on the host, with log-probabilities where they are asked for; and probes get what they read. head:
    whether logits are wanted. Also returns the seconds it took beyond the logits."""
    ids: list[int | None] = [None] * len(readers)
    logprobs: list[Any] = [None] * len(readers)
    seconds = 0.0
    for block, reads in _by_block(step, len(hidden)):
        logits = model.logits(hidden[block]) if head else None
        started = time.perf_counter()
        numbers, rows, states, probes = [], [], [], []
        for i in reads:
            reader, row = readers[i], step.reads[i][1] - block.start
            if isinstance(reader, Probe):
                probes.append((reader, row))
            elif reader is not None:
                numbers.append(i)
                rows.append(row)
                states.append(reader.state)
        read_probes(model, probes, hidden[block], logits)
        if numbers:
            assert logits is not None
            choice = sampler.choose(logits, states, rows)
            for i, token, one in zip(numbers, choice.ids, choice.logprobs, strict=True):
                ids[i], logprobs[i] = token, one
        seconds += time.perf_counter() - started
    return Choice(ids, logprobs), seconds


def _by_block(step: GenerateStep, rows: int) -> Iterator[tuple[slice, list[int]]]:
    """Rows of the head at a time, and the reads of them; reads come in no particular order of rows."""
    order = sorted(range(len(step.reads)), key=lambda i: step.reads[i][1])
    place = 0
    for block in head_blocks(rows):
        first = place
        while place < len(order) and step.reads[order[place]][1] < block.stop:
            place += 1
        yield block, order[first:place]
