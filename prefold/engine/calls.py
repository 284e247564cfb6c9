"""Run requests from a thread that waits for them.

`serve` yields answers, from an engine of one model. `stream` yields pieces of text, from any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from ..errors import InputError, PrefoldError
from ..spec.requests import Owner, Readout, Request
from ..text import Tokenizer
from .handles import Handle
from .loop import EngineLoop
from .meter import StepInfo
from .protocol import Engine
from .requests import Answer
from .samples import TextPiece
from .schedule.generate_step import NO_OWNER

TOKENS = Readout("tokens")


class Mailbox:
    """The queue at which one thread waits for the events of its requests."""

    def __init__(self) -> None:
        # A SimpleQueue is written in C, so an interrupt of the waiting thread never leaves its lock held.
        self.events: SimpleQueue[tuple[Call | None, Sequence[Any]]] = SimpleQueue()

    def note(self, step: StepInfo) -> None:
        """Put a step into the mailbox. Waking the waiting thread costs more than all other work after a step."""
        self.events.put((None, [step]))

    def take(self) -> Iterator[tuple[Call | None, Any]]:
        """Wait for events, and yield all that are ready: (call, event of its request) or (None, StepInfo)."""
        while True:
            call, events = self.events.get()
            for event in events:
                yield call, event
            if self.events.empty():
                return


class Call(Handle):
    """The Handle of one request, with a thread that waits at a mailbox. `tag` is the caller's name for the request."""

    waits = True

    def __init__(self, mailbox: Mailbox, tag: Hashable, owner: Owner):
        super().__init__(owner=owner)
        self.tag, self._mailbox = tag, mailbox

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        self._mailbox.events.put((self, events))


def serve(
    engine: EngineLoop,
    windows: Iterable[Iterable[tuple[Hashable, Request]] | None],
    tokenizer: Tokenizer | None = None,
    *,
    max_waiting: int,
    stopping: Callable[[], bool] | None = None,
    on_step: Callable[[StepInfo], None] | None = None,
    is_again: Callable[[Any], bool] = lambda tag: False,
    readout: Readout = TOKENS,
    share: bool | None = None,
    owner: Owner = NO_OWNER,
    on_failure: Callable[[Exception], InputError] | None = None,
) -> Iterator[tuple[Any, Answer]]:
    """Yield (tag, answer) of every request as it ends.

    The next window is submitted when few requests wait, so that its prompts join the running sequences. A window of
    None means that no request is ready yet; the iterator is asked again after the next step. If the caller closes the
    generator early, the open requests are cancelled.

    Args:
        max_waiting: Submit the next window when at most this many requests wait.
        stopping: Called after every step of the engine. Once it returns True, the generator yields the available
            answers and ends. None: it ends with the last answer.
        on_step: Called after every step of the engine, in the caller's thread.
        is_again: is_again(tag) -> True if the request is a twin: another read of a prompt that is counted already.
        owner: The tenant and the class (interactive or batch) of the requests.
        on_failure: Called with the error of steps that fail because of one request; returns the request's answer. None:
            raise the error.

    The other arguments are described at `EngineLoop.submit`. Raises the error of steps that fail because of a request,
    unless `on_failure` handles it.
    """
    mailbox, open, source = Mailbox(), dict[Call, None](), iter(windows)
    more = True
    engine.meter.tell(mailbox.note, True)
    try:
        while more or open:
            before = len(open)
            # Requests of other callers count as waiting too: without an open request, this caller waits for none.
            while more and (not open or engine.generator.num_waiting <= max_waiting):
                window = next(source, ())
                more = window != ()
                if window is None:
                    break
                for tag, request in window:
                    call = Call(mailbox, tag, owner)
                    open[call] = None  # before the request is submitted, so that it is cancelled in any case
                    again = is_again(tag)
                    engine.submit([request], readout, call, tokenizer, wakes=False, share=share, again=again)
            if len(open) > before:
                engine.wake()  # only once, so that all requests start in one step
            if not open:
                continue
            # If the caller does nothing after a step, its thread is not woken.
            engine.meter.tell(mailbox.note, more or stopping is not None or on_step is not None)
            for call, event in mailbox.take():
                if call is None:
                    if on_step is not None:
                        on_step(event)
                elif isinstance(event, Exception) and not isinstance(event, InputError):
                    if on_failure is None or isinstance(event, PrefoldError):
                        raise event
                    del open[call]
                    yield call.tag, on_failure(event)
                else:
                    del open[call]
                    yield call.tag, event[0] if readout.kind != "tokens" and isinstance(event, list) else event
            if stopping is not None and stopping():
                return
    finally:
        engine.cancel(*open)
        engine.meter.tell(mailbox.note, False)


def stream(
    engine: Engine, requests: Iterable[Request], tokenizer: Tokenizer | None
) -> Iterator[tuple[int, TextPiece | Answer]]:
    """Yield (number, TextPiece) of each request as its text arrives, and (number, answer) when it ends.

    If the caller closes the generator early, the open requests are cancelled. Raises the error of an engine that fails.
    """
    mailbox, open = Mailbox(), dict[Call, None]()
    try:
        for number, request in enumerate(requests):
            call = Call(mailbox, number, NO_OWNER)
            open[call] = None  # before the request is submitted, so that it is cancelled in any case
            engine.submit([request], TOKENS, call, tokenizer, text=True)
        while open:
            for source, event in mailbox.take():
                assert source is not None
                if not isinstance(event, TextPiece):
                    del open[source]
                if isinstance(event, Exception) and not isinstance(event, InputError):
                    raise event
                yield source.tag, event  # type: ignore[misc]
    finally:
        engine.cancel(*open)
