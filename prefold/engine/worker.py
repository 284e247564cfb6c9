"""The worker protocol, without torch. A test double needs only `start`.

    ticket = worker.start(message)      gives the step to the device; on a CPU it has been computed when this returns
    ticket.result()                     waits for it: NumPy arrays

Of each stream, and of what runs in slots, at most `Facts.depth` steps are in flight: a step is started when no more
than depth - 1 tickets before it have not been asked for their results, and results are asked for in the order of the
steps. `start` may be called from any thread; steps are begun one at a time.

What a worker keeps between steps it keeps by the numbers in the messages: the path of each stream
(`StreamStep.stream`, until `forget`), and the KV store that `MakeStore` made (rows of a `SlotStep` lie there until
other rows are written over them). A `SlotStep` may name tokens of the step before that are still on the device, as
-1 - i: where the depth is 2, the host plans with tokens that it does not know yet.

A step for which memory is too small changes nothing: `start` raises OutOfMemoryError, and the host gives it again in
parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .schedule.steps import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts are what the host knows of a worker, and decides by.

    depth          steps of a stream that may be in flight; 1: a step is over when it has been started
    slot_depth     SlotSteps that may be in flight; 1: every token of a SlotStep has to be known
    max_rows       rows of a step that the device affords, where nobody says how many there may be
    max_positions  tokens of the model's context
    vocab_size     of the model
    has_logits     whether the model has an LM head
    adapters       names of the LoRA adapters; in messages they are numbers, in this order
    slot_bytes     bytes of one slot's K/V, in all planes and on all ranks
    span_rows      the most rows that see each other both ways, and are computed in one step; 0: there are none
    features       what is known of the parts that features have there, an object each: see `of`
    """

    depth: int = 1
    slot_depth: int = 1
    max_rows: int = 4096
    max_positions: int = 1 << 30
    vocab_size: int = 1 << 30
    has_logits: bool = True
    adapters: tuple[str, ...] = ()
    slot_bytes: int = 1
    span_rows: int = 0
    features: tuple[object, ...] = ()

    def of(self, kind: type[T]) -> T | None:
        """Returns the facts of one feature; None where the worker has no such part."""
        return next((facts for facts in self.features if isinstance(facts, kind)), None)


class Ticket(Protocol):
    """A ticket stands for a step that was started."""

    def result(self) -> Any:
        """Returns what the step gave, once it is there: a StepResult, a SlotResult, or None for the other messages."""
        ...


@dataclass(eq=False, slots=True)
class CompletedTicket:
    """A CompletedTicket is the ticket of a message whose result is there, None where it gives nothing to the host."""

    value: Any = None

    def result(self) -> Any:
        return self.value


DONE = CompletedTicket()


class Worker(ABC):
    """A worker computes steps. Only `start` has to be there."""

    facts: Facts = Facts()

    @abstractmethod
    def start(self, message: Message, prepared: Any = None) -> Ticket:
        """Begins a step and returns its ticket.

        prepared  what `prepare` returned for it, where it was called

        Raises OutOfMemoryError where memory is too small for the step, RankError when a rank has failed.
        """

    def prepare(self, message: Message) -> Any:
        """Returns what `start` can do ahead, in any thread, while another step runs: for instance its tensors."""
        return None

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        """Returns how many slots of this size there is memory for, beside one that is never read. kv_memory: bytes that
        they may take; None: what the device affords. Raises InputError where that is more than is free."""
        return max(1, (kv_memory or 1 << 20) // slot_bytes - 1)

    def forget(self, stream: int) -> None:  # noqa: B027
        """Lets go of a stream of which no step follows. It may be called at any time, while a step is being started
        too."""

    def compile_seconds(self) -> float:
        """Returns the seconds spent on compiling kernels since this was asked last."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """Ends what runs beside this process. No step can be started afterwards."""
