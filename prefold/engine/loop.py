"""The engine's loop: one thread makes steps while any request is open.

Requests and cancellations come from any thread, and are processed before a step is planned. The tokens, values and
answers of a step are delivered together after the step: one call per event loop, and one queue entry per waiting
thread. If a step fails, `find_fault` searches for the requests that cause it, so that the others can continue.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..errors import OutOfMemoryError, PrefoldError, RankError
from ..spec.requests import Readout, Request, Result
from ..text import Tokenizer
from .cache import CacheReporter, RadixCache
from .cache.listing import TreePath, held_rows, paths_of
from .generate import Generator
from .handles import Handle, ReadGroup, send
from .meter import Listener, Meter
from .pace import StepPolicy
from .protocol import OnCache, RunningSequence, Snapshot
from .schedule.parts import EnginePart
from .thread import CLOSED, EngineThread

Wants = Callable[[Hashable], bool]


def with_store(
    now: Snapshot, scheduler: Any, call: Callable[..., Any], *, rows: bool, paths: int, wants: Wants | None
) -> Snapshot:
    """Return a snapshot extended by the scheduler's state (see `Engine.snapshot`).

    `call` runs a function in the engine's thread.
    """
    pool, cache = scheduler.pool, scheduler.cache
    seconds = None if cache is None else cache.seconds
    now = replace(now, slots=pool.num_slots, used_slots=pool.used_slots, cache_seconds=seconds)
    if rows:
        now = replace(now, rows=call(partial(held_rows, scheduler.tree)))
    if paths:
        tree_paths, running = call(partial(_paths, scheduler, paths, wants))
        now = replace(now, paths=tree_paths, running=running)
    return now


def _paths(scheduler: Any, most: int, wants: Wants | None) -> tuple[list[TreePath], list[RunningSequence]]:
    """Return at most `most` paths of the trie, only from namespaces that `wants` accepts, and all running sequences."""
    tails: dict[Any, list[Sequence[int]]] = defaultdict(list)
    running = []
    for sequence in scheduler.running:
        leaf = root = sequence.leaf
        tails[leaf].append(sequence.tail.tokens)
        while root.parent is not None:
            root = root.parent
        counts = leaf.stop, sequence.cached_tokens or 0, sequence.num_known, sequence.limit
        running.append(RunningSequence(root.namespace, *counts))
    return paths_of(scheduler.tree, tails, most=most, wants=wants), running


T = TypeVar("T")

# Errors that no single request can cause.
ENGINE_FAULTS = (RankError, OutOfMemoryError)
# After this many failed steps in a row without an identified cause, all open requests are ended.
MAX_FAILED_STEPS = 3


class EngineLoop:
    """Makes an engine's steps in one thread, which runs while any request is open and sleeps otherwise.

    The thread starts with the first request. A step that raises an error ends the requests that cause it (see
    `find_fault`), and the thread continues. The thread does not keep the engine alive: it ends when the engine is
    garbage-collected. A subclass must have the attributes `meter` and `parts`, and the method `make_generator`.

    Attributes:
        failure: The error of the last step if no single request can cause it; None after a step without an error.
        failed_at: time.monotonic() of the failure.
        step_policy: Decides which requests are admitted and how many rows a step has; None: the rules of `Generator`.
    """

    meter: Meter
    parts: Sequence[EnginePart]
    make_generator: Callable[[], Generator]

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.failed_at = 0.0
        self.step_policy: StepPolicy | None = None
        self._generator: Generator | None = None
        self._handles: dict[Handle, Any] = {}  # handles without an answer
        self._live: dict[Handle, None] = {}  # the interactive handles among these
        self._no_token: dict[int, Handle] = {}  # key of a request without a token so far -> its handle
        self._step_at = 0.0  # time.perf_counter() at the start of the last step
        self._events: dict[Handle, list[Any]] = {}  # events of this step, delivered after it
        self._lock = threading.Lock()  # held while the generator is created
        self._failed_steps = 0  # number of steps that failed in a row without an identified cause
        self._thread = EngineThread(self)
        self._end = weakref.finalize(self, self._thread.close)

    # -------------------------------------------------------------------------------------------------- any thread

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps. Return its result, or raise its error."""
        return self._thread.call(function)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Queue a function for the engine's thread, and return at once."""
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
        """Submit requests (see `Engine.submit`).

        The call is slow if a grammar must be compiled, or if values are read of many tokens, because these requests are
        sorted first. Raise PrefoldError if a handle that waits is submitted from the engine's own thread.

        Args:
            again: The (single) request is a twin: another read of a prompt that is counted already.
            wakes: A step may start at once. Otherwise the caller submits more requests and then calls `wake`.
        """
        if handle.waits and self._thread.is_current:
            raise PrefoldError("the engine's own thread cannot wait for an answer")
        self._handles[handle] = None
        if not handle.owner.is_batch:
            self._live[handle] = None
        if len(requests) == 1:
            self.meter.add(requests=int(not again))
            options: dict[str, Any] = {"tokenizer": tokenizer, "sharing": share, "again": again}
            if readout.kind == "tokens":
                options["on_text"] = partial(self._put_event, handle) if text else None
                self._enter(handle, requests[0], partial(self._answer, handle), **options)
            else:
                self._enter(handle, requests[0], partial(self._read_alone, handle), readout=readout, **options)
        else:
            shares = self.generator.sharing if share is None else share
            group = ReadGroup(handle, requests, readout, rows=self.max_batch_rows, shares=shares)
            self.meter.add(requests=group.again.count(False))
            self.post(self._feed, group)
        if wakes:
            self.wake()
        if self._thread.is_closed:
            self._answer(handle, PrefoldError(CLOSED))
        if handle.is_cancelled:  # another thread cancelled before the requests were added
            self._end_requests(handle)

    def cancel(self, *handles: Handle) -> None:
        """End the requests of handles before the next step. The handles get no further events."""
        for handle in handles:
            handle.is_cancelled = True
            if handle in self._handles:
                self._end_requests(handle)

    def _enter(
        self, handle: Handle, request: Request, on_done: Callable[[Any], None], *, tokenizer: Any = None, **options: Any
    ) -> None:
        """Add one of a handle's requests to the generator; `options` are options of `Generator.add`."""
        key = self.generator.new_key()
        handle.keys.append(key)
        self._no_token[key] = handle
        self.generator.add(request, tokenizer, on_done, key=key, owner=handle.owner, **options)

    def _end_requests(self, handle: Handle) -> None:
        self._forget(handle)
        if handle.keys:
            self.generator.cancel(*handle.keys)
            self.wake()

    @property
    def generator(self) -> Generator:
        """The generator, which holds the KV store; created at the first use."""
        with self._lock:
            if self._generator is None:
                generator = self.make_generator()
                if self.step_policy is not None:
                    generator.set_step_policy(self.step_policy)
                generator.scheduler.tree.owner = self._weak_call()
                self._generator = generator
            return self._generator

    def snapshot(self, *, rows: bool = False, paths: int = 0, wants: Wants | None = None) -> Snapshot:
        """Return a snapshot (see `Engine.snapshot`) without creating a KV store."""
        now, generator = Snapshot(self.meter.stats, failure=self.failure, failed_at=self.failed_at), self._generator
        if generator is None:
            return now
        return with_store(now, generator.scheduler, self.call, rows=rows, paths=paths, wants=wants)

    @contextmanager
    def watching(
        self, on_step: Listener | None = None, *, policy: StepPolicy | None = None, on_cache: OnCache | None = None
    ) -> Iterator[None]:
        """Return a context in which functions are called after every step (see `Engine.watching`)."""
        with ExitStack() as stack:
            if policy is not None:
                self.set_step_policy(policy)
                stack.callback(lambda: self.step_policy is policy and self.set_step_policy(None))
            if on_cache is not None:
                reporter = self.call(partial(CacheReporter, self.generator.scheduler.tree, epoch=time.time_ns()))
                stack.callback(self.call, reporter.close)
                stack.enter_context(self.meter.listening(lambda step: on_cache(reporter)))
            stack.enter_context(self.meter.listening(on_step))
            yield

    @property
    def cache(self) -> RadixCache | None:
        """The radix cache, which any thread may use; None if rows of ended requests are not kept."""
        cache: RadixCache | None = self.generator.scheduler.cache
        return cache

    def set_step_policy(self, policy: StepPolicy | None) -> None:
        """Admit requests and size steps by a policy from now on; None: by the rules of `Generator`."""
        if policy is not None:
            for part in self.parts:
                part.set_tenants(policy.admission.tenant_of)
        with self._lock:
            self.step_policy, generator = policy, self._generator
        if generator is not None:
            self.call(partial(generator.set_step_policy, policy))

    def wake(self) -> None:
        """Make the thread look for work."""
        self._thread.wake()

    @property
    def handles(self) -> list[Handle]:
        """The handles that have no answer yet."""
        return list(self._handles)

    def close_loop(self) -> None:
        """End the thread. Unanswered requests are answered with an error."""
        self._end()

    def _weak_call(self) -> Callable[[Callable[[], Any]], Any]:
        """Return `call` without a reference to the engine: the trie stores it, and must not keep the engine alive."""
        reference = weakref.ref(self)

        def call(function: Callable[[], Any]) -> Any:
            engine = reference()
            return function() if engine is None else engine.call(function)

        return call

    def _forget(self, handle: Handle) -> None:
        self._handles.pop(handle, None)
        self._live.pop(handle, None)
        for key in handle.keys:
            self._no_token.pop(key, None)

    def _put_event(self, handle: Handle, event: Any) -> None:
        if self._thread.is_current:
            self._events.setdefault(handle, []).append(event)
        else:  # the request was invalid, so the caller's own thread answers it
            send({handle: [event]})

    # -------------------------------------------------------------------------------------------- the engine's thread

    def _answer(self, handle: Handle, answer: Any) -> None:
        if handle in self._handles:
            self._forget(handle)
            if handle.first_at is None and not isinstance(answer, Exception):
                handle.first_at = time.perf_counter()
            self._put_event(handle, answer)
            if isinstance(answer, Exception) and len(handle.keys) > 1:
                self.generator.cancel(*handle.keys)
            if self.step_policy is not None and not handle.owner.is_batch:
                self.step_policy.note_live()

    def _feed(self, group: ReadGroup) -> None:
        """Add requests of a group to the generator while the group has free capacity."""
        handle = group.handle
        while handle in self._handles and (number := group.next()) is not None:
            options = {"readout": group.readout, "again": group.again[number], "sharing": group.shares}
            self._enter(handle, group.requests[number], partial(self._read, group, number), **options)
        if handle.is_cancelled:  # perhaps by another thread, before these requests were added
            self._end_requests(handle)

    def _read(self, group: ReadGroup, number: int, answer: Any) -> None:
        """Process the answer of one request of a group."""
        if not isinstance(answer, Result):
            self._answer(group.handle, answer)
            return
        self._note_begun(group.handle)
        if group.book(number, answer):
            self._answer(group.handle, group.results)
        else:
            self._feed(group)

    def _read_alone(self, handle: Handle, answer: Any) -> None:
        """Process the answer of a request for values that was submitted alone."""
        if isinstance(answer, Result):
            self._note_begun(handle)
            answer = [answer]
        self._answer(handle, answer)

    def work(self) -> None:
        """Make steps until no request is open."""
        while not self._thread.is_closed:
            self._thread.take_in()
            if pause := self._pause:
                self._thread.take_in(pause)
            elif self._generator is not None and self._generator.has_work:
                self._step()
            else:
                break
            if self._events or self._no_token:
                self._deliver()
        self._deliver()

    @property
    def _pause(self) -> float:
        """The seconds during which no step is made, because only batches have work."""
        if self.step_policy is None:
            return 0.0
        if self._live:
            self.step_policy.note_live()
            return 0.0
        return self.step_policy.pause

    def _step(self) -> None:
        """Make one step of the generator. If it fails, end the requests that cause the failure with its error."""
        generator = self._generator
        assert generator is not None
        self._step_at = time.perf_counter()
        try:
            if generator.step():
                self.failure, self._failed_steps = None, 0
        except Exception as error:
            self._failed_steps += 1
            is_lost = self._failed_steps > MAX_FAILED_STEPS
            faults = dict.fromkeys(generator.open_keys, error) if is_lost else find_fault(generator, error)
            if faults:  # count a later failure anew: requests that came during the search may cause it
                self._failed_steps = 0
            for key, failure in faults.items():
                generator.end(key, failure)
            # One request can be at fault by itself. If steps fail for several requests alone, the engine is at fault.
            if isinstance(error, ENGINE_FAULTS) or (len(faults) > 1 and not generator.has_work):
                self.note_failure(error)

    def end_all(self, error: Exception) -> None:
        """Answer all handles with an error raised outside of a step. The books cannot be trusted after it."""
        self.note_failure(error)
        for handle in self.handles:
            handle.is_cancelled = True  # its queued requests are not added then
            self._answer(handle, error)
        if self._generator is not None:
            with suppress(Exception):
                self._generator.end_all(error)
        events, self._events = self._events, {}
        send(events)

    def note_failure(self, error: Exception) -> None:
        """Record the error of a step that no single request can cause."""
        self.failure, self.failed_at = error, time.monotonic()

    def _note_begun(self, handle: Handle) -> None:
        if handle.begun_at is None:
            handle.begun_at = self._step_at

    def _deliver(self) -> None:
        if self._no_token and self._generator is not None:
            now = time.perf_counter()
            for sequence in self._generator.scheduler.running:
                # Another thread may pop a key meanwhile, when it cancels its handle.
                handle = self._no_token.get(sequence.key)
                if handle is None:
                    continue
                self._note_begun(handle)
                if sequence.num_known:
                    handle.first_at = now if handle.first_at is None else handle.first_at
                    self._no_token.pop(sequence.key, None)
        events, self._events = self._events, {}
        send(events)


def find_fault(generator: Generator, error: Exception) -> dict[int, Exception]:
    """Return {key of a request at fault: its error} after a step has raised `error`.

    The open requests are bisected: they run in halves, and halves of these, until each failing step serves a single
    request. All requests stay open; the caller ends the ones at fault. If no single request can be at fault, because
    the worker is gone or memory is too small for one row, all open requests are returned with `error`.
    """
    generator.take_in()
    keys = generator.open_keys
    if isinstance(error, ENGINE_FAULTS):
        return dict.fromkeys(keys, error)
    faults: dict[int, Exception] = {}
    with generator.holding_requests():  # a new request would be suspect too, and the search might never end
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
                    faults[group[0]] = failure
                else:
                    half = len(group) // 2
                    groups += [part for part in (group[:half], group[half:]) if part]
            generator.hold(*generator.open_keys)
        generator.release()
    return faults


def _advance(generator: Generator, group: Sequence[int]) -> None:
    """Make steps until each running request of the group has one more token."""
    before = generator.progress(group)
    while generator.step():
        running = {sequence.key for sequence in generator.scheduler.running}
        now = generator.progress(key for key in group if key in running)
        if all(count is None or before[key] is None or count > before[key] for key, count in now.items()):
            return
