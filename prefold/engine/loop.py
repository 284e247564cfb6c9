"""What an engine's thread does: it makes steps while anything waits for them.

Requests and cancellations come from any thread, and are taken in before a step is planned. What a step gives leaves
once, after the step: in one call into each event loop, and in one entry of the queue of each thread that waits. Where a
step fails, the requests that it fails for are found, so that the others can go on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..cache import RadixCache
from ..errors import OutOfMemoryError, PrefoldError, RankError
from ..schedule.parts import EnginePart
from ..text import Tokenizer
from ..types import Readout, Request, Result, Stats
from .generate import Generator
from .meter import Meter
from .pace import Pace
from .replies import Handle, Reading, send
from .thread import CLOSED, EngineThread

T = TypeVar("T")

# What no request alone can be at fault for.
WHOLE = (RankError, OutOfMemoryError)
# After so many steps that failed one after the other, and for no request that could be found, all that run is ended.
MOST_IN_VAIN = 3


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


class EngineLoop:
    """Steps an engine while anything waits for it, and sleeps while nothing does.

    The thread begins with the first request. A step that raises an error ends the requests that it fails for (see
    `find_fault`), and the thread goes on. It does not keep the engine: it ends with it. A subclass has the attributes
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
        self._handles: dict[Handle, Any] = {}  # those that have no answer yet
        self._live: dict[Handle, None] = {}  # those of them that are no batch's
        self._unbegun: dict[int, Handle] = {}  # by the keys of requests for which no step has worked yet
        self._out: dict[Handle, list[Any]] = {}
        self._lock = threading.Lock()  # of making the generator
        self._in_vain = 0  # steps that failed since one did not, or a request was found at fault
        self._thread = EngineThread(self)
        self._end = weakref.finalize(self, self._thread.close)

    # -------------------------------------------------------------------------------------------------- any thread

    def call(self, function: Callable[[], T]) -> T:
        """Returns what a function returns, or raises what it raises. The engine's thread calls it, between steps."""
        return self._thread.call(function)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Lets the engine's thread call a function after what it was given before; does not wait for it."""
        self._thread.post(function, *arguments)

    def submit(
        self,
        requests: Sequence[Request],
        readout: Readout,
        handle: Handle,
        tokenizer: Tokenizer | None = None,
        *,
        text: bool = False,
        share: bool | None = None,
        again: bool = False,
        wakes: bool = True,
    ) -> None:
        """Takes requests; what comes of them is put into their handle, and `cancel` ends them. May take long, where a
        grammar is compiled, or where numbers are read of many tokens: requests are sorted for that.

        The answer is a Result of each request, or where the read-out is of "tokens" the samples of the one request
        there is. It is an exception where a request cannot run, or steps fail for it.

        text   of tokens: whether pieces of the text are wanted as they come
        share  of a request alone: whether it shares rows with others, now or later; None: as the engine's options say
        again  of a request alone: whether it is a further read of a prompt that another request counts
        wakes  whether a step may begin at once; otherwise `wake` lets it, when more requests are there
        """
        self._handles[handle] = None
        if not handle.owner.is_batch:
            self._live[handle] = None
        if len(requests) == 1:
            self.meter.add(requests=int(not again))
            how: dict[str, Any] = {"tokenizer": tokenizer, "sharing": share, "again": again}
            if readout.kind == "tokens":
                how["on_text"] = partial(self._post, handle) if text else None
                self._enter(handle, requests[0], partial(self._answer, handle), **how)
            else:
                self._enter(handle, requests[0], partial(self._read_alone, handle), readout=readout, **how)
        else:
            reading = Reading(handle, requests, readout, rows=self.max_batch_rows, shares=self.generator.sharing)
            self.meter.add(requests=reading.again.count(False))
            self.post(self._feed, reading)
        if wakes:
            self.wake()
        if self._thread.is_closed:
            self._answer(handle, PrefoldError(CLOSED))
        if handle.is_cancelled:  # before its requests were there
            self._end_requests(handle)

    def cancel(self, *handles: Handle) -> None:
        """Ends what the handles wait for before the next step. They get nothing more."""
        for handle in handles:
            handle.is_cancelled = True
            if handle in self._handles:
                self._end_requests(handle)

    def _enter(
        self, handle: Handle, request: Request, on_done: Callable[[Any], None], *, tokenizer: Any = None, **how: Any
    ) -> None:
        """Adds one of the requests of a handle to the generator."""
        key = self.generator.new_key()
        handle.keys.append(key)
        self._unbegun[key] = handle
        self.generator.add(request, tokenizer, on_done, key=key, owner=handle.owner, **how)

    def _end_requests(self, handle: Handle) -> None:
        self._forget(handle)
        if handle.keys:
            self.generator.cancel(*handle.keys)
            self.wake()

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
            for part in self.parts:
                part.set_tenants(pace.admission.tenant_of)
        with self._lock:
            self.pace, generator = pace, self._generator
        if generator is not None:
            self.call(partial(generator.set_pace, pace))

    def wake(self) -> None:
        """Makes the thread look whether there is something to do."""
        self._thread.wake()

    @property
    def handles(self) -> list[Handle]:
        """Returns those that have no answer yet."""
        return list(self._handles)

    def close_loop(self) -> None:
        """Ends the thread. Requests that have no answer yet are answered with an error."""
        self._end()

    def check_open(self) -> None:
        """Raises PrefoldError where nothing would answer: the engine was closed, or its own thread would wait."""
        if self._thread.is_closed:
            raise PrefoldError(CLOSED)
        if self._thread.is_current:
            raise PrefoldError("the engine's own thread cannot wait for an answer")

    def _owner(self) -> Callable[[Callable[[], Any]], Any]:
        """Returns `call` of this engine for what it owns, which must not keep it."""
        this = weakref.ref(self)

        def call(function: Callable[[], Any]) -> Any:
            engine = this()
            return function() if engine is None else engine.call(function)

        return call

    def _forget(self, handle: Handle) -> None:
        self._handles.pop(handle, None)
        self._live.pop(handle, None)
        for key in handle.keys:
            self._unbegun.pop(key, None)

    def _post(self, handle: Handle, event: Any) -> None:
        if self._thread.is_current:
            self._out.setdefault(handle, []).append(event)
        else:  # of a request that could not even be entered
            send({handle: [event]})

    # -------------------------------------------------------------------------------------------------- this thread

    def _answer(self, handle: Handle, answer: Any) -> None:
        if handle in self._handles:
            self._forget(handle)
            self._post(handle, answer)
            if isinstance(answer, Exception) and len(handle.keys) > 1:
                self.generator.cancel(*handle.keys)
            if self.pace is not None and not handle.owner.is_batch:
                self.pace.note_live()

    def _feed(self, reading: Reading) -> None:
        """Adds requests of a reading, while it is wanted, and there is room beside those that are open."""
        handle = reading.handle
        while handle in self._handles and (number := reading.next()) is not None:
            how: dict[str, Any] = {"readout": reading.readout, "again": reading.again[number]}
            self._enter(handle, reading.requests[number], partial(self._read, reading, number), **how)
        if handle.is_cancelled:  # perhaps before these were there
            self._end_requests(handle)

    def _read(self, reading: Reading, number: int, answer: Any) -> None:
        """Takes what was read of one request of several."""
        if not isinstance(answer, Result):
            self._answer(reading.handle, answer)
            return
        _note_begun([reading.handle])
        if reading.book(number, answer):
            self._answer(reading.handle, reading.results)
        else:
            self._feed(reading)

    def _read_alone(self, handle: Handle, answer: Any) -> None:
        """Takes what was read of a request that was submitted alone."""
        if isinstance(answer, Result):
            _note_begun([handle])
            answer = [answer]
        self._answer(handle, answer)

    def work(self) -> None:
        """Works until there is nothing to do."""
        while not self._thread.is_closed:
            self._thread.take_in()
            if pause := self._pause:
                self._thread.take_in(pause)
            elif self._has_work:
                self._step()
            else:
                break
            self._deliver()
        self._deliver()

    @property
    def _pause(self) -> float:
        """For how many seconds nothing should be done, since only batches have something to do."""
        if self.pace is None:
            return 0.0
        if self._live:
            self.pace.note_live()
            return 0.0
        return self.pace.pause

    @property
    def _has_work(self) -> bool:
        return self._generator is not None and self._generator.has_work

    def _step(self) -> None:
        """Makes one step in the KV store. Where it fails, the requests at fault are ended with its error."""
        generator = self.generator
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

    def end_all(self, error: Exception) -> None:
        """Answers all that wait with an error of this thread that is no step's: what it left half done is not known."""
        self.note_failure(error)
        for handle in self.handles:
            handle.is_cancelled = True  # what is left of it on its way here
            self._answer(handle, error)
        if self._generator is not None:
            with suppress(Exception):
                self._generator.end_all(error)
        out, self._out = self._out, {}
        send(out)

    def note_failure(self, error: Exception) -> None:
        """Takes note of the error of a step that no request is at fault for."""
        self.failure, self.failed_at = error, time.monotonic()

    def _deliver(self) -> None:
        if self._unbegun and self._generator is not None:
            unbegun = self._unbegun
            keys = [one.key for one in self._generator.scheduler.running if one.key in unbegun]
            popped = [unbegun.pop(key, None) for key in dict.fromkeys(keys)]  # others are forgetting theirs
            _note_begun([handle for handle in popped if handle is not None])
        out, self._out = self._out, {}
        if out:
            send(out)


