"""Generation in a thread of its own, for callers that wait in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from ..errors import InputError
from ..text import Tokenizer
from ..types import Generated, GenerateRequest
from .generate import Generator

__all__ = ["Service"]


class Service:
    """Steps a Generator while it has work, and sleeps while it has none.

    Requests of any event loop, and of callers that step the generator themselves, run together. A failure
    of a step ends all requests of this service with it.
    """

    def __init__(self, generator: Generator):
        self._generator = generator
        self._wake = threading.Event()
        self._closed = False
        self._waiting: dict[asyncio.Queue[Any], asyncio.AbstractEventLoop] = {}
        self._thread = threading.Thread(target=self._run, name="prefold-generate", daemon=True)
        self._thread.start()

    async def stream(
        self, request: GenerateRequest, tokenizer: Tokenizer | None, *, text: bool = True
    ) -> AsyncIterator[tuple[int, str] | list[Generated]]:
        """(sample, piece of its text) as they come (text: whether they are wanted), and last the samples.

        Left before its end, or cancelled, the request is cancelled. Raises InputError for one that cannot run.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting[events] = loop

        def put(event: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        on_text = (lambda *piece: put(piece)) if text else None
        adding = asyncio.ensure_future(asyncio.to_thread(self._generator.add, request, tokenizer, put, on_text))
        done = False
        try:
            await asyncio.shield(adding)
            self._wake.set()
            while not done:
                event = await events.get()
                done = isinstance(event, (list, InputError))  # after any other error the request may still be there
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            del self._waiting[events]
            if not done:
                # Not awaited: whoever was cancelled would not come here again. It may not even have been added yet.
                adding.add_done_callback(lambda added: loop.run_in_executor(None, self._cancel, added.result()))

    def _cancel(self, key: int | None) -> None:
        if key is not None:
            self._generator.cancel(key)

    def close(self) -> None:
        """Stop stepping; requests that still run stay where they are."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._closed and self._generator.step():
                    pass
            except Exception as error:  # whoever waits must hear of it
                for events, loop in list(self._waiting.items()):
                    loop.call_soon_threadsafe(events.put_nowait, error)
