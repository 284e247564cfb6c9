"""The one thread that steps an engine for readers in event loops, of a server or of `LLM.astream`.

Requests and cancellations come from any thread, through inboxes that are emptied before a step is planned. What a step
gives leaves once, after the step: one call into each event loop, which hands every reader what is its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError, OutOfMemoryError, RankError
from ..text import Tokenizer
from ..types import Generated, Readout, Request, Result
from .fault import find_fault
from .generate import Generator
from .meter import StepInfo
from .pace import Pace
from .reading import Part, Reading, parts_of, read_next
from .replies import Reply, events_of, send
from .samples import TextPiece
from .service_thread import ServiceInbox, run_service
from .turns import Turns

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Background", "Service"]

# So often somebody who waits is asked whether it still does, though nobody woke the thread.
LOOK_SECONDS = 1.0
# What no request alone can be at fault for.
WHOLE = (RankError, OutOfMemoryError)
# After so many steps that failed one after the other, and for nobody who could be found, all that run is ended.
MOST_IN_VAIN = 3


class Background(Protocol):
    """Work that is done when no live request needs the engine."""

    def is_due(self) -> bool:
        """Returns whether it has waited long enough to go before live requests."""

    def advance(self) -> bool:
        """Does some of it; returns whether there may be more. It calls `Service.serve_live` as often as it can."""


class Service:
    """Steps an engine while anything waits for it, and sleeps while nothing does.

    Texts that others generate on the same engine run in the same steps. A step that raises an error ends the request
    that it fails for (see `fault.py`); the thread goes on. It does not keep the service: it ends with it.

    failure  of the last step, where no request alone could be at fault, and when that was (failed_at); None after a
             step that did not fail
    pace     by which requests are admitted, and how many rows a step has; None: as `Generator` does without one
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: Exception | None = None
        self.failed_at = 0.0
        self.pace: Pace | None = None
        self._readings = Turns()
        self._beside: deque[Background] = deque()
        self._replies: dict[Reply, Any] = {}  # those that have no answer yet
        self._live: dict[Reply, None] = {}  # those of them that are no batch's
        self._unbegun: dict[int, Reply] = {}  # by the keys of requests for which no step has worked yet
        self._out: dict[Reply, list[Any]] = {}
        self._lock = threading.Lock()  # of making the generator
        self._is_stepping = False
        self._in_vain = 0  # steps that failed since one did not, or somebody was found at fault
        self._inbox = ServiceInbox()
        self.close = weakref.finalize(self, self._inbox.close)
        self.close.atexit = False
        arguments = (weakref.ref(self), self._inbox)
        self._thread = threading.Thread(target=run_service, args=arguments, name="prefold-engine", daemon=True)
        self._inbox.thread = self._thread
        self._thread.start()

    # -------------------------------------------------------------------------------------------------- any thread

    async def stream(
        self, request: Request, tokenizer: Tokenizer | None, *, text: bool = True
    ) -> AsyncIterator[TextPiece | list[Generated]]:
        """Yields pieces of a text as they come (text: whether they are wanted), and last its samples.

        Left before its end, or cancelled, the request is cancelled. Raises InputError for one that cannot run.
        """
        reply = Reply(asyncio.get_running_loop(), len(request.tokens))
        try:
            await asyncio.to_thread(self.generate, reply, request, tokenizer, text=text)
            async with aclosing(events_of([reply])) as events:
                async for _, event in events:
                    yield event
        finally:
            self.cancel(reply)

    def generate(
        self, reply: Reply, request: Request, tokenizer: Tokenizer | None, *, text: bool, share: bool = True
    ) -> None:
        """Takes a request to generate. May take long, where a grammar is to be compiled.

        text   whether pieces of the text are wanted as they come
        share  whether its prompt may be shared with others', now or later
        """
        generator = self.generator
        key = generator.new_key()
        reply.keys.append(key)
        self._open(reply)
        self._unbegun[key] = reply
        self.engine.meter.add(requests=1)
        on_text = partial(self._put, reply) if text else None
        sharing = None if share else False
        on_done = partial(self._answer, reply)
        generator.add(request, tokenizer, on_done, on_text, sharing=sharing, key=key, owner=reply.owner)
        self._added(reply)

    def read(self, reply: Reply, requests: Sequence[Request], readout: Readout) -> None:
        """Takes requests whose numbers are to be read; they are answered with a Result each, together. May take long,
        where they have many tokens: they are sorted."""
        self._open(reply)
        reading = Reading(reply, requests, readout)
        targets = (0 if request.targets is None else len(request.targets) for request in requests)
        if self.engine.reads_in_slots(readout, targets):
            generator = self.generator
            self.engine.meter.add(requests=len(requests))
            for part, request in enumerate(requests):
                key = generator.new_key()
                reply.keys.append(key)
                self._unbegun[key] = reply
                on_done = partial(self._probed, reading, part)
                generator.add(request, None, on_done, readout=readout, key=key, owner=reply.owner)
            self._added(reply)
        else:
            self._inbox.came.put(parts_of(reading, self.engine))
            if reply.is_cancelled:  # before it was among those that wait
                self._forget(reply)

    def _open(self, reply: Reply) -> None:
        self._replies[reply] = None
        if not reply.owner.is_batch:
            self._live[reply] = None

    def _added(self, reply: Reply) -> None:
        self.wake()
        if reply.is_cancelled:  # before its requests were there
            self._forget(reply)
            if reply.keys:
                self.generator.cancel(*reply.keys)

    def cancel(self, reply: Reply) -> None:
        """Ends what a reply waits for before the next step. Nobody reads the reply any more."""
        reply.is_cancelled = True
        if reply in self._replies:
            self._forget(reply)
            if reply.keys:
                self.generator.cancel(*reply.keys)
            self.wake()

    def _forget(self, reply: Reply) -> None:
        self._replies.pop(reply, None)
        self._live.pop(reply, None)
        for key in reply.keys:
            self._unbegun.pop(key, None)

    @property
    def generator(self) -> Generator:
        """The engine's generator, which is made when it is first asked for."""
        with self._lock:
            generator = self.engine.generator
            if generator.pace is not self.pace:
                generator.set_pace(self.pace)
            return generator

    @property
    def has_generator(self) -> bool:
        """Returns whether the generator is there as it is wanted, so that nobody waits for it."""
        return "generator" in self.engine.__dict__ and self.engine.generator.pace is self.pace

    def set_pace(self, pace: Pace | None) -> None:
        """Admits and steps as a pace says from now on."""
        self.pace = pace
        if pace is not None:
            pace.reading = lambda: self._readings.has_interactive
            self._readings.share_of = pace.admission.share_of
            if self.engine.images is not None:
                self.engine.images.set_tenants(pace.admission.tenant_of)
        if "generator" in self.engine.__dict__:
            self.generator  # noqa: B018 - which takes it over

    def work_beside(self, work: Background) -> None:
        """Takes work that is done when no live request needs the engine."""
        self._beside.append(work)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look whether there is something to do."""
        self._inbox.came.put(None)

    @property
    def replies(self) -> list[Reply]:
        """Those that have no answer yet."""
        return list(self._replies)

    # -------------------------------------------------------------------------------------------------- this thread

    def _put(self, reply: Reply, event: Any) -> None:
        if threading.current_thread() is self._thread:
            self._out.setdefault(reply, []).append(event)
        else:  # of a step that another thread made, or a request that could not even be entered
            send({reply: [event]})

    def _answer(self, reply: Reply, answer: Any) -> None:
        if reply in self._replies:
            self._forget(reply)
            self._put(reply, answer)
            if self.pace is not None and not reply.owner.is_batch:
                self.pace.note_live()

    def _probed(self, reading: Reading, part: int, answer: Any) -> None:
        """Takes what was read of one request in the KV store; one that the store cannot hold is read in a stream."""
        if isinstance(answer, Result):
            if reading.book(part, answer):
                self._answer(reading.reply, reading.results)
        elif answer.code == "kv_memory":
            self._inbox.came.put([Part(reading, [part], len(reading.requests[part].tokens))])
        else:
            self._answer(reading.reply, answer)

    def work(self, came: Any) -> None:
        """Works until there is nothing to do, after something has come to the inbox."""
        self._take_in(came)
        while not self._inbox.is_closed:
            beside = self._beside[0] if self._beside else None  # others append to it
            self._take_in()
            pause = self._pause
            if beside is not None and (beside.is_due() or not (pause or self._has_live)):
                if not beside.advance():
                    self._beside.remove(beside)
            elif pause:
                self._take_in(self._next_within(pause))
            elif self._has_live:
                self._advance()
            else:
                break
            self._deliver()
        if "generator" in self.engine.__dict__:
            self.generator.cancel()  # those that came to an end while the last step was being made

    def serve_live(self, until: float = math.inf, *, waits: Callable[[], bool] = lambda: False) -> None:
        """Works for live requests as long as there are any, at most until that time.perf_counter(), and as long as
        `waits` says so. Whoever ends the waiting wakes this thread."""
        self._deliver()
        while not self._inbox.is_closed:
            self._take_in()
            pause = self._pause
            has_live = self._has_live
            if (time.perf_counter() > until or not (pause or has_live)) and not waits():
                return
            if pause or not has_live:
                self._take_in(self._next_within(pause or LOOK_SECONDS))
            else:
                self._advance()
            self._deliver()

    def _take_in(self, came: Any = None) -> None:
        with suppress(Empty):
            while True:
                if came is not None:
                    self._readings.add(came)
                came = self._inbox.came.get(block=False)

    @property
    def _pause(self) -> float:
        """For how many seconds nothing should be done, since only batches have something to do."""
        if self.pace is None:
            return 0.0
        if self._live:
            self.pace.note_live()
            return 0.0
        return self.pace.pause

    def _next_within(self, seconds: float) -> Any:
        """Returns what comes to the inbox within some time; None where nothing does."""
        with suppress(Empty):
            return self._inbox.came.get(timeout=seconds)

    @property
    def _has_live(self) -> bool:
        return bool(self._readings) or self._has_texts

    @property
    def _has_texts(self) -> bool:
        return "generator" in self.engine.__dict__ and self.engine.generator.has_work

    def _advance(self) -> None:
        if self._readings:
            how: dict[str, Any] = {"done": self._read_all, "fail": self._not_read, "on_step": self._between}
            how["is_due"] = self._beside[0].is_due if self._beside else lambda: False
            read_next(self.engine, self._readings, **how, begin=_note_begun)
        else:
            self._step()

    def _step(self) -> None:
        """Makes one step in the KV store. Where it fails, the request at fault is ended."""
        generator = self.engine.generator
        self._is_stepping = True
        try:
            if generator.step():
                self.failure, self._in_vain = None, 0
        except Exception as error:
            self._in_vain += 1
            is_lost = self._in_vain > MOST_IN_VAIN  # no step fails but the one for all of them
            faults = dict.fromkeys(generator.open_keys, error) if is_lost else find_fault(generator, error)
            if faults:  # they end here: the next step may fail for others that came during the search
                self._in_vain = 0
            by_key = {key: reply for reply in self.replies for key in reply.keys}
            for key, failure in faults.items():
                if key in by_key:
                    self._answer(by_key[key], failure)
                    generator.cancel(key)
                elif isinstance(failure, WHOLE) and generator.owner_of(key).is_batch:
                    generator.end(key, failure)  # the batch goes on when the engine does
                else:
                    wrong = InputError(f"the step failed: {failure}", remedy="send it again", code="internal_error")
                    generator.end(key, wrong)
            # One request may be at fault itself; where steps fail for all of several, it is something else.
            if isinstance(error, WHOLE) or (len(faults) > 1 and not generator.has_work):
                self.note_failure(error)
        finally:
            self._is_stepping = False

    def end_all(self, error: Exception) -> None:
        """Answers all that wait with an error of this thread that is no step's: what it left half done is not known."""
        self.note_failure(error)
        for reply in self.replies:
            reply.is_cancelled = True  # what is left of it in an inbox, or in `_readings`
            self._answer(reply, error)
            if reply.keys:
                with suppress(Exception):
                    self.generator.cancel(*reply.keys)
        out, self._out = self._out, {}
        send(out)

    def note_failure(self, error: Exception) -> None:
        """Takes note of the error of a step that nobody who asked is at fault for."""
        self.failure, self.failed_at = error, time.monotonic()

    def _read_all(self, reading: Reading) -> None:
        self.failure = None
        self._answer(reading.reply, reading.results)

    def _not_read(self, reply: Reply, error: Exception) -> None:
        reply.is_cancelled = True  # what is left of it in `_readings`
        self._answer(reply, error)
        if isinstance(error, WHOLE):
            self.note_failure(error)

    def _between(self, step: StepInfo) -> None:
        """After a step of a stream, makes one of what is in the KV store."""
        if not self._is_stepping:  # else this was that one
            if self.pace is not None:
                self.pace.stream_times.note(step.rows, step.seconds)
            self._deliver()
            self._take_in()
            if self._has_texts:
                self._step()
                self._deliver()

    def _deliver(self) -> None:
        if "generator" in self.engine.__dict__:
            unbegun = self._unbegun
            if unbegun:
                running = list(self.engine.generator.scheduler.running)  # another thread may make a step just now
                keys = [one.key for one in running if one.key in unbegun]
                popped = [unbegun.pop(key, None) for key in dict.fromkeys(keys)]  # others are forgetting theirs
                _note_begun([reply for reply in popped if reply is not None])
        out, self._out = self._out, {}
        if out:
            send(out)


def _note_begun(replies: Any) -> None:
    now = time.perf_counter()
    for reply in replies:
        if reply.begun_at is None:
            reply.begun_at = now
