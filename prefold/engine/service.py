"""Generation in a thread of its own, for callers that wait in an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..errors import InputError
from ..text import Tokenizer
from ..types import Generated, Request
from .calls import Call
from .generate import Generator
from .samples import TextPiece

__all__ = ["Service"]


class Service:
    """Takes turns at stepping a Generator while somebody waits in an event loop, and sleeps while nobody does.

    Requests of any event loop, and of callers that step the generator themselves, run together. A failure
    of a step ends all requests of this service with it. The thread does not keep the service: it ends with it.
    """

    def __init__(self, generator: Generator):
        self._generator = generator
        self._waiting: dict[asyncio.Queue[Any], asyncio.AbstractEventLoop] = {}
        self._work = _Work()
        self.close = weakref.finalize(self, self._work.close)
        self.close.atexit = False
        thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._work), name="prefold-generate", daemon=True
        )
        thread.start()
        self._work.thread = thread

    async def stream(
        self, request: Request, tokenizer: Tokenizer | None, *, text: bool = True
    ) -> AsyncIterator[TextPiece | list[Generated]]:
        """(sample, piece of its text) as they come (text: whether they are wanted), and last the samples.

        Left before its end, or cancelled, the request is cancelled. Raises InputError for one that cannot run.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()
        key = self._generator.new_key()

        def put(event: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        on_text = put if text else None
        self._waiting[events] = loop
        # In a thread: making what its grammar needs may take long.
        add = partial(self._generator.add, request, tokenizer, put, on_text, key=key)
        adding = asyncio.ensure_future(asyncio.to_thread(add))
        done = False
        try:
            await asyncio.shield(adding)
            self._work.came.put(None)
            while not done:
                event = await events.get()
                done = isinstance(event, (list, InputError))  # after any other error the request may still be there
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            del self._waiting[events]
            if not done:
                # Whoever was cancelled would not come here again, so it is not waited for. It may not even have been
                # added yet.
                adding.add_done_callback(lambda _: self._generator.cancel(key))

    def tell_all(self, error: Exception) -> None:
        for events, loop in list(self._waiting.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, error)

    def work(self, call: Call) -> None:
        """Take turns while there is something to do."""
        try:
            while not self._work.is_closed and self._waiting and self._generator.has_work:
                call.advance(alone=False)
        except Exception as error:  # whoever waits must hear of it
            self.tell_all(error)

    @property
    def generator(self) -> Generator:
        return self._generator


class _Work:
    """What the thread and its service have together. close: end the thread; requests that still run stay."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.came: SimpleQueue[None] = SimpleQueue()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.came.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(1.0)


def _run(service_of: weakref.ref[Service], work: _Work) -> None:
    while True:
        work.came.get()
        service = service_of()
        if service is None or work.is_closed:
            return
        call = Call(service.generator)
        service.work(call)
        call.leave()
        del service, call
