"""A step as the message that the worker gets, and how what it reads reaches those that wait for it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cache import SCRATCH
from ..schedule.generate_step import GenerateStep
from ..schedule.steps import Numbers, SlotResult, SlotStep
from ..types import Exits, GenerationStats, Readout, Result
from ..worker.protocol import Facts, Ticket
from .requests import NumberReader, Reader, adapter_number, kept_in
from .sampling import drawing_of


def message_of(
    facts: Facts,
    step: GenerateStep,
    readers: Sequence[Reader],
    hooks: Sequence[Callable[[GenerateStep, Sequence[Reader]], Mapping[str, Any]]] = (),
    *,
    keeps: bool = True,
) -> SlotStep:
    """Returns the message of a step, with how tokens are chosen, what is read as numbers, and the rows' adapters.

    readers  of the step's takers
    hooks    return further fields of the message
    keeps    whether hidden states may be kept
    """
    drawing = drawing_of([reader.state for reader in readers], [running.unknown for running in step.takers])
    numbers = _numbers_of(readers)
    adapters = None
    if facts.adapters:
        adapters = np.full(step.num_rows, -1, np.int64)
        for namespace, first, stop in step.namespaces:
            adapters[first:stop] = adapter_of(facts, namespace)
    message, more = step.message, dict[str, Any]()
    if keeps and (rows := kept_rows(step)):
        message = _keeping(message, np.array([row for _, row in rows], np.int64))
    for hook in hooks:
        more |= hook(step, readers)
    if drawing is None and not numbers and adapters is None and not more:
        return message
    return replace(message, drawing=drawing, numbers=numbers, adapters=adapters, **more)


def is_known(step: GenerateStep, readers: Sequence[Reader]) -> bool:
    """Returns whether the choice of the step's tokens depends on no token that is still to come."""
    return all(
        not running.unknown or reader.state is None or reader.state.independent
        for running, reader in zip(step.takers, readers, strict=True)
    )


def adapter_of(facts: Facts, namespace: Sequence[object]) -> int:
    """Returns the number of the adapter of a namespace, -1: none."""
    number = adapter_number(facts, namespace[0])  # type: ignore[arg-type]
    return -1 if number is None else number


def kept_rows(step: GenerateStep) -> list[tuple[Exits | None, int]]:
    """Returns (exits, row) of each row of a step whose hidden state is to be kept. That of a row which runs again is
    there."""
    kept = [(one, range(first, stop)) for name, first, stop in step.namespaces if (one := kept_in(name)) is not None]
    return [(one.exits, row) for one, rows in kept for row in rows if step.message.slots[row] != SCRATCH]


def _keeping(step: SlotStep, rows: np.ndarray) -> SlotStep:
    """Returns a step that keeps the hidden states of these rows."""
    read_rows = np.union1d(step.read_rows, rows)
    reads = np.searchsorted(read_rows, step.read_rows[step.reads])
    return replace(step, read_rows=read_rows, reads=reads, kept=np.searchsorted(read_rows, rows))


def _numbers_of(readers: Sequence[Reader]) -> tuple[Numbers, ...]:
    """Returns those of a step's reads that give numbers, by readout."""
    found: dict[tuple[Readout, bool], list[tuple[int, NumberReader]]] = {}
    for i, reader in enumerate(readers):
        if isinstance(reader, NumberReader):
            found.setdefault((reader.readout, reader.count is not None), []).append((i, reader))
    return tuple(
        Numbers(
            readout,
            np.array([i for i, _ in some], np.int64),
            np.concatenate([reader.targets for _, reader in some]),
            np.array([reader.count for _, reader in some], np.int64) if is_kept else None,
        )
        for (readout, is_kept), some in found.items()
    )


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """A Flight is a step that the worker was given.

    readers  of the step's takers, in their order
    ticket   gives what the step read, once the worker has it
    started  when the step's planning began, by `time.perf_counter`
    seconds  that it took so far, by part (see `Stats`)
    """

    step: GenerateStep
    message: SlotStep
    readers: Sequence[Reader]
    ticket: Ticket
    started: float
    seconds: dict[str, float]

    def take(self, result: SlotResult, stats: GenerationStats) -> tuple[list[bool], dict[Hashable, Exception]]:
        """Gives tokens and numbers to their readers, and counts the tokens.

        Returns whether each of the step's takers ends there, and {key of a request: the error of a reader of its}.
        """
        for asked, found in zip(self.message.numbers, result.numbers, strict=True):
            first = 0
            for read, size in zip(asked.reads.tolist(), asked.sizes.tolist(), strict=True):
                own, first = slice(first, first + size), first + size
                if self.step.takers[read].state == "ended":  # its request may run again, as another sequence
                    continue
                reader = self.readers[read]
                assert isinstance(reader, NumberReader)
                values = found.values[own].copy() if reader.has_rows else found.values[own.start].copy()
                reader.result = Result(values, None if found.greedy is None else found.greedy[own].copy())
        taken, ended = result.taken, list[bool]()
        failed: dict[Hashable, Exception] = {}
        for i, (running, reader, token) in enumerate(
            zip(self.step.takers, self.readers, result.ids.tolist(), strict=True)
        ):
            ends = True
            if taken is not None and not taken[i]:
                ends = False
            elif running.state != "ended":
                had = len(reader.tokens)
                try:
                    ends = reader.take(None if token == -1 else token, result.logprobs.get(i))
                except Exception as error:
                    failed[running.key] = error
                stats.generated_tokens += len(reader.tokens) - had
            ended.append(ends)
        return ended, failed
