"""A step that the worker was given, and how what it reads reaches those that wait for it. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..schedule.generate_step import GenerateStep
from ..schedule.steps import SlotResult, SlotStep
from ..types import GenerationStats, Result
from ..worker.protocol import Ticket
from .requests import NumberReader, Reader


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """A Flight is a step that the worker was given.

    readers  of the step's takers, in their order
    ticket   gives what the step read, once the worker has it
    started  when the step's planning began, by `time.perf_counter`
    """

    step: GenerateStep
    message: SlotStep
    readers: Sequence[Reader]
    ticket: Ticket
    started: float

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
