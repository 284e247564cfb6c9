"""The scheduler of looped models whose rows may leave before the last visit, or take routes: a step is one visit.

A row goes through one block a step. Rows whose next block is the same go together, whatever visit of whatever route it
is to them; as rows leave, others take their places. A prompt goes through a visit as a whole before the next (its rows
in pieces where the step is too small), for a router looks at all of it.

`admit` settles which sequences run and which rows the next step has, and claims their slots; `plan` only lays that step
out; `begin` and `commit` book it. `commit` learns which rows left and which blocks the router chose, beside the tokens.
Between `begin` and `commit` nothing else may change: no step is planned ahead.

What was decided is kept with the tokens (`ExitRecord`): a row that is computed again leaves after the same visit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..cache import CacheOptions, SlotPool
from ..cache.tree import Node, RowTrie
from ..errors import InputError
from ..schedule.admission import NO_LIMITS, StepLimits
from ..schedule.sequences import SequenceScheduler
from ..schedule.steps import NOT_FINITE
from ..types import Exits
from .cache import OUTPUT_SLOTS, NodeVisit, SlotAllocator, VisitCache, VisitNode
from .decode import Decoding
from .draft import Take, VisitDraft
from .layout import VisitPlan, lay_out
from .outputs import OutputRows
from .sequence import ExitRecord, LoopedSequence
from .steps import CODA, VisitOptions, VisitResult, may_leave, rule_of


class VisitScheduler(SequenceScheduler[LoopedSequence]):
    """A VisitScheduler chooses the rows and the block of each step, and has the interface of a GenerateScheduler.

    pool            the slots of the store, each of one row at one visit
    visits          how rows go through the model
    max_batch_rows, max_running, cache, clock, slot_bytes   as of GenerateScheduler
    """

    makes_passes = False

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
        tree = RowTrie(VisitNode)
        self.visits = visits
        self._most = len(visits.order) + visits.prelude + visits.coda
        visit_cache = None if cache is None else VisitCache(tree, pool, cache, clock)
        super().__init__(
            pool,
            tree,
            visit_cache,
            max_batch_rows=max_batch_rows,
            max_running=max_running,
            slot_bytes=slot_bytes,
            slots_per_row=self._most,
        )
        self._outputs = OutputRows(self._most)
        self._slots = SlotAllocator(pool, visits, visit_cache)
        self._decoding = Decoding(self._slots, self._outputs)
        self._draft: VisitDraft | None = None
        self._begun_step: VisitPlan | None = None
        self._failures: list[tuple[Hashable, InputError]] = []

    # -------------------------------------------------------------------------- sequences that come and go

    def _sequence_kind(
        self, namespace: tuple[Hashable, ...], exits: Exits | None = None, exit_record: ExitRecord | None = None
    ) -> tuple[int, tuple[Hashable, ...], Callable[..., LoopedSequence]]:
        """exits: the route, and when rows leave, by the model's threshold if they have none. exit_record: what earlier
        runs of this request decided, to which this run adds"""
        exits, namespace = self._filled(exits), self.namespace_of(namespace, exits)
        visits = self._most if exits.route is None else len(exits.route) + self.visits.prelude + self.visits.coda
        options = {"exits": exits, "visits": self.visits, "exit_record": exit_record or ExitRecord()}
        return visits, namespace, partial(LoopedSequence, outputs=self._outputs, namespace=namespace, **options)

    def namespace_of(self, namespace: tuple[Hashable, ...], exits: Exits | None) -> tuple[Hashable, ...]:
        return (*namespace, *rule_of(self._filled(exits)))

    def _filled(self, exits: Exits | None) -> Exits:
        """Returns exits with the model's threshold where they have none."""
        exits = exits or Exits()
        return replace(exits, threshold=self.visits.threshold) if exits.threshold is None else exits

    def cancel(self, key: Hashable) -> None:
        self._draft = None
        super().cancel(key)

    def clear(self) -> None:
        super().clear()
        self._outputs.clear()
        self._decoding.forget()
        self._draft = self._begun_step = None

    @property
    def _has_begun(self) -> bool:
        return self._begun_step is not None

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self, limits: StepLimits = NO_LIMITS) -> list[tuple[Hashable, InputError]]:
        """Admits waiting sequences while there is room, and settles the next step, within these limits. Returns the
        requests that can never run, each with its error; they have been ended."""
        if self._begun_step is not None:
            return []
        failed, self._failures = self._failures, []
        self._draft = None
        if self.cache is not None:
            self.cache.expire()
        self._admit(limits)
        while self.running:
            self._draft = draft = self._drafted(limits)
            if not draft.is_empty or not self._slots.is_short:
                break  # where slots are not short, the policy gives no running sequence rows
            # No sequence can go on: one of them makes room.
            last: LoopedSequence = self.waiting.victim(self.running)  # type: ignore[assignment]
            if len(self.running) > 1:
                self._preempt(last)
            elif not self._release_waiting(last):
                failed.append(self._fail(last))
        return failed

    def _drafted(self, limits: StepLimits) -> VisitDraft:
        """Returns the draft of the next step, whose rows have got their slots."""
        self._slots.is_short, batch, most = False, self._decoding.batch(self.running), self._max_rows(limits)
        draft = self.waiting.fill(VisitDraft(most, self._slots, self._decoding, batch), self.running, limits)
        if draft.parts:
            draft.decode = self._decoding.rows(batch, draft.parts)
            if self.waiting.are_alike(limits) and len(batch.sequences) == len(self.running):
                self._decoding.go_on(draft.decode, most)
        return draft

    def plan(self, limits: StepLimits = NO_LIMITS) -> VisitPlan | None:
        """Returns the step that `admit` settled; changes nothing. None where there is none, or one has begun."""
        if self._draft is None or self._draft.is_empty or self._begun_step is not None:
            return None
        return lay_out(self._draft, self._decoding)

    def begin(self, step: VisitPlan) -> None:
        """Books a step as being run."""
        self._begun_step, self._draft = step, None
        stats = self.stats
        stats.running_peak = max(stats.running_peak, len(self.running))
        if self.pool.used_slots * self._slot_bytes > stats.kv_bytes_peak:
            used_slots = self.pool.used_slots - self._slots.num_kept
            stats.kv_bytes_peak = max(stats.kv_bytes_peak, used_slots * self._slot_bytes)
        batch = self._decoding.batch(self.running)
        unshared = self._decoding.begin(batch, step.decode)
        if len(batch.sequences) < len(self.running):
            moving = {take.sequence for _, take, _ in step.takes} | {*step.consumers, *step.routed}
            for sequence in self.running:
                if not sequence.ready:
                    unshared += (len(sequence.tail) + sequence.leaf.stop) * max(1, len(sequence.route))
                    sequence.steps_waited = 0 if sequence in moving else sequence.steps_waited + 1
        stats.kv_bytes_unshared_peak = max(stats.kv_bytes_unshared_peak, unshared * self._slot_bytes)

    def commit(
        self, step: VisitPlan, tokens: Sequence[int], ended: Sequence[bool], result: VisitResult
    ) -> list[LoopedSequence]:
        """Books the result of a step, and returns the sequences that have ended, by `ended` or by their limit.

        tokens  the token that each of `step.consumers` got; ignored where its read was not made
        ended   whether each of them ends here; its token is then no part of the output
        result  which rows left, which reads were made, and the blocks that the router chose

        Raises ValueError where this is not the step that was begun.
        """
        if self._begun_step is not step:
            raise ValueError("this is not the step that was begun")
        self._begun_step, stats = None, self.stats
        stats.steps += 1
        stats.decode_rows += step.decode_rows
        stats.prefill_rows += step.first_rows - step.decode_rows
        rows, prompts = step.prompt_rows, step.prompts
        stats.block_calls += rows if step.message.block >= 0 else 0
        for visit, take, queries in step.takes:
            self._book(visit, take, queries, result.has_left)
        if (decode := step.decode) is not None:
            stats.block_calls += decode.block_calls(result)
            saved = self._decoding.book(decode, result, result.has_left[rows:])
            stats.block_calls_saved += saved
            stats.kv_bytes_freed += (saved - int(np.count_nonzero(decode.projected))) * self._slot_bytes
            if self.tree.on_store:
                for number in decode.members[decode.at == 0].tolist():
                    self.tree.stored(decode.batch.sequences[number].tail)
        for sequence, blocks in zip(step.routed, result.blocks.tolist(), strict=True):
            for block in blocks:
                self._go_on(sequence, block)
        is_plain, was_read = [False] * prompts, np.ones(prompts, bool)
        for sequence in step.consumers[:prompts]:
            if sequence.state != "ended":
                self._decoding.forget()
                sequence.begin_output()
        if decode is not None:
            was_read = np.concatenate((was_read, result.was_read[prompts:]))
            self._decoding.note_exits(decode, was_read[prompts:])
            is_plain += [decode.batch.plain[number] for number in decode.members[decode.reads].tolist()]
        consumers = [
            (step.consumers[i], int(tokens[i]), ended[i], is_plain[i])
            for i in np.flatnonzero(was_read).tolist()
            if step.consumers[i].state != "ended"
        ]
        finished = self._decoding.take(consumers)
        for sequence in finished:
            self._end(sequence)
        stats.kv_bytes_now = self.pool.used_slots * self._slot_bytes
        return finished

    def _book(self, visit: NodeVisit, take: Take, queries: np.ndarray, has_exited: np.ndarray) -> None:
        """Books the rows that a step brought to a visit."""
        sequence, first, stop = take.sequence, visit.num_settled, visit.num_settled + take.rows
        has_query = queries >= 0
        has_left = np.where(has_query, has_exited[queries], True) if len(has_exited) else ~has_query
        visit.has_left[first:stop] = has_left
        visit.settle(take.rows)
        if take.t == 0:
            self.tree.stored(visit.node)
        if take.t == 0 and visit.node.lost:
            self.stats.recomputed_rows += take.rows
            visit.node.lost = visit.num_pending > 0
        if not sequence.is_open and visit.prefix[-1] >= 0:
            num_later = sum(unit >= 0 for unit in sequence.route[take.t + 1 :])
            saved = int(np.count_nonzero(has_left & has_query)) * num_later
            self.stats.block_calls_saved += saved
            self.stats.kv_bytes_freed += saved * self._slot_bytes
        self.stats.kv_bytes_freed -= int(np.count_nonzero(visit.owns_slot[first:stop] & ~has_query)) * self._slot_bytes

    def _go_on(self, sequence: LoopedSequence, block: int) -> None:
        """Goes on with the route as the router says, and ends it where it says exit or there are no visits left."""
        visits = self.visits
        if sequence.state == "ended" or not sequence.is_open:
            return
        if block == NOT_FINITE:
            message = f"the router's logits after {sequence.num_visits} visits are not finite numbers"
            remedy = 'try dtype="float32" (--dtype float32); if it stays, the weights are damaged'
            self.cancel(sequence.key)
            self._failures.append((sequence.key, InputError(message, remedy=remedy, code="not_finite")))
            return
        # The samples of a request take one route.
        together, ends = list(self._requests[sequence.key]), block >= visits.blocks
        if not ends:
            for sample in together:
                sample.go_on(block)
                self._find(sample, 1)
        route = list(sequence.route)
        if ends or sequence.num_visits >= (sequence.exits.max_visits or len(visits.order)):
            route += [CODA] * visits.coda
            sequence.exit_record.route = tuple(route)
            for sample in together:
                sample.is_open = False
                rest = route[len(sample.route) :]
                for unit in rest:
                    sample.go_on(unit)
                self._find(sample, len(rest))

    # ------------------------------------------------------------------------------------------- admission

    def _admit(self, limits: StepLimits) -> None:
        self._promised: int | None = None
        batches = True
        while (sequence := self.waiting.first(self, limits, batches=batches)) is not None:
            assert isinstance(sequence, LoopedSequence)
            if self._start(sequence):
                continue
            if not (sequence.owner.is_batch and batches):
                return
            batches = False

    def _start(self, sequence: LoopedSequence) -> bool:
        """Starts a waiting sequence if there is room for it; returns whether there is."""
        if len(self.running) >= self.max_running and not self._make_way(sequence):
            return False
        while self.running:
            if self._promised is None:
                self._promised = sum(self._slots_to_come(other) for other in self.running)
            need = self._promised + self._slots_to_come(sequence)
            if 0 < need - self.pool.free_slots <= self._slots.num_kept:  # else eviction would not make enough room
                self._slots.make_free(need)
            if need <= self.pool.free_slots:
                self._promised = need
                break
            if not self._make_way(sequence):
                return False
            self._promised = None
        if self.cache is not None and self.cache.use(sequence.leaf.path()):
            self._promised = None  # running sequences with the same path may need the rows that were given up
        sequence.run()
        self._find(sequence, len(sequence.prefixes))
        cached_rows = sequence.cached_tokens
        if cached_rows is None:  # the router has not chosen all visits yet
            cached_rows = sum(node.num_computed for node in sequence.leaf.path())
        self.waiting.note_admission(sequence, sequence.leaf.stop - cached_rows)
        self.running[sequence] = None
        self._decoding.forget()
        return True

    def _slots_to_come(self, sequence: LoopedSequence) -> int:
        """Returns how many slots a sequence may still need, at most: for its prompt, and for its output where room for
        that is set aside."""
        visits = self.visits
        most = max(len(sequence.route), len(visits.order) + visits.prelude + visits.coda if sequence.is_open else 0)
        last, tail = sequence.limit - 1, sequence.tail
        rows = last if sequence.reserve else min(last, len(tail.tokens) + OUTPUT_SLOTS)
        full = len(tail.tokens) - 1 if sequence.ready else 0
        count = (rows - full) * most
        if not sequence.ready:
            for node in sequence.leaf.path():
                node_visits = [node.visits[prefix] for prefix in sequence.prefixes]  # type: ignore[attr-defined]
                count += len(node) * most - sum(int((visit.slots[: len(node)] != 0).sum()) for visit in node_visits)
        return max(0, count)

    def _preempt(self, sequence: LoopedSequence) -> None:
        self._decoding.forget()
        super()._preempt(sequence)

    def _fail(self, sequence: LoopedSequence) -> tuple[Hashable, InputError]:
        rows, visits = sequence.tail.stop, len(sequence.route)
        holds, needs = f"{self.pool.num_slots} rows at one visit each", f"a sequence of {rows} rows at {visits} visits"
        return self._too_small(holds, needs, sequence)

    def _runs_no_more(self, sequence: LoopedSequence) -> None:
        self._decoding.forget()
        super()._runs_no_more(sequence)

    def _is_prompt_like(self, sequence: LoopedSequence) -> bool:
        # Rows that leave by other rules than a prompt's are no rows of a prompt.
        return (sequence.exits.prompts and not sequence.exits.visits) or not may_leave(sequence.exits)

    def _leave(self, sequence: LoopedSequence, node: Node) -> None:
        assert isinstance(node, VisitNode)
        for prefix in sequence.prefixes:
            visit = node.visits[prefix]
            visit.users -= 1
            if visit.users:
                continue
            if self.cache is not None and visit.num_settled:
                self.cache.untaken[node] = None  # type: ignore[attr-defined]
            else:
                self.pool.free(visit.give_up())
                del node.visits[prefix]

    def _find(self, sequence: LoopedSequence, visits: int) -> None:
        """Records which rows of a running sequence are in the cache at the last visits of its route, and counts them
        once the whole route is known."""
        if sequence.cached_tokens is not None or sequence.state == "waiting":
            return
        sequence.find(sequence.prefixes[len(sequence.prefixes) - visits :])
        if sequence.is_open:
            return
        sequence.cached_tokens = sequence.rows_there
        for node in sequence.leaf.path():
            rows = max(0, min(len(node), sequence.rows_there - node.start))
            if node.uses:
                self.stats.cross_window_hits += rows
            else:
                self.stats.first_admission_hits += rows
