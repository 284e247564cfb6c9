"""The one thread that steps an engine, for readers that wait in event loops.

Requests and cancellations come from any thread, through inboxes that are emptied before a step is planned. What a step
gives leaves once, after the step: one call into each event loop, which hands every reader what is its own.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ..engine import Engine
from ..engine.generate import Generator
from ..engine.samples import TextPiece
from ..errors import InputError
from ..stream import Spool
from ..text import Tokenizer
from ..types import Readout, Request, Result

__all__ = ["Background", "EngineThread", "Reply"]

_TAG = struct.Struct("<qq")  # number of the reply, part of it
# Numbers that wait are read together, as many as fill so many steps: what comes later waits for no more than these.
STEPS_A_WINDOW = 2


class Reply:
    """What comes of requests, for one reader in an event loop: pieces of texts, and last the answer.

    Pieces that nobody has taken are joined: a reader that is slow holds no more than the texts themselves.

    tokens      of its prompts
    begun_at    time.perf_counter() of the first step that worked for it; None: it waits
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int):
        self.loop, self.tokens = loop, tokens
        self.begun_at: float | None = None
        self.is_cancelled = False
        self._pieces: dict[int, TextPiece] = {}
        self._answer: Any = None
        self._came = asyncio.Event()

    def put(self, events: Sequence[Any]) -> None:
        """Takes pieces and answers; called in the reader's event loop."""
        for event in events:
            if isinstance(event, TextPiece):
                before = self._pieces.get(event.sample)
                self._pieces[event.sample] = event if before is None else joined(before, event)
            elif self._answer is None:
                self._answer = event
        self._came.set()

    async def answer(self) -> Any:
        """Returns the answer: a list of Generated, or of Results. Raises what went wrong with the request."""
        while self._answer is None:
            await self._came.wait()
            self._came.clear()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yields pieces of texts as they come, until the answer is there."""
        while self._answer is None or self._pieces:
            if not self._pieces:
                await self._came.wait()
                self._came.clear()
            pieces, self._pieces = self._pieces, {}
            for piece in pieces.values():
                yield piece


def joined(one: TextPiece, more: TextPiece) -> TextPiece:
    """Returns two pieces of a sample as one."""
    return TextPiece(one.sample, one.text + more.text, one.tokens + more.tokens)


class _Reading:
    """Numbers that are to be read for one reply."""

    def __init__(self, key: int, reply: Reply, requests: Sequence[Request], readout: Readout):
        self.key, self.reply, self.requests, self.readout = key, reply, requests, readout
        self.results: list[Result | None] = [None] * len(requests)
        self.left = len(requests)


class Background(Protocol):
    """Work that is done when no live request needs the engine."""

    def is_ready(self) -> bool:
        """Returns whether there is something to do now."""

    def advance(self) -> bool:
        """Does some of it; returns whether there may be more. It calls `EngineThread.serve_live` between its steps."""


class EngineThread:
    """Steps an engine while anything waits for it, and sleeps while nothing does.

    A step that raises an error ends what it was made for with that error; the thread goes on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: Exception | None = None  # of the last step that raised, None after one that did not
        self._inbox: SimpleQueue[_Reading | None] = SimpleQueue()
        self._readings: deque[_Reading] = deque()
        self._beside: deque[Background] = deque()
        self.on_failure: list[Callable[[Exception], None]] = []  # told of a step that failed, from this thread
        self._open: dict[int, Reply] = {}
        self._out: dict[Reply, list[Any]] = {}
        self._lock = threading.Lock()  # of making the generator
        self._is_closed = False
        self._is_stepping = False
        self._thread = threading.Thread(target=self._run, name="prefold-engine", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------------- any thread

    def generate(
        self, reply: Reply, request: Request, tokenizer: Tokenizer | None, *, text: bool, share: bool = True
    ) -> int:
        """Takes a request to generate; returns its key. May take long, where a grammar is to be compiled.

        text   whether pieces of the text are wanted as they come
        share  whether its prompt may be shared with others', now or later
        """
        generator = self.generator
        key = generator.new_key()
        self._open[key] = reply

        def done(answer: Any) -> None:
            self._open.pop(key, None)
            self._put(reply, answer)

        on_text = (lambda piece: self._put(reply, piece)) if text else None
        sharing = None if share else False
        generator.add(request, tokenizer, done, on_text, sharing=sharing, key=key)
        self._inbox.put(None)
        if reply.is_cancelled:
            self.cancel(reply, key)
        return key

    def read(self, reply: Reply, requests: Sequence[Request], readout: Readout) -> int:
        """Takes requests whose numbers are to be read; returns the key of all of them."""
        key = -1 - id(reply)  # beside those of the generator
        self._open[key] = reply
        self._inbox.put(_Reading(key, reply, requests, readout))
        return key

    def cancel(self, reply: Reply, key: int) -> None:
        """Ends a request before the next step, where it is still there. Nobody reads the reply any more."""
        reply.is_cancelled = True
        if self._open.pop(key, None) is not None:
            if key >= 0:
                self.engine.generator.cancel(key)
            self._inbox.put(None)

    @property
    def generator(self) -> Generator:
        """The engine's generator, which is made when it is first asked for."""
        with self._lock:
            return self.engine.generator

    def work_beside(self, work: Background) -> None:
        """Takes work that is done when no live request needs the engine."""
        self._beside.append(work)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look whether there is something to do."""
        self._inbox.put(None)

    @property
    def has_waiting(self) -> bool:
        """Whether there is a live request for which no step has worked yet."""
        return any(reply.begun_at is None for reply in self.replies)

    @property
    def replies(self) -> list[Reply]:
        """Those that have no answer yet."""
        return list(self._open.values())

    def close(self) -> None:
        """Ends the thread after the step that it is making."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join(10)
        for key, reply in list(self._open.items()):
            self.cancel(reply, key)

    # -------------------------------------------------------------------------------------------------- this thread

    def _put(self, reply: Reply, event: Any) -> None:
        if threading.current_thread() is self._thread:
            self._out.setdefault(reply, []).append(event)
        else:  # a request that could not even be entered
            self._send({reply: [event]})

    def _run(self) -> None:
        while not self._is_closed:
            beside = next((work for work in self._beside if work.is_ready()), None)
            self._take_in(wait=not self._has_live and beside is None)
            if self._has_live:
                self._work()
            elif beside is not None and not beside.advance():
                self._beside.remove(beside)
            self._deliver()

    def serve_live(self, until: float) -> None:
        """Works for live requests as long as there are any, and at most until that time.perf_counter()."""
        self._deliver()
        while not self._is_closed:
            self._take_in(wait=False)
            if not self._has_live or time.perf_counter() > until:
                return
            self._work()
            self._deliver()

    @property
    def _has_live(self) -> bool:
        return bool(self._readings) or self._has_texts()

    def _work(self) -> None:
        """Makes a step of texts, or reads numbers that wait. An error ends what it was made for."""
        try:
            if self._readings:
                self._read()
            else:
                self._step()
            self.failure = None
        except Exception as error:
            self.failure = error
            self._fail(error)

    def _take_in(self, *, wait: bool) -> None:
        try:
            while True:
                came = self._inbox.get(block=wait)
                wait = False
                if came is not None:
                    self._readings.append(came)
        except Empty:
            pass

    def _has_texts(self) -> bool:
        return "generator" in self.engine.__dict__ and self.engine.generator.has_work

    def _step(self) -> None:
        """Makes one step of what is generated."""
        self._is_stepping = True
        try:
            self.engine.generator.step()
        finally:
            self._is_stepping = False

    def _note_begun(self, replies: Iterable[Reply | None]) -> None:
        for reply in replies:
            if reply is not None and reply.begun_at is None:
                reply.begun_at = time.perf_counter()

    def _read(self) -> None:
        """Reads numbers that wait, those of one kind; what is generated makes a step after each of theirs."""
        readings = self._next_readings()
        if not readings:
            return
        self._note_begun(reading.reply for reading in readings)
        share = self.engine.sharing == "full"
        with Spool() as spool:
            for number, reading in enumerate(readings):
                for part, request in enumerate(reading.requests):
                    spool.add(request, _TAG.pack(number, part))
            windows = spool.windows(max_tokens=1 << 20, share=share)
            run = self.engine.run(windows, readings[0].readout, on_step=lambda _: self._between())
            try:
                with closing(run) as results:  # type: ignore[type-var]
                    for tag, result in results:
                        number, part = _TAG.unpack(tag)
                        self._book(readings[number], part, result)
                        if all(reading.reply.is_cancelled or not reading.left for reading in readings):
                            return
            except Exception as error:
                for reading in readings:
                    self._answer(reading, error)
                if not isinstance(error, InputError):
                    raise

    def _next_readings(self) -> list[_Reading]:
        """Takes those that wait and read the same as the first of them, until a window is full."""
        room = STEPS_A_WINDOW * self.engine.max_batch_rows
        found: list[_Reading] = []
        left: deque[_Reading] = deque()
        for reading in self._readings:
            if reading.reply.is_cancelled:
                self._open.pop(reading.key, None)
            elif (not found or reading.readout == found[0].readout) and (room > 0 or not found):
                room -= reading.reply.tokens
                found.append(reading)
            else:
                left.append(reading)
        self._readings = left
        return found

    def _between(self) -> None:
        if self._is_stepping:  # this was a step of what is generated
            return
        self._deliver()
        # Numbers that are read in the KV store are read by the generator's own steps.
        if self._has_texts() and not self.engine.options.cache_prefill:
            try:
                self._step()
            except Exception as error:
                self.failure = error
                self._fail(error)
            self._deliver()

    def _book(self, reading: _Reading, part: int, result: Result) -> None:
        reading.results[part] = result
        reading.left -= 1
        if not reading.left:
            self._answer(reading, reading.results)

    def _answer(self, reading: _Reading, answer: Any) -> None:
        if self._open.pop(reading.key, None) is not None:
            self._put(reading.reply, answer)

    def _fail(self, error: Exception) -> None:
        """Ends what is generated with an error of the engine."""
        keys = [key for key in list(self._open) if key >= 0]
        for key in keys:
            reply = self._open.pop(key, None)
            if reply is not None:
                self._put(reply, error)
        if keys:
            self.engine.generator.cancel(*keys)
        for told in self.on_failure:
            told(error)

    def _deliver(self) -> None:
        if "generator" in self.engine.__dict__:
            running = self.engine.generator.scheduler.running
            self._note_begun(self._open.get(sequence.key) for sequence in running)
        out, self._out = self._out, {}
        if out:
            self._send(out)

    def _send(self, out: dict[Reply, list[Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reply, list[Any]]]] = {}
        for reply, events in out.items():
            by_loop.setdefault(reply.loop, []).append((reply, events))
        for loop, mail in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_hand_out, mail)


def _hand_out(mail: list[tuple[Reply, list[Any]]]) -> None:
    for reply, events in mail:
        reply.put(events)