def _note_begun(replies: Any) -> None:
    now = time.perf_counter()
    for handle in replies:
        if handle.begun_at is None:
            handle.begun_at = now


def find_fault(generator: Generator, error: Exception) -> dict[int, Exception]:
    """Returns {key of an open request: the error of a step that worked for it alone}, after a step has raised `error`.

    The open requests run in halves, and halves of these, until each step that fails works for one of them. All are open
    afterwards; those at fault should be ended before the next step. Where no request can be at fault, because the
    worker is gone or memory is too small for a single row, all are returned at once.
    """
    generator.take_in()
    keys = generator.open_keys
    if isinstance(error, (RankError, OutOfMemoryError)):
        return dict.fromkeys(keys, error)
    found: dict[int, Exception] = {}
    with generator.undisturbed():  # else whoever comes would be a suspect, too, and the search might never end
        generator.hold(*keys)
        groups: list[Sequence[int]] = [keys]
        while groups:
            group = groups.pop()
            generator.release(*group)
            try:
                _advance(generator, group)
            except Exception as failure:
                group = [key for key in group if key in generator.open_keys]
                if len(group) == 1:
                    found[group[0]] = failure
                else:
                    half = len(group) // 2
                    groups += [part for part in (group[:half], group[half:]) if part]
            generator.hold(*generator.open_keys)
        generator.release()
    return found


def _advance(generator: Generator, group: Sequence[int]) -> None:
    """Makes steps until each request of the group that runs has one token more."""
    before = generator.progress(group)
    while generator.step():
        running = {sequence.key for sequence in generator.scheduler.running}
        now = generator.progress(key for key in group if key in running)
        if all(count is None or before[key] is None or count > before[key] for key, count in now.items()):
            return
