"""The one thread that steps an engine.

Requests and cancellations come from any thread, through an inbox that is emptied before a step is planned. What a step
gives leaves once, after the step: in one call into each event loop, and in one entry of the queue of each thread that
waits.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from ..cache import RadixCache
from ..errors import ForkedError, InputError, OutOfMemoryError, PrefoldError, RankError
from ..schedule.generate_step import NOBODY
from ..schedule.parts import EnginePart
from ..text import Tokenizer
from ..types import Owner, Readout, Request, Result, Stats
from .fault import find_fault
from .generate import Generator
from .meter import Meter, StepInfo
from .pace import Pace
from .reading import Part, Reading, parts_of, read_next
from .replies import Reply, send
from .turns import Turns

__all__ = ["Background", "EngineLoop", "Sink", "Snapshot"]

T = TypeVar("T")

# So often whoever waits is asked whether it still does, though nobody woke the thread.
LOOK_SECONDS = 1.0
# What no request alone can be at fault for.
WHOLE = (RankError, OutOfMemoryError)
# After so many steps that failed one after the other, and for no request that could be found, all that run is ended.
MOST_IN_VAIN = 3
# After an error of its own the thread tries again so much later.
FAILED_SECONDS = 0.1
CLOSED = "the engine was closed"
# The longest that closing waits for a step that is being made.
CLOSING_SECONDS = 10.0


class Background(Protocol):
    """Work that is done when no live request needs the engine."""

    def is_due(self) -> bool:
        """Returns whether it has waited long enough to go before live requests."""

    def advance(self) -> bool:
        """Does some of it; returns whether there may be more. It calls `EngineLoop.serve_live` as often as it can."""


class Sink(Protocol):
    """A Sink takes what comes of requests, in the engine's thread, once after each step."""

    def put(self, events: Sequence[Any]) -> None:
        """Takes events in their order. It neither waits nor raises anything."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A Snapshot says what an engine holds, in numbers.

    stats          what was counted
    slots          slots of the KV store; 0: there is none yet
    used_slots     those of them that rows have
    cache_seconds  that the cache has taken; None: nothing is kept
    """

    stats: Stats
    slots: int = 0
    used_slots: int = 0
    cache_seconds: float | None = None


class _Inbox:
    """What the thread and its engine have together: functions to call, parts of numbers to read, or None to look."""

    def __init__(self) -> None:
        self.came: SimpleQueue[Any] = SimpleQueue()
        self.is_closed = False
        self.process = os.getpid()
        self.thread: threading.Thread | None = None  # entered by the thread itself, once it runs
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Returns whether the thread that asks is the only one: an interrupt may leave another just begun."""
        with self._lock:
            if self.thread is None:
                self.thread = threading.current_thread()
            return self.thread is threading.current_thread()

    def end_called(self) -> None:
        """Ends the functions that wait to be called, after the thread has ended."""
        with suppress(Empty):
            while True:
                if isinstance(came := self.came.get(block=False), _Called):
                    came.end(PrefoldError(CLOSED))

    def close(self) -> None:
        """Ends the thread, after the step that is being made."""
        self.is_closed = True
        self.came.put(None)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(CLOSING_SECONDS)


class _Called:
    """A function that another thread wants called in the engine's, and what came of it."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._came: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call(self) -> None:
        try:
            self._came.put((self._function(), None))
        except BaseException as error:
            self._came.put((None, error))

    def end(self, error: Exception) -> None:
        self._came.put((None, error))

    def result(self) -> Any:
        value, error = self._came.get()
        if error is not None:
            raise error
        return value


