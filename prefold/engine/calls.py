"""One caller's requests: how they come to a generator, and how their answers come back.

Every thread that waits for answers may step, one at a time: whichever finds the turn free makes the next step, which
serves all. The others sleep until something has come for them, or the turn is free again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ..text import Tokenizer
from ..types import Readout, Request
from .generate import Generator
from .requests import Answer
from .samples import TextPiece

__all__ = ["Call", "Inbox", "serve"]

# The longest that a caller sleeps without being woken, in seconds. Only after an interrupt may a caller need it.
LONGEST_SLEEP = 0.2


class Inbox:
    """An Inbox holds what has come for one caller.

    Requests know the inbox and not the caller, so that a caller that is gone can be noticed.

    open  the tag of each request that has not ended, by its key
    came  (key, piece of text or answer) in the order they came
    """

    def __init__(self, caller: weakref.ref[Call]):
        self.caller = caller
        self.open: dict[int, Hashable] = {}
        self.came: deque[tuple[int, Any]] = deque()
        # No threading.Event: an interrupt within its `set` leaves it locked. This queue is one piece.
        self._woken: SimpleQueue[None] = SimpleQueue()

    def put(self, key: int, what: Any) -> None:
        """Adds what has come, and wakes the caller."""
        self.came.append((key, what))
        self.wake()

    def wake(self) -> bool:
        """Wakes the caller; returns False where it had been woken already and has not slept since."""
        if self._woken.empty():
            self._woken.put(None)
            return True
        return False

    def sleep(self) -> None:
        """Sleeps until woken, or for LONGEST_SLEEP seconds."""
        with suppress(Empty):
            self._woken.get(timeout=LONGEST_SLEEP)


class Call:
    """A Call holds the requests of one caller of a generator.

    When the caller leaves, its open requests are ended. Where that is broken off, or the call is forgotten without it,
    the next call that is made does it.
    """

    def __init__(self, generator: Generator):
        self.generator = generator
        for inbox in list(generator.inboxes):
            if inbox.caller() is None:
                _leave(generator, inbox)
        self.inbox = Inbox(weakref.ref(self))
        self.open = self.inbox.open
        generator.inboxes[self.inbox] = None

    def leave(self) -> None:
        """Ends all requests that are open."""
        _leave(self.generator, self.inbox)

    def add(
        self,
        tag: Hashable,
        request: Request,
        tokenizer: Tokenizer | None = None,
        *,
        readout: Readout | None = None,
        sharing: bool | None = None,
        text: bool = False,
        again: bool = False,
    ) -> None:
        """Asks for the answer to a request, which `take` yields with its tag. text: whether its text is wanted piece by
        piece. The others are as for `Generator.add`."""
        key = self.generator.new_key()
        self.open[key] = tag  # before it is known elsewhere: whatever happens, it is ended when the call is left
        on_text = partial(self.inbox.put, key) if text else None
        on_done = partial(self.inbox.put, key)
        self.generator.add(request, tokenizer, on_done, on_text, readout=readout, sharing=sharing, key=key, again=again)

    def take(self) -> Iterator[tuple[Any, TextPiece | Answer]]:
        """Yields (tag, piece of text or answer) of all that has come and was not taken yet."""
        came = self.inbox.came
        while came:
            key, what = came.popleft()
            if isinstance(what, tuple):
                yield self.open[key], what
            elif key in self.open:  # not when an answer comes a second time, after an interrupt
                yield self.open.pop(key), what

    def advance(self, *, alone: bool = True) -> None:
        """Makes a step, or waits while another thread makes one.

        alone  whether a step must bring something for this call; AssertionError where none can be made then
        """
        generator, inbox = self.generator, self.inbox
        if not generator.turn.acquire(blocking=False):
            inbox.sleep()
            return
        try:
            moved = generator.step()
        finally:
            generator.turn.release()
            generator.wake_another(inbox)
        if alone and not moved and not inbox.came:
            raise AssertionError("requests wait, and no step can be made")


def _leave(generator: Generator, inbox: Inbox) -> None:
    if inbox.open:
        generator.cancel(*inbox.open)
    generator.inboxes.pop(inbox, None)
    generator.wake_another(inbox)


def serve(
    generator: Generator,
    windows: Iterable[Iterable[tuple[Hashable, Request]] | None],
    tokenizer: Tokenizer | None = None,
    *,
    stopping: Callable[[], bool] = lambda: False,
    is_again: Callable[[Any], bool] = lambda tag: False,
    **options: Any,
) -> Iterator[tuple[Any, TextPiece | Answer]]:
    """Yields (tag, answer) of every request as it ends, and with text=True its (tag, piece of text) before.

    The next window is taken in when few requests wait, so that its prompts join those that still run. A window that is
    None says that nothing more is there yet: the iterator is asked again after the next step.

    stopping  called after every step: once it returns True, this ends, having yielded what is there
    is_again  of a tag: whether its request is a further read of a prompt that another request counts
    options   of `Call.add`
    """
    call = Call(generator)
    left = iter(windows)
    more = True
    try:
        while more or call.open:
            # Others' requests may wait too: ours must not wait for theirs.
            while more and (not call.open or generator.num_waiting <= generator.options.max_running):
                window = next(left, ())
                more = window != ()
                if window is None:
                    break
                for tag, request in window:
                    call.add(tag, request, tokenizer, again=is_again(tag), **options)
            yield from call.take()
            if stopping():
                return
            if call.open:
                call.advance()
    finally:
        call.leave()
