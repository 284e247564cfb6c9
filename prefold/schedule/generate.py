"""The generation scheduler: which rows the next step computes, and which sequences take the tokens it gives.

A step has one row for every running sequence, and in what remains of its budget new rows of prompts. Every row belongs
to one trie: prompts, and below each prompt the tokens that its sequences have made (a sequence's *tail*). A node's rows
are computed once, however many sequences wait for them. They stay while a sequence below the node is waiting or
running; when the last of these ends, their slots are free (with a radix cache: may be evicted).

`admit` settles who runs, `plan` only reads and returns the next step, `begin` and `commit` book it. What a step has
computed comes to `commit` as tokens; the scheduler sees no tensors. The next step may be planned between `begin` and
`commit` of a step: in place of a token that is still to come it names the read that gives it. Between `plan` and
`begin` nothing may change.

The books (trie, slots, who runs) are one thread's. After an exception in a change they are not whole: `clear` empties
them, and requests are submitted again with the tokens they have made.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..cache import CacheOptions, RadixCache, SlotPool
from ..cache.tree import Node, RadixTree
from ..errors import InputError
from ..prefix import clear_of_span, span_starts
from ..types import Exits
from .generate_step import Draft, GenerateStep, Held, Running, following, lay_out
from .sequences import Sequences

# Slots that a sequence of unknown length takes at once, so that its rows lie side by side.
TAIL_SLOTS = 16


class GenerateScheduler(Sequences[Running]):
    """A GenerateScheduler decides what each step of continuous batching over one trie computes.

    pool            the slots of the KV store
    max_batch_rows  the most rows of a step, where a step's own limit is not given
    max_running     the most sequences that run at once; never more than the rows of a step
    cache           the options by which rows of ended sequences are kept; None: they are freed at once
    clock           returns the time in seconds, for the cache
    slot_bytes      the bytes of one slot, for the statistics
    held            which rows of images the worker holds; None: the model takes no images
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        max_batch_rows: int,
        max_running: int,
        cache: CacheOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        slot_bytes: int = 1,
        held: Held | None = None,
    ):
        tree = RadixTree()
        super().__init__(
            pool,
            tree,
            None if cache is None else RadixCache(tree, pool, cache, clock),
            max_batch_rows=max_batch_rows,
            max_running=max_running,
            slot_bytes=slot_bytes,
        )
        self._ending: dict[Running, None] = {}  # whose last token is on its way
        self._begun: deque[GenerateStep] = deque()
        self._before: GenerateStep | None = None  # the step that was begun last, while nobody was admitted since
        self._held_rows = 0  # that the step which was begun last had in place, beside those kept
        self._has_routes = False  # some request came with a route
        self._last_steps: dict[tuple[int, ...] | None, int] = {}  # when each route had its last step
        self._numbers = itertools.count()
        self._held = held

    # ------------------------------------------------------------------------------------ what comes and goes

    def _taken(
        self, namespace: tuple[Hashable, ...], route: tuple[int, ...] | None = None
    ) -> tuple[int, tuple[Hashable, ...], Callable[..., Running]]:
        """route: the blocks of a looped model that the rows of a request visit, which they share with those of the same
        route; a step has rows of one route. None: as the model's order says"""
        if not self._requests:
            self._forget_routes()
        self._has_routes |= route is not None
        return 1, self.namespace_of(namespace, Exits(route=route)), partial(Running, route=route)

    def namespace_of(self, namespace: tuple[Hashable, ...], exits: Exits | None) -> tuple[Hashable, ...]:
        route = None if exits is None else exits.route
        return namespace if route is None else (*namespace, "route", route)

    def clear(self) -> None:
        super().clear()
        self._ending.clear()
        self._begun.clear()
        self._before = None
        self._forget_routes()

    def _forget_routes(self) -> None:
        self._has_routes = False
        self._last_steps.clear()

    def _admitted(self) -> Iterable[Running]:
        return (*self.running, *self._ending)

    @property
    def _has_begun(self) -> bool:
        return bool(self._begun)

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self, most: int | None = None) -> list[tuple[Hashable, InputError]]:
        """Admits as many of the waiting sequences as there is room for, and makes room for those that run to grow.

        most  the most rows of the next step; None: `max_batch_rows`

        Returns the requests that can never run, each with its error; they have been ended.
        """
        failed: list[tuple[Hashable, InputError]] = []
        if self.cache is not None:
            self.cache.expire()
        self._grow_tails(failed)
        if self._has_room():
            self._admit(failed, self.max_batch_rows if most is None else most)
        return failed

    def plan(self, most: int | None = None) -> GenerateStep | None:
        """Returns the next step of the sequences that were admitted; changes nothing. most: its most rows; None:
        `max_batch_rows`.

        None where no sequence runs, or none may have rows now, or one has no slot for its next row before a step that
        has begun is committed.
        """
        if not self.running or not self._has_room():
            return None
        most = self.max_batch_rows if most is None else most
        for running in self._by_route() if self._has_routes else (self.running,):
            draft = self.waiting.draft(running, Draft(most, self._held))
            if draft.takes or draft.again:
                before = None if self._has_routes else self._before
                if before is not None and (step := following(before, draft)) is not None:
                    return step
                step, route = lay_out(draft), next(iter(running)).route
                return step if route is None else replace(step, message=replace(step.message, route=route))
        return None

    def begin(self, step: GenerateStep) -> None:
        """Books a step as being run: the next one may be planned before the tokens of this one are there."""
        self._begun.append(step)
        self._before = step
        if self._has_routes:
            self._last_steps[step.message.route] = next(self._numbers)
            if len(self._last_steps) > 2 * self.max_running:  # clients may think of ever new ones
                running = {sequence.route for sequence in self.running}
                self._last_steps = {route: last for route, last in self._last_steps.items() if route in running}
        stats = self.stats
        stats.running_peak = max(stats.running_peak, len(self.running))
        held = self.pool.used_slots - (self.cache.rows if self.cache else 0)
        stats.kv_bytes_peak = max(stats.kv_bytes_peak, held * self._slot_bytes)
        if held != self._held_rows or not step.message.follows:
            self._held_rows = held
            unshared = sum(len(s.tail.slots) + s.leaf.stop for some in (self.running, self._ending) for s in some)
            stats.kv_bytes_unshared_peak = max(stats.kv_bytes_unshared_peak, unshared * self._slot_bytes)
        for node, rows in step.takes:
            node.computed += rows
            node.lost &= node.pending > 0
            if self.tree.on_store:
                self.tree.stored(node)
        for number, sequence in enumerate(step.takers):
            sequence.ready = True
            sequence.tail.tokens.append(-1 - number)
            if len(sequence.tail.tokens) == sequence.limit:
                del self.running[sequence]
                self._ending[sequence] = None
                sequence.state = "ending"

    def commit(
        self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool], result: object = None
    ) -> list[Running]:
        """Books what a step has given, and returns the sequences that have ended, by `ended` or by their limit.

        tokens  the token that each of `step.takers` got; ignored for a sequence that had ended before
        ended   whether each of them ends here; its token is then no part of the output
        result  what the step gave beside; not looked at

        Raises ValueError where another step was begun before this one, or this one was not begun.
        """
        if not self._begun or self._begun[0] is not step:
            raise ValueError("this is not the step that was begun first")
        self._begun.popleft()
        stats = self.stats
        stats.steps += 1
        stats.decode_rows += step.decode_rows
        stats.prefill_rows += step.num_rows - step.decode_rows
        stats.recomputed_rows += step.again
        done, late = [], []
        for sequence, token, stop in zip(step.takers, tokens, ended, strict=True):
            if sequence.state == "ended":
                late.append(sequence.tail)
                continue
            if not stop:
                sequence.tail.tokens[sequence.known] = int(token)
                sequence.known += 1
            if stop or sequence.known == sequence.limit:
                done.append(sequence)
        if late:
            stats.discarded_rows += sum(rows for node, rows in step.takes if node in late)
        for sequence in done:
            self._end(sequence)
        stats.kv_bytes_now = self.pool.used_slots * self._slot_bytes
        return done

    # ------------------------------------------------------------------------------------------------ who runs

    def _by_route(self) -> list[Collection[Running]]:
        """Returns those who run of each route, the route first that had no step for the longest time."""
        routes: dict[tuple[int, ...] | None, list[Running]] = {}
        for sequence in self.running:
            routes.setdefault(sequence.route, []).append(sequence)
        return [routes[route] for route in sorted(routes, key=lambda route: self._last_steps.get(route, -1))]

    def _has_room(self) -> bool:
        """Returns whether there is a slot for the next row of every running sequence."""
        return all(len(sequence.tail.slots) >= len(sequence.tail) for sequence in self.running)

    def _grow_tails(self, failed: list[tuple[Hashable, InputError]]) -> None:
        """Gives every running sequence a slot for its next row. Where none is free, the sequence that was admitted
        last is preempted; but while a step is being run, nothing is done, for that step may free some."""
        for sequence in list(self.running):
            tail = sequence.tail
            while sequence.state == "running" and len(tail.slots) < len(tail):
                slots = self._slots(self._tail_rows(sequence) - len(tail.slots))
                if slots is None:
                    slots = self._slots(1)
                if slots is not None:
                    tail.claim(slots)
                elif self._begun:
                    return
                elif len(self.running) > 1:
                    self._preempt(self.waiting.victim(self.running))
                elif not self._release_waiting(sequence):
                    failed.append(self._fail(sequence))

    def _admit(self, failed: list[tuple[Hashable, InputError]], most: int) -> None:
        kind, pending = None, 0  # the rows of a step that come before those of another sequence of this kind
        batches = True
        while (sequence := self.waiting.first(self, batches=batches)) is not None:
            is_full = len(self.running) >= self.max_running
            if is_full and self.waiting.gives_way(sequence, self.running) is None:
                fits = False
            else:
                if sequence.owner.is_batch is not kind:
                    kind, before = sequence.owner.is_batch, self.waiting.before(sequence, self.running)
                    pending = len(before) + self._pending_rows(before)
                fits = pending < most and (not is_full or self._make_way(sequence))
            rows = self._start(sequence, failed) if fits else None
            if rows is not None:
                pending += rows
            elif sequence.owner.is_batch and batches:
                batches = False
            else:
                return

    def _start(self, sequence: Running, failed: list[tuple[Hashable, InputError]]) -> int | None:
        """Lets a sequence that waits run, or fail where it never can. Returns how many rows that adds to a step; None
        where it has to wait."""
        path = sequence.leaf.path()
        while True:
            scant = [] if self.cache is None else self.cache.scant(path)
            there = {node: 0 if node in scant else len(node.slots) for node in path}
            fresh = {node: len(node) - count for node, count in there.items() if count < len(node)}
            rows = sum(fresh.values())
            # Neighbours, so that what only this sequence sees is read as one run, however often its prompt was split.
            slots = self._slots(rows + self._tail_rows(sequence), path)
            if slots is not None:
                break
            if self._make_way(sequence):
                continue
            if self.running or self._begun:
                return None
            # Nothing will end by itself: what those who wait have computed is computed again.
            if not self._release_waiting(sequence):
                failed.append(self._fail(sequence))
                return 0
        self._count_admission(sequence, path, fresh)
        for node, count in fresh.items():
            node.claim(slots[:count])
            slots = slots[count:]
        sequence.tail.claim(slots)
        sequence.state, sequence.ready = "running", False
        self.running[sequence], self._before = None, None
        rows -= self._spare(sequence)
        self.waiting.admitted(sequence, rows)
        return 1 + rows + len(sequence.tail)

    def _spare(self, sequence: Running) -> int:
        """Returns how many rows of a sequence that was just admitted are not there, and need not be computed."""
        return 0

    def _tail_rows(self, sequence: Running) -> int:
        """Returns how many slots a sequence's tail should have: for its whole output where that is reserved, or else
        for some more rows."""
        last = sequence.limit - 1  # the last token is no row
        return last if sequence.reserve else min(last, len(sequence.tail) + TAIL_SLOTS)

    def _pending_rows(self, running: Collection[Running]) -> int:
        seen: set[Node] = set()
        pending = 0
        for sequence in running:
            if not sequence.ready:
                for node in sequence.leaf.path():
                    if node not in seen:
                        seen.add(node)
                        pending += node.pending
                pending += len(sequence.tail)
        return pending

    def _slots(self, count: int, path: Sequence[Node] = ()) -> np.ndarray | None:
        """Returns so many slots, for which kept rows are evicted, and scant ones of a path given up that begins to be
        used; None where that would not do, and then nothing is done."""
        if self.cache is not None:
            given_up = sum(len(node.slots) for node in self.cache.scant(path))
            short = count - self.pool.free_slots - given_up
            if short > self.cache.rows:
                return None
            self.cache.use(path)
            if short > 0:
                self.cache.evict(short)
        return self.pool.allocate(count)

    def _fail(self, sequence: Running) -> tuple[Hashable, InputError]:
        return self._too_small(f"{self.pool.num_slots} rows", f"a sequence of {sequence.tail.stop + 1}", sequence)

    def _end(self, sequence: Running) -> None:
        del sequence.tail.tokens[sequence.known :]
        super()._end(sequence)

    def _runs_no_more(self, sequence: Running) -> None:
        del {"running": self.running, "ending": self._ending}[sequence.state][sequence]

    def _count_admission(self, sequence: Running, path: list[Node], fresh: Collection[Node]) -> None:
        if sequence.cached_tokens is not None:
            return
        stats = self.stats
        there = [node for node in path if node not in fresh]
        sequence.cached_tokens = sum(map(len, there))
        for node in there:
            if node.pending:
                stats.in_step_hits += len(node)
            elif node.uses:
                stats.cross_window_hits += len(node)
            else:
                stats.first_admission_hits += len(node)

    # ------------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raises AssertionError where slots, users of nodes and states of sequences do not agree; for tests."""
        held = [np.arange(start, start + size) for start, size in self.pool.free_list()]
        users: dict[Node, int] = {}
        states = {"running": self.running, "waiting": self.waiting, "ending": self._ending}
        in_trie = [sequence for sequences in states.values() for sequence in sequences]
        for sequence in in_trie:
            assert sequence in states[sequence.state] and sequence.key in self._requests
            assert sequence.state != "waiting" or not len(sequence.tail.slots)
            held.append(sequence.tail.slots)
            assert sequence.tail.computed <= len(sequence.tail.slots)
            for node in sequence.leaf.path():
                users[node] = users.get(node, 0) + 1
                assert sequence.state == "waiting" or len(node.slots) == len(node)
        for node in self._nodes():
            held.append(node.slots)
            assert node.computed <= len(node.slots) <= len(node)
            assert node.users == users.get(node, 0), (node.users, users.get(node, 0))
            assert node.users or node.kept, "a node that nobody needs"
            for cut in (node.computed, len(node)):
                assert clear_of_span(np.asarray(node.tokens), cut) == cut, "a span that is computed in part"
            above = node.parent.tokens[-1:] if node.parent is not None else ()
            assert not len(above) or span_starts(np.array([above[0], node.tokens[0]])) is None, "a span in two nodes"
            assert all(int(child.tokens[0]) == first and child.parent is node for first, child in node.children.items())
        assert all(root.children for root in self.tree.roots.values()), "a root that nobody needs"
        slots = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
        assert np.array_equal(slots, np.arange(1, self.pool.num_slots + 1)), "slots leak, or are used twice"
        assert len(self.running) <= self.max_running
        self.waiting.check(self.running)
        assert set(in_trie) == {sequence for request in self._requests.values() for sequence in request}
        assert all(self._requests.values()), "a request that nobody needs"
        if self.cache is not None:
            self.cache.check()
            holders = [*self._nodes(), *(sequence.tail for sequence in in_trie)]
            for account in self.cache.accounts:
                assert account.held == sum(len(node.slots) for node in holders if node.account is account)