class EngineLoop:
    """Steps an engine while anything waits for it, and sleeps while nothing does.

    The thread begins with the first request. A step that raises an error ends the requests that it fails for (see
    `fault.py`), and the thread goes on. It does not keep the engine: it ends with it. A subclass has the attributes
    meter, parts, and `make_generator`.

    failure  of the last step, where no request alone could be at fault, and when that was (failed_at); None after a
             step that did not fail
    pace     by which requests are admitted, and how many rows a step has; None: as `Generator` does without one
    """

    meter: Meter
    parts: Sequence[EnginePart]
    make_generator: Callable[[], Generator]

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.failed_at = 0.0
        self.pace: Pace | None = None
        self._generator: Generator | None = None
        self._readings = Turns()
        self._beside: deque[Background] = deque()
        self._replies: dict[Reply, Any] = {}  # those that have no answer yet
        self._live: dict[Reply, None] = {}  # those of them that are no batch's
        self._unbegun: dict[int, Reply] = {}  # by the keys of requests for which no step has worked yet
        self._out: dict[Sink | Reply, list[Any]] = {}
        self._lock = threading.Lock()  # of making the generator
        self._is_stepping = False
        self._in_vain = 0  # steps that failed since one did not, or a request was found at fault
        self._inbox = _Inbox()
        self._end = weakref.finalize(self, self._inbox.close)

    # -------------------------------------------------------------------------------------------------- any thread

    def add(
        self,
        sink: Sink,
        key: int,
        request: Request,
        tokenizer: Tokenizer | None = None,
        *,
        readout: Readout | None = None,
        sharing: bool | None = None,
        text: bool = False,
        again: bool = False,
        owner: Owner = NOBODY,
    ) -> None:
        """Takes a request; (key, piece of its text) and last (key, answer) come to the sink, once the thread is woken.
        May take long, where a grammar is to be compiled.

        key   from `new_key`
        text  whether the text is wanted piece by piece

        The others are as for `Generator.add`. An answer is an exception where steps fail for the request.
        """

        def put(what: Any) -> None:
            self._post(sink, (key, what))

        how: dict[str, Any] = {"readout": readout, "sharing": sharing, "owner": owner, "again": again}
        self.generator.add(request, tokenizer, put, put if text else None, key=key, **how)

    def new_key(self) -> int:
        """Returns a key for a request that no other request of this engine has."""
        return self.generator.new_key()

    def cancel_keys(self, *keys: int) -> None:
        """Ends what is still there of these requests before the next step."""
        if keys:
            self.generator.cancel(*keys)
            self.wake()

    def call(self, function: Callable[[], T]) -> T:
        """Returns what a function returns, or raises what it raises. The engine's thread calls it, between steps."""
        if self._inbox.is_closed or threading.current_thread() is self._inbox.thread:
            return function()
        called = _Called(function)
        self._send(called)
        result: T = called.result()
        return result

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Lets the engine's thread call a function after what it was given before; does not wait for it."""
        if self._inbox.is_closed:
            function(*arguments)
        else:
            self._send(_Called(partial(function, *arguments)))

    def submit(
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
        self.meter.add(requests=1)
        on_text = partial(self._post, reply) if text else None
        sharing = None if share else False
        on_done = partial(self._answer, reply)
        generator.add(request, tokenizer, on_done, on_text, sharing=sharing, key=key, owner=reply.owner)
        self._added(reply)

    def submit_numbers(self, reply: Reply, requests: Sequence[Request], readout: Readout) -> None:
        """Takes requests whose numbers are to be read; they are answered with a Result each, together. May take long,
        where they have many tokens: they are sorted."""
        self._open(reply)
        reading = Reading(reply, requests, readout)
        targets = (0 if request.targets is None else len(request.targets) for request in requests)
        if self.reads_in_slots(readout, targets):  # type: ignore[attr-defined]
            generator = self.generator
            self.meter.add(requests=len(requests))
            for part, request in enumerate(requests):
                key = generator.new_key()
                reply.keys.append(key)
                self._unbegun[key] = reply
                on_done = partial(self._probed, reading, part)
                generator.add(request, None, on_done, readout=readout, key=key, owner=reply.owner)
            self._added(reply)
        else:
            self._send(parts_of(reading, self))  # type: ignore[arg-type]
            self._added(reply)

    def cancel(self, reply: Reply) -> None:
        """Ends what a reply waits for before the next step. The reply is read no more."""
        reply.is_cancelled = True
        if reply in self._replies:
            self._forget(reply)
            self.cancel_keys(*reply.keys)

    @property
    def generator(self) -> Generator:
        """Returns what generates text. It holds the KV store, and is made when it is first asked for."""
        with self._lock:
            if self._generator is None:
                generator = self.make_generator()
                if self.pace is not None:
                    generator.set_pace(self.pace)
                generator.scheduler.tree.owner = self._owner()
                self._generator = generator
            return self._generator

    def snapshot(self) -> Snapshot:
        """Returns what the engine holds now; waits for no step."""
        generator = self._generator
        if generator is None:
            return Snapshot(self.meter.stats)
        pool, cache = generator.scheduler.pool, generator.scheduler.cache
        return Snapshot(self.meter.stats, pool.num_slots, pool.used_slots, None if cache is None else cache.seconds)

    def look(self, function: Callable[[Any], T]) -> T:
        """Returns what a function returns that is given the scheduler of the KV store, called between two steps. What
        it returns must not be part of the books."""
        return self.call(lambda: function(self.generator.scheduler))

    @property
    def cache(self) -> RadixCache | None:
        """Returns the cache of ended requests, which may be used from any thread; None where nothing is kept."""
        cache: RadixCache | None = self.generator.scheduler.cache
        return cache

    @property
    def has_generator(self) -> bool:
        """Returns whether the generator is there, so that making it keeps no request waiting."""
        return self._generator is not None

    def set_pace(self, pace: Pace | None) -> None:
        """Admits and steps as a pace says from now on."""
        if pace is not None:
            pace.reading = lambda: self._readings.has_interactive
            self._readings.share_of = pace.admission.share_of
            for part in self.parts:
                part.set_tenants(pace.admission.tenant_of)
        with self._lock:
            self.pace, generator = pace, self._generator
        if generator is not None:
            self.call(partial(generator.set_pace, pace))

    def work_beside(self, work: Background) -> None:
        """Takes work that is done when no live request needs the engine."""
        self._beside.append(work)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look whether there is something to do."""
        self._send(None)

    @property
    def replies(self) -> list[Reply]:
        """Returns those that have no answer yet."""
        return list(self._replies)

    def close_loop(self) -> None:
        """Ends the thread. Requests that have no answer yet are answered with an error."""
        self._end()

    def check_open(self) -> None:
        """Raises PrefoldError where nothing would answer: the engine was closed, or its own thread would wait."""
        if self._inbox.is_closed:
            raise PrefoldError(CLOSED)
        if threading.current_thread() is self._inbox.thread:
            raise PrefoldError("the engine's own thread cannot wait for an answer")

    def _owner(self) -> Callable[[Callable[[], Any]], Any]:
        """Returns `call` of this engine for what it owns, which must not keep it."""
        this = weakref.ref(self)

        def call(function: Callable[[], Any]) -> Any:
            engine = this()
            return function() if engine is None else engine.call(function)

        return call

    def _send(self, what: Any) -> None:
        inbox = self._inbox
        if inbox.process != os.getpid():
            raise ForkedError(f"this process was forked from process {inbox.process}, which has the engine's thread")
        inbox.came.put(what)
        if inbox.is_closed:  # perhaps the thread has looked for the last time
            inbox.end_called()
        elif inbox.thread is None:
            arguments = (weakref.ref(self), inbox)
            threading.Thread(target=_run, args=arguments, name="prefold-engine", daemon=True).start()

    def _open(self, reply: Reply) -> None:
        self._replies[reply] = None
        if not reply.owner.is_batch:
            self._live[reply] = None

    def _added(self, reply: Reply) -> None:
        self.wake()
        if self._inbox.is_closed:
            self._answer(reply, PrefoldError(CLOSED))
        if reply.is_cancelled:  # before its requests were there
            self._forget(reply)
            self.cancel_keys(*reply.keys)

    def _forget(self, reply: Reply) -> None:
        self._replies.pop(reply, None)
        self._live.pop(reply, None)
        for key in reply.keys:
            self._unbegun.pop(key, None)

    def _post(self, sink: Sink | Reply, event: Any) -> None:
        if threading.current_thread() is self._inbox.thread:
            self._out.setdefault(sink, []).append(event)
        else:  # of a request that could not even be entered
            send({sink: [event]})

    # -------------------------------------------------------------------------------------------------- this thread

    def _answer(self, reply: Reply, answer: Any) -> None:
        if reply in self._replies:
            self._forget(reply)
            self._post(reply, answer)
            if isinstance(answer, Exception) and len(reply.keys) > 1:
                self.generator.cancel(*reply.keys)
            if self.pace is not None and not reply.owner.is_batch:
                self.pace.note_live()

    def _probed(self, reading: Reading, part: int, answer: Any) -> None:
        """Takes what was read of one request in the KV store; one that the store cannot hold is read in a stream."""
        if isinstance(answer, Result):
            if reading.book(part, answer):
                self._answer(reading.reply, reading.results)
        elif isinstance(answer, InputError) and answer.code == "kv_memory":
            self._inbox.came.put([Part(reading, [part], len(reading.requests[part].tokens))])
        else:
            self._answer(reading.reply, answer)

    def work(self, came: Any) -> None:
        """Works until there is nothing to do, after something has come to the inbox."""
        if self._inbox.is_closed:
            self._inbox.came.put(came)
            return
        self._take_in(came)
        while not self._inbox.is_closed:
            self._take_in()  # before a look at what was put beside: whoever puts something there wakes this thread then
            beside = self._beside[0] if self._beside else None
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
        self._deliver()

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
                if isinstance(came, _Called):
                    came.call()
                elif came is not None:
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
        return self._generator is not None and self._generator.has_work

    def _advance(self) -> None:
        if self._readings:
            how: dict[str, Any] = {"done": self._read_all, "fail": self._not_read, "on_step": self._between}
            how["is_due"] = self._beside[0].is_due if self._beside else lambda: False
            read_next(self, self._readings, **how, begin=_note_begun)  # type: ignore[arg-type]
        else:
            self._step()

    def _step(self) -> None:
        """Makes one step in the KV store. Where it fails, the requests at fault are ended with its error."""
        generator = self.generator
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
            for key, failure in faults.items():
                generator.end(key, failure)
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
        if self._generator is not None:
            with suppress(Exception):
                self._generator.end_all(error)
        out, self._out = self._out, {}
        send(out)

    def note_failure(self, error: Exception) -> None:
        """Takes note of the error of a step that no request is at fault for."""
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
        if self._unbegun and self._generator is not None:
            unbegun = self._unbegun
            keys = [one.key for one in self._generator.scheduler.running if one.key in unbegun]
            popped = [unbegun.pop(key, None) for key in dict.fromkeys(keys)]  # others are forgetting theirs
            _note_begun([reply for reply in popped if reply is not None])
        out, self._out = self._out, {}
        if out:
            send(out)


def _run(engine_of: weakref.ref[EngineLoop], inbox: _Inbox) -> None:
    """Lets an engine work whenever something comes, until it is closed or gone."""
    if not inbox.enter():
        return
    while not inbox.is_closed:  # else what woke the thread at its end was taken from the inbox while it worked
        came = inbox.came.get()
        engine = engine_of()
        if engine is None:
            return
        try:
            engine.work(came)
        except BaseException as error:  # without this thread every request would wait for ever
            engine.end_all(error if isinstance(error, Exception) else PrefoldError(f"a step raised {error!r}"))
            time.sleep(FAILED_SECONDS)
            engine.wake()  # batches that run go on
        del engine, came
    if (engine := engine_of()) is not None:
        engine.end_all(PrefoldError(CLOSED))
    inbox.end_called()


def _note_begun(replies: Any) -> None:
    now = time.perf_counter()
    for reply in replies:
        if reply.begun_at is None:
            reply.begun_at = now
