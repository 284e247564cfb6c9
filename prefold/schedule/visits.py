"""The scheduler of looped models whose rows may leave before the last visit, or take routes: a step is one visit.

A row goes through one block a step. Rows whose next block is the same go together, whatever visit of whatever route it
is to them; as rows leave, others take their places. A prompt goes through a visit as a whole before the next (its rows
in pieces where the step is too small), for a router looks at all of it.

`admit` settles who runs and which rows the next step has, and claims their slots; `plan` only lays that step out;
`begin` and `commit` book it. Whether a row leaves, and which block the router chooses, comes to `commit` beside the
tokens. Between `begin` and `commit` nothing else may change: no step is planned ahead.

What was decided is kept with the tokens (`Decided`): a row that is computed again leaves after the same visit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..cache import CacheOptions, SlotPool, VisitCache, VisitNode
from ..cache.tree import Node, RadixTree
from ..cache.visits import NodeVisit
from ..errors import InputError
from ..types import Exits, GenerationStats, Owner
from .admission import Admission, InOrder
from .generate_step import NOBODY
from .routed import Decided, Routed
from .steps import NOT_FINITE
from .visit_checks import check_visits
from .visit_claims import Claims
from .visit_draft import RoutedStep, Take, VisitDraft, lay_out
from .visit_options import VisitOptions, may_leave, rule_of
from .visit_steps import CODA, VisitResult

__all__ = ["VisitOptions", "VisitScheduler"]


class VisitScheduler:
    """A VisitScheduler decides what each step computes, and has the face of a GenerateScheduler.

    pool            the slots of the store, each of one row at one visit
    visits          how rows go through the model
    max_batch_rows, max_running, cache, clock, slot_bytes   as of GenerateScheduler
    """

    def __init__(
        self,
        pool: SlotPool,
        visits: VisitOptions,
        *,
        max_batch_rows: int,
        max_running: int,
        cache: CacheOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        slot_bytes: int = 1,
    ):
        self.pool, self.visits = pool, visits
        self.tree = RadixTree(VisitNode)
        self.cache = None if cache is None else VisitCache(self.tree, pool, cache, clock)
        self.max_batch_rows = max_batch_rows
        self.max_running = min(max_running, max_batch_rows)
        self._claims = Claims(pool, visits, self.cache)
        self.stats = GenerationStats()
        self.running: dict[Routed, None] = {}  # in the order of their admission
        self.waiting: Admission = InOrder()
        self.requests: dict[Hashable, dict[Routed, None]] = {}
        self._draft: VisitDraft | None = None
        self._begun: RoutedStep | None = None
        self._failed: list[tuple[Hashable, InputError]] = []
        self._slot_bytes = slot_bytes

    # ------------------------------------------------------------------------------------ what comes and goes

    def submit(
        self,
        key: Hashable,
        tokens: np.ndarray,
        *,
        limit: int,
        samples: int = 1,
        reserve: bool = True,
        namespace: tuple[Hashable, ...] = (),
        priority: int = 0,
        made: Mapping[int, Sequence[int]] | None = None,
        owner: Owner = NOBODY,
        exits: Exits | None = None,
        decided: Decided | None = None,
    ) -> None:
        """Takes a prompt; arguments and errors as of `GenerateScheduler.submit`, and beside these:

        exits    the route, and when rows leave; its threshold is that of the model where nobody gave one
        decided  what was decided for this request before; written to as more is decided
        """
        exits, decided = exits or Exits(), decided or Decided()
        if exits.threshold is None:
            exits = replace(exits, threshold=self.visits.threshold)
        most = len(self.visits.order) + self.visits.prelude + self.visits.coda
        rows = len(tokens) + (limit - 1 if reserve else 0)
        if rows * most > self.pool.num_slots:
            raise InputError(
                f"the request needs the K/V of {rows} rows at {most} visits, {rows * most} slots, the KV store holds"
                f" {self.pool.num_slots}",
                field="max_tokens" if rows > len(tokens) else "prompt",
                remedy="give a larger kv_memory, or ask for fewer tokens",
                code="kv_memory",
            )
        namespace = (*namespace, *rule_of(exits))
        leaf = self.tree.insert(namespace, tokens)
        path = leaf.path()
        if self.cache is not None:
            self.cache.take(path)
        made = dict.fromkeys(range(samples), ()) if made is None else made
        sequences = [
            Routed(
                key, sample, leaf, list(had), limit, reserve, priority, owner,
                namespace=namespace, exits=exits, keys=self.visits.keys, decided=decided,
            )
            for sample, had in made.items()
        ]  # fmt: skip
        for node in path:
            node.users += len(sequences)
            node.priority = max(node.priority, priority)
        for sequence in sequences:
            sequence.set_out(self.visits)
        self.requests[key] = dict.fromkeys(sequences)
        self.waiting.add(sequences)

    def cancel(self, key: Hashable) -> None:
        """Ends all sequences of a request; does nothing where the request is not there any more."""
        self._draft = None
        for sequence in list(self.requests.get(key, ())):
            self._end(sequence)

    def clear(self) -> None:
        """Forgets all requests, a step that has begun, and all rows: every slot is free."""
        self.pool.clear()
        self.tree.clear()
        if self.cache is not None:
            self.cache.forget_all()
        self._draft = self._begun = None
        self.waiting.clear()
        for some in (self.running, self.requests):
            some.clear()

    def admit_by(self, policy: Admission) -> None:
        """Admits by another policy from now on. It must hold nobody yet."""
        policy.take_over(self.waiting, tuple(self.running))
        self.waiting = policy

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences have not been admitted yet, or were preempted."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Returns whether a request has not ended, or a step has begun and not been committed."""
        return bool(self.requests or self._begun)

    @property
    def can_plan(self) -> bool:
        """Returns whether any sequence runs or waits."""
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self) -> list[tuple[Hashable, InputError]]:
        """Admits as many of the waiting sequences as there is room for, and settles the rows of the next step.

        Returns the requests that can never run, each with its error; they have been ended.
        """
        if self._begun is not None:
            return []
        failed, self._failed = self._failed, []
        if self.cache is not None:
            self.cache.expire()
        self._admit()
        while self.running:
            self._draft = self._claims.draft(self.running, self.max_batch_rows)
            if not self._draft.is_empty:
                break
            # Nobody can go on: somebody makes room.
            last = self.waiting.victim(self.running)
            if len(self.running) > 1:
                self._preempt(last)  # type: ignore[arg-type]
            elif not self._release_waiting(last):
                failed.append(self._fail(last))
        return failed

    def plan(self) -> RoutedStep | None:
        """Returns the step that `admit` settled; changes nothing. None where there is none, or one has begun."""
        if self._draft is None or self._draft.is_empty or self._begun is not None:
            return None
        return lay_out(self._draft)

    def begin(self, step: RoutedStep) -> None:
        """Books a step as being run."""
        self._begun, self._draft = step, None
        stats = self.stats
        stats.running_peak = max(stats.running_peak, len(self.running))
        unshared = sum((len(s.tail) + s.leaf.stop) * max(1, len(s.route)) for s in self.running)
        if self.pool.used_slots * self._slot_bytes > stats.kv_bytes_peak:
            held = self.pool.used_slots - (self.cache.num_slots if self.cache is not None else 0)
            stats.kv_bytes_peak = max(stats.kv_bytes_peak, held * self._slot_bytes)
        stats.kv_bytes_unshared_peak = max(stats.kv_bytes_unshared_peak, unshared * self._slot_bytes)
        moving = {take.sequence for _, take, _ in step.takes} | {*step.takers, *step.routed}
        for sequence in self.running:
            sequence.waited = 0 if sequence in moving else sequence.waited + 1

    def commit(
        self, step: RoutedStep, result: VisitResult, tokens: Sequence[int], ended: Sequence[bool]
    ) -> list[Routed]:
        """Books what a step has given, and returns the sequences that have ended, by `ended` or by their limit.

        result  which rows left, which reads were made, and the blocks that the router chose
        tokens  the token that each of `step.takers` got; ignored where its read was not made
        ended   whether each of them ends here; its token is then no part of the output

        Raises ValueError where this is not the step that was begun.
        """
        if self._begun is not step:
            raise ValueError("this is not the step that was begun")
        self._begun, stats = None, self.stats
        stats.steps += 1
        stats.decode_rows += step.decode_rows
        stats.prefill_rows += step.first_rows - step.decode_rows
        if step.message.block >= 0:
            stats.block_calls += step.num_rows
        for visit, take, queries in step.takes:
            self._book(visit, take, queries, result.left)
        for sequence, blocks in zip(step.routed, result.blocks.tolist(), strict=True):
            for block in blocks:
                self._go_on(sequence, block)
        done = []
        for i, (sequence, token, stop) in enumerate(zip(step.takers, tokens, ended, strict=True)):
            if sequence.state == "ended" or not result.taken[i]:
                continue
            sequence.leave(step.visits[i])
            if not stop:
                sequence.tail.tokens.append(int(token))
                sequence.known += 1
            if stop or sequence.known == sequence.limit:
                done.append(sequence)
        for sequence in done:
            self._end(sequence)
        stats.kv_bytes_now = self.pool.used_slots * self._slot_bytes
        return done

    def _book(self, visit: NodeVisit, take: Take, queries: np.ndarray, left: np.ndarray) -> None:
        """Books the rows that a step brought to a visit."""
        sequence, first, stop = take.sequence, visit.done, visit.done + take.rows
        own = queries >= 0
        gone = np.where(own, left[queries], True) if len(left) else ~own
        visit.left[first:stop] = gone
        visit.settle(take.rows)
        if take.visit == 0:
            self.tree.stored(visit.node)
        if take.visit == 0 and visit.node.lost:
            self.stats.recomputed_rows += take.rows
            visit.node.lost = visit.pending > 0
        if not sequence.is_open and visit.prefix[-1] >= 0:
            saved = int(np.count_nonzero(gone & own)) * sum(unit >= 0 for unit in sequence.route[take.visit + 1 :])
            self.stats.block_calls_saved += saved
            self.stats.kv_bytes_freed += saved * self._slot_bytes
        self.stats.kv_bytes_freed -= int(np.count_nonzero(visit.owned[first:stop] & ~own)) * self._slot_bytes

    def _go_on(self, sequence: Routed, block: int) -> None:
        """Goes on with the route as the router says, and ends it where it says exit or there are no visits left."""
        visits = self.visits
        if sequence.state == "ended" or not sequence.is_open:
            return
        if block == NOT_FINITE:
            message = f"the router's logits after {sequence.num_visits} visits are not finite numbers"
            remedy = 'try dtype="float32" (--dtype float32); if it stays, the weights are damaged'
            self.cancel(sequence.key)
            self._failed.append((sequence.key, InputError(message, remedy=remedy, code="not_finite")))
            return
        # The samples of a request take one route.
        together, ends = list(self.requests[sequence.key]), block >= visits.blocks
        if not ends:
            for one in together:
                one.go_on(block)
        route = list(sequence.route)
        if ends or sequence.num_visits >= (sequence.exits.max_visits or len(visits.order)):
            route += [CODA] * visits.coda
            sequence.decided.route = tuple(route)
            for one in together:
                one.is_open = False
                for unit in route[len(one.route) :]:
                    one.go_on(unit)

    # ------------------------------------------------------------------------------------------------ who runs

    def _admit(self) -> None:
        promised = None
        while len(self.running) < self.max_running and (first := self.waiting.first(self)) is not None:  # type: ignore[arg-type]
            assert isinstance(first, Routed)
            sequence = first
            if self.running:
                if promised is None:
                    promised = sum(self._claims.to_come(one) for one in self.running)
                need = promised + self._claims.to_come(sequence)
                if need > self.pool.free_slots:
                    self._claims.make_free(need)
                if need > self.pool.free_slots:
                    return
                promised = need
            self._count_admission(sequence)
            self.waiting.admitted(sequence, sequence.leaf.stop - (sequence.cached_tokens or 0))
            sequence.state, sequence.ready, sequence.visit, sequence.waited = "running", False, 0, 0
            self.running[sequence] = None

    def _preempt(self, sequence: Routed) -> None:
        """Puts a sequence back at the head of the queue, and gives up the rows of its own tokens. Those of its prompt
        stay while there is room."""
        del self.running[sequence]
        sequence.tail.lost |= sequence.tail.computed > 0
        self.pool.free(sequence.tail.give_up())
        sequence.state, sequence.ready, sequence.visit = "waiting", False, 0
        self.waiting.put_back(sequence)
        self.stats.preemptions += 1
        if not self.pool.free_slots:
            self._release_waiting(*self.running)

    def _release_waiting(self, *keep: Routed) -> bool:
        """Gives up the rows of prompts that only waiting sequences need, and returns whether there were any."""
        needed = {node for sequence in keep for node in sequence.leaf.path()}
        found = False
        for node in self.tree.nodes():
            if node.users and node not in needed and not node.pins and node.num_slots:  # type: ignore[attr-defined]
                found = True
                node.lost |= node.computed > 0
                self.pool.free(self.tree.drop(node))
        return found

    def _fail(self, sequence: Routed) -> tuple[Hashable, InputError]:
        error = InputError(
            f"the KV store holds {self.pool.num_slots} rows at one visit each, too few for a sequence of"
            f" {sequence.tail.stop} rows at {len(sequence.route)} visits",
            field="max_tokens",
            remedy="give a larger kv_memory, or a max_tokens that fits",
            code="kv_memory",
        )
        self.cancel(sequence.key)
        return sequence.key, error

    def _end(self, sequence: Routed) -> None:
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self.waiting.ended(sequence)
        sequence.state = "ended"
        request = self.requests[sequence.key]
        del request[sequence]
        if not request:
            del self.requests[sequence.key]
        # Rows that leave by other rules than a prompt's are no rows of a prompt.
        alike = (sequence.exits.prompts and not sequence.exits.visits) or not may_leave(sequence.exits)
        if self.cache is not None and sequence.ready and alike:
            self.cache.graft(sequence.tail, sequence.priority)
        else:
            self.pool.free(sequence.tail.give_up())
        node: Node | None = sequence.leaf
        while node is not None and node.parent is not None:
            assert isinstance(node, VisitNode)
            parent = node.parent
            node.users -= 1
            for prefix in sequence.prefixes:
                visit = node.visits[prefix]
                visit.users -= 1
                if not visit.users and (self.cache is None or not visit.done):
                    self.pool.free(visit.give_up())
                    del node.visits[prefix]
            if not node.users:
                if self.cache is not None:
                    self.cache.keep(node)
                else:
                    self.pool.free(self.tree.drop(node))
                    self.tree.detach(node)
            node = parent

    def _count_admission(self, sequence: Routed) -> None:
        if sequence.cached_tokens is not None:
            return
        sequence.cached_tokens = 0
        for node in sequence.leaf.path():
            visits = [node.visits[prefix] for prefix in sequence.prefixes]  # type: ignore[attr-defined]
            rows = min((visit.done for visit in visits), default=0)
            sequence.cached_tokens += rows
            if node.uses:
                self.stats.cross_window_hits += rows
            else:
                self.stats.first_admission_hits += rows

    def check(self) -> None:
        """Raises AssertionError where slots, users of nodes and states of sequences do not agree; for tests."""
        check_visits(self)
