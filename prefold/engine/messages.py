"""Steps in flight: build the message for the worker, and give its result to the readers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakMethod

import numpy as np

from ..spec.requests import GenerationStats, Namespace, Readout, Result
from .cache import SCRATCH
from .requests import KeptStates, Reader, ValueReader, adapter_number
from .sampling import drawing_of
from .schedule.generate_step import GenerateStep
from .schedule.steps import Reads, SlotResult, SlotStep
from .worker import Facts, Ticket


def message_of(
    facts: Facts,
    step: GenerateStep,
    readers: Sequence[Reader],
    hooks: Sequence[Callable[[GenerateStep, Sequence[Reader]], Mapping[str, Any]]] = (),
    *,
    before: InFlightStep | None = None,
) -> SlotStep:
    """Return the message of a step: the scheduler's message with sampling, read-outs and adapters.

    Args:
        readers: The reader of each consumer of the step.
        hooks: Functions of the engine's parts that return further fields of the message.
        before: The step started before it; None if it is not known any more.
    """
    drawing = None
    goes_on = step.message.follows  # the same sequences as in the previous step, generating
    if not goes_on or before is None or before.message.drawing is not None:  # else all tokens are drawn greedily
        drawing = drawing_of([reader.state for reader in readers], [sequence.unknown for sequence in step.consumers])
    adapters = None
    if facts.adapters:
        adapters = np.full(step.num_rows, -1, np.int64)
        for namespace, first, stop in step.namespaces:
            adapters[first:stop] = adapter_of(facts, namespace)
    message, more = step.message, dict[str, Any]()
    if not goes_on and (rows := kept_rows(step)):
        message = _keeping(message, np.array([row for _, row in rows], np.int64))
    read_outs = () if goes_on else _read_outs_of(message, readers)
    for hook in hooks:
        more |= hook(step, readers)
    if drawing is None and not read_outs and adapters is None and not more:
        return message
    return replace(message, drawing=drawing, read_outs=read_outs, adapters=adapters, **more)


def is_known(step: GenerateStep, readers: Sequence[Reader]) -> bool:
    """Return True if the step's tokens can be drawn without the tokens of steps in flight."""
    return all(
        not sequence.unknown or reader.state is None or reader.state.independent
        for sequence, reader in zip(step.consumers, readers, strict=True)
    )


def adapter_of(facts: Facts, namespace: Namespace) -> int:
    """Return the number of a namespace's adapter; -1 if it has none."""
    number = adapter_number(facts, namespace.adapter)
    return -1 if number is None else number


def kept_rows(step: GenerateStep) -> list[tuple[Namespace, int]]:
    """Return (namespace, row) of each row of a step if its hidden state must be kept.

    A row that runs again only for its result is left out, because its state is kept already.
    """
    return [
        (namespace, row)
        for namespace, first, stop in step.namespaces
        if namespace.part(KeptStates, None) is not None
        for row in range(first, stop)
        if step.message.slots[row] != SCRATCH
    ]


def _keeping(step: SlotStep, rows: np.ndarray) -> SlotStep:
    """Return the step with these rows added to the rows whose hidden states are kept."""
    read_rows = np.union1d(step.read_rows, rows)
    reads = np.searchsorted(read_rows, step.read_rows[step.reads])
    return replace(step, read_rows=read_rows, reads=reads, state_reads=np.searchsorted(read_rows, rows))


def _read_outs_of(step: SlotStep, readers: Sequence[Reader]) -> tuple[Reads, ...]:
    """Return one Reads per Readout among a step's readers."""
    groups: dict[tuple[Readout, bool], list[tuple[int, ValueReader]]] = {}
    for i, reader in enumerate(readers):
        if isinstance(reader, ValueReader):
            groups.setdefault((reader.readout, reader.count is not None), []).append((i, reader))
    read_outs = []
    for (readout, keeps), group in groups.items():
        consumers = np.array([i for i, _ in group], np.int64)
        targets = np.concatenate([reader.targets for _, reader in group])
        counts = np.array([reader.count for _, reader in group], np.int64) if keeps else None
        read_outs.append(Reads(readout, step.reads[consumers], targets, counts, consumers))
    return tuple(read_outs)


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that the worker has started."""

    step: GenerateStep
    message: SlotStep
    readers: Sequence[Reader]  # the reader of each of the step's consumers
    ticket: Ticket  # returns the result, once the worker has it
    started_at: float  # time.perf_counter() at the start of planning
    plan: float  # seconds of host time before the worker started the step
    model: float  # seconds of worker time so far

    def take(
        self, result: SlotResult, tokens: Sequence[int], stats: GenerationStats
    ) -> tuple[list[bool], dict[Hashable, Exception]]:
        """Give tokens and values to their readers, and count the tokens. `tokens` are the result's ids.

        Return a bool per consumer, True if it ends with the step, and {key of a request: the error of its reader}.
        """
        for reads, read_out in zip(self.message.read_outs, result.values, strict=True):
            first = 0
            for read, size in zip(reads.consumers.tolist(), reads.sizes.tolist(), strict=True):
                part, first = slice(first, first + size), first + size
                if self.step.consumers[read].state == "ended":  # the request may run again, as another sequence
                    continue
                reader = self.readers[read]
                assert isinstance(reader, ValueReader)
                values = read_out.values[part].copy() if reader.has_rows else read_out.values[part.start].copy()
                reader.result = Result(values, None if read_out.greedy is None else read_out.greedy[part].copy())
        ended = list[bool]()
        failures: dict[Hashable, Exception] = {}
        for i, (sequence, reader, token) in enumerate(zip(self.step.consumers, self.readers, tokens, strict=True)):
            ends = True
            if sequence.state != "ended":
                before = len(reader.tokens)
                try:
                    ends = reader.take(None if token == -1 else token, result.logprobs.get(i))
                except Exception as error:
                    failures[sequence.key] = error
                stats.generated_tokens += len(reader.tokens) - before
            ended.append(ends)
        return ended, failures


class Change:
    """A context for changes of the books. If an exception left them half changed, the next context rebuilds them."""

    def __init__(self, rebuild: Callable[[], None]):
        self.is_open, self._rebuild = False, WeakMethod(rebuild)  # weak, because the method's object refers to this one

    def __enter__(self) -> None:
        if self.is_open:
            self._rebuild()()  # type: ignore[misc]
        self.is_open = True

    def __exit__(self, kind: object, *error: object) -> None:
        self.is_open = kind is not None
