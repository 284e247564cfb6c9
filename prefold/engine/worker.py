"""The worker protocol, without torch. A test double needs only `start`.

    ticket = worker.start(message)      start the step on the device; a CPU has computed it when this returns
    ticket.result()                     wait for the step and return NumPy arrays

At most `Facts.depth` steps are in flight, counted separately for each stream and for the slots. So before a step
starts, at most depth - 1 earlier results are outstanding. Results are requested in the order of the steps. Any thread
may call `start`; steps start one at a time.

A worker keeps state between steps under the numbers in messages: the path of each stream (`StreamStep.stream`, until
`forget`), and the KV store that `MakeStore` created. Rows of a `SlotStep` stay in their slots until other rows
overwrite them. A `SlotStep` may refer to token i of the previous step as -1 - i while it is still on the device. So
with a depth of 2, the host plans with tokens that it has not seen yet.

If memory is too small for a step, nothing changes: `start` raises OutOfMemoryError, and the host sends the step again
in parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .schedule.steps import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a worker by which the host plans."""

    depth: int = 1  # steps of a stream that may be in flight; 1: `start` returns after the step
    slot_depth: int = 1  # SlotSteps that may be in flight; 1: every token of a SlotStep must be known
    max_rows: int = 4096  # default for `max_batch_rows`
    max_positions: int = 1 << 30  # tokens of the model's context
    vocab_size: int = 1 << 30
    has_logits: bool = True  # the model has an LM head
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters; messages contain their places in this list
    slot_bytes: int = 1  # bytes of one slot's K/V, in all planes and on all ranks
    span_rows: int = 0  # the most rows of a span, which must be computed in one step; 0: no spans
    features: tuple[object, ...] = ()  # facts about the parts of features, one object each (see `of`)

    def of(self, kind: type[T]) -> T | None:
        """Return the facts of one feature; None if the worker has no such part."""
        return next((facts for facts in self.features if isinstance(facts, kind)), None)


class Ticket(Protocol):
    """The ticket of a step that was started."""

    def result(self) -> Any:
        """Wait for the step. Return a StepResult, a SlotResult, or None for other messages."""
        ...


@dataclass(eq=False, slots=True)
class CompletedTicket:
    """The ticket of a message that is finished already; the value is None for messages without a result."""

    value: Any = None

    def result(self) -> Any:
        return self.value


DONE = CompletedTicket()


class Worker(ABC):
    """Computes steps. A subclass must define only `start`."""

    facts: Facts = Facts()

    @abstractmethod
    def start(self, message: Message, prepared: Any = None) -> Ticket:
        """Start a step and return its ticket.

        `prepared` is the result of `prepare` for this message, if it was called. Raise OutOfMemoryError if memory is
        too small for the step, and RankError if a rank has failed.
        """

    def prepare(self, message: Message) -> Any:
        """Do the part of `start` that can be done in advance, such as creating tensors, in any thread."""
        return None

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        """Return how many slots of this size fit in memory, besides one slot that is never read.

        `kv_memory` is the limit in bytes; None: the worker chooses it. Raise InputError if the limit is larger
        than the free memory.
        """
        return max(1, (kv_memory or 1 << 20) // slot_bytes - 1)

    def forget(self, stream: int) -> None:  # noqa: B027
        """Drop the path of a finished stream. Callable at any time, even while a step is being started."""

    def compile_seconds(self) -> float:
        """Return the seconds spent on compiling kernels since the last call."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """End the worker's other processes. No step can start afterwards."""
