"""What the host asks of a worker. No torch: whoever has a `start` can stand for one.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..plugins import load_plugins
from ..schedule.steps import Message

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..model import CausalLM, MediaRows

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


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """A WorkerPart is what a feature adds to a worker.

    handlers  by the type of a message the function that takes the worker and such a message, and returns its ticket
    facts     what the host knows of the part; None: nothing
    media     takes the tokens of a step, and returns the rows among them that are given in place of embeddings; None
              where the step has none. None: the feature gives no rows
    forget    takes the number of a stream that has ended, at any time and in any thread; None: the part keeps nothing
    """

    handlers: Mapping[type[Message], Callable[[Any, Any], Ticket]]
    facts: object = None
    media: Callable[[np.ndarray], MediaRows | None] | None = None
    forget: Callable[[int], object] | None = None


MakePart = Callable[["CausalLM", "Checkpoint | None", int], "WorkerPart | None"]
_MAKERS: list[MakePart] = []


def add_part(make: MakePart) -> None:
    """Registers a function that makes a feature's WorkerPart for each worker from now on. make: takes the model, the
    checkpoint from which the part loads further weights (None: there is no checkpoint) and the seed of random weights,
    and returns the part, or None where the model lacks the feature."""
    _MAKERS.append(make)


def parts_of(model: CausalLM, checkpoint: Checkpoint | None = None, seed: int = 0) -> list[WorkerPart]:
    """Returns the parts of a worker for a model; the arguments are those of `add_part`."""
    load_plugins()
    return [part for make in _MAKERS if (part := make(model, checkpoint, seed)) is not None]


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
