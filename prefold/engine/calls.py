"""How a thread runs requests: it submits them, waits, and yields their answers (`serve`, on an engine of one model) or
their texts as they come (`stream`, on any engine)."""

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
    """A Mailbox is the queue at which one thread waits for the events of its requests."""

    def __init__(self) -> None:
        # A SimpleQueue is written in C: an interrupt of the waiting thread leaves none of its locks closed.
        self.events: SimpleQueue[tuple[Call | None, Sequence[Any]]] = SimpleQueue()

    def note(self, step: StepInfo) -> None:
        """Puts a step into the mailbox. To wake a thread costs more than all else after a step."""
        self.events.put((None, [step]))

    def take(self) -> Iterator[tuple[Call | None, Any]]:
        """Waits for events, and yields all that are there: (call, event of its request) and (None, StepInfo)."""
        while True:
            call, events = self.events.get()
            for event in events:
                yield call, event
            if self.events.empty():
                return


class Call(Handle):
    """A Call is the Handle of one request whose thread waits at a mailbox. tag: the caller's name of the request"""

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
    """Yields (tag, answer) of every request as it ends.

    The next window is submitted when few requests wait, so that its prompts join the running sequences. A window of
    None means that no request is there yet: the iterator is asked again after the next step. A caller that closes the
    generator early cancels the open requests.

    max_waiting  the next window is submitted when at most this many requests wait
    stopping     called after every step of the engine: once it returns True, the generator ends, after it has yielded
                 the answers that are there; None: it ends with the last answer
    on_step      called after every step of the engine, in the caller's thread
    is_again     takes a tag, and returns whether its request is a further read of a prompt that another request counts
    owner        the tenant and the class that the requests run for
    on_failure   takes the error of steps that fail by the fault of one request, and returns the request's answer;
                 None: the error is raised

    The other arguments are those of `EngineLoop.submit`. Raises the error of steps that fail for one of the requests.
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
                    open[call] = None  # before it is submitted, so that it is cancelled whatever happens
                    again = is_again(tag)
                    engine.submit([request], readout, call, tokenizer, wakes=False, share=share, again=again)
            if len(open) > before:
                engine.wake()  # after all of them, so that they begin in one step
            if not open:
                continue
            # Where the caller does nothing after a step, the thread sleeps on.
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
    """Yields (number, TextPiece) of each request as its text comes, and (number, answer) when it ends.

    A caller that closes the generator early cancels the open requests. Raises the error of an engine that fails.
    """
    mailbox, open = Mailbox(), dict[Call, None]()
    try:
        for number, request in enumerate(requests):
            call = Call(mailbox, number, NO_OWNER)
            open[call] = None  # before it is submitted, so that it is cancelled whatever happens
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
