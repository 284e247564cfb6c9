"""The requests of one thread that waits: how they come to an engine, and how their answers come back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any

from ..errors import InputError, PrefoldError
from ..schedule.generate_step import NOBODY
from ..text import Tokenizer
from ..types import Owner, Readout, Request
from .loop import EngineLoop
from .meter import StepInfo
from .replies import Handle
from .requests import Answer
from .samples import TextPiece

TOKENS = Readout("tokens")


class _Mailbox:
    """A _Mailbox holds what has come for one thread."""

    def __init__(self) -> None:
        # One piece, written in C: an interrupt of the thread that waits leaves no lock of it closed.
        self.came: SimpleQueue[tuple[_Call | None, Sequence[Any]]] = SimpleQueue()

    def note(self, step: StepInfo) -> None:
        """Takes note of a step."""
        self.came.put((None, [step]))

    def take(self) -> Iterator[tuple[_Call | None, Any]]:
        """Yields (call, what came of it), and (None, StepInfo) of steps, and waits where nothing has come."""
        while True:
            call, events = self.came.get()
            for event in events:
                yield call, event
            if self.came.empty():
                return


class _Call(Handle):
    """A _Call stands for one request of a thread that waits at a mailbox. tag: by which the thread knows the request"""

    def __init__(self, mailbox: _Mailbox, tag: Hashable, owner: Owner):
        super().__init__(owner=owner)
        self.tag, self._came = tag, mailbox.came

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        self._came.put((self, events))


def serve(
    engine: EngineLoop,
    windows: Iterable[Iterable[tuple[Hashable, Request]] | None],
    tokenizer: Tokenizer | None = None,
    *,
    most: int,
    stopping: Callable[[], bool] | None = None,
    on_step: Callable[[StepInfo], None] | None = None,
    is_again: Callable[[Any], bool] = lambda tag: False,
    readout: Readout = TOKENS,
    share: bool | None = None,
    text: bool = False,
    owner: Owner = NOBODY,
    failed: Callable[[Exception], InputError] | None = None,
) -> Iterator[tuple[Any, TextPiece | Answer]]:
    """Yields (tag, answer) of every request as it ends, and with `text` its (tag, piece of text) before.

    The next window is taken in when few requests wait, so that its prompts join those that still run. A window that is
    None says that nothing more is there yet: the iterator is asked again after the next step. A caller that leaves
    early cancels what is open.

    most      so many requests may wait before a window is taken in
    stopping  called after every step of the engine: once it returns True, this ends, having yielded what is there;
              None: nothing stops this
    on_step   called after every step of the engine, in this thread
    is_again  of a tag: whether its request is a further read of a prompt that another request counts
    owner     for whom the requests run
    failed    returns the answer of a request that steps fail for, where that is the request's own fault; None: the
              error is raised

    The others are as for `EngineLoop.submit`. Raises the error of steps that fail for one of the requests.
    """
    mailbox, open, left = _Mailbox(), dict[_Call, None](), iter(windows)
    more = True
    # Of each step of the engine a thread is told that has something to do after it; others sleep on.
    with engine.meter.heard_by(mailbox.note if stopping is not None or on_step is not None else None):
        try:
            while more or open:
                # Others' requests may wait too: ours must not wait for theirs.
                before = len(open)
                while more and (not open or engine.generator.num_waiting <= most):
                    window = next(left, ())
                    more = window != ()
                    if window is None:
                        break
                    for tag, request in window:
                        call = _Call(mailbox, tag, owner)
                        open[call] = None  # before it is known elsewhere: whatever happens, it is ended
                        how: dict[str, Any] = {"text": text, "share": share, "again": is_again(tag), "wakes": False}
                        engine.submit([request], readout, call, tokenizer, **how)
                engine.check_open()
                if len(open) > before:
                    engine.wake()  # only now, so that all that were taken in are in one step
                if not open:
                    continue
                with closing(mailbox.take()) as came:
                    for call, event in came:
                        if call is None:
                            if on_step is not None:
                                on_step(event)
                        elif isinstance(event, TextPiece):
                            yield call.tag, event
                        elif isinstance(event, Exception) and not isinstance(event, InputError):
                            if failed is None or isinstance(event, PrefoldError):
                                raise event
                            del open[call]
                            yield call.tag, failed(event)
                        else:
                            del open[call]
                            yield call.tag, event[0] if readout.kind != "tokens" and isinstance(event, list) else event
                if stopping is not None and stopping():
                    return
        finally:
            engine.cancel(*open)
