"""The scheduler of generation: which rows the next step computes, and which sequences take its tokens.

A step has one row for every running sequence, and in what remains of its budget new rows of prompts. Every row belongs
to one trie: prompts, and below each prompt the tokens that its sequences have made (a sequence's *tail*). A node's rows
are computed once, however many sequences wait for them. They stay while a sequence below the node is waiting or
running; when the last of these ends, their slots are free (with a radix cache: may be evicted).

`admit` decides which sequences run, `plan` only reads and returns the next step, `begin` and `commit` book it. The
result of a step comes to `commit` as tokens; the scheduler sees no tensors. The next step may be planned between
`begin` and `commit` of a step: in place of a token in flight it names the read that gives the token. Between `plan` and
`begin` nothing may change.

One thread owns the books: the trie, the slots, the waiting and running sequences. After an exception in a change they
cannot be trusted: `clear` empties them, and requests are submitted again with the tokens that they have made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np

from ...errors import InputError
from ...spec.requests import Owner
from ..cache import CacheOptions, RadixCache, SlotPool
from ..cache.tree import Node, RowTrie
from .admission import NO_LIMITS, StepLimits
from .generate_step import GenerateStep, HoldsRows, RepeatedStep, SequenceState, StepPlan, lay_out
from .sequences import SequenceScheduler
from .steps import SlotResult

# Slots that a sequence of unknown length takes at once, so that its rows lie side by side.
TAIL_SLOTS = 16


class GenerateScheduler(SequenceScheduler):
    """A GenerateScheduler decides what each step of continuous batching over one trie computes.

    pool, max_batch_rows, max_running   as of SequenceScheduler
    cache       the options of the radix cache for rows of ended sequences; None: rows are freed at once
    clock       returns the time in seconds, for the cache
    slot_bytes  the bytes of one slot, for the statistics
    holds_rows  says which rows of images the worker holds; None: the model takes no images
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
        holds_rows: HoldsRows | None = None,
    ):
        tree = RowTrie()
        super().__init__(
            pool,
            tree,
            None if cache is None else RadixCache(tree, pool, cache, clock),
            max_batch_rows=max_batch_rows,
            max_running=max_running,
            slot_bytes=slot_bytes,
        )
        self.ending: dict[SequenceState, None] = {}  # their last token is in flight
        self._in_flight: deque[GenerateStep] = deque()
        # The step that was begun last, if it can be the same again: no sequence was admitted since.
        self._repeated: RepeatedStep | None = None
        self._in_use = 0  # slots that sequences held when the last step began
        self._holds_rows = holds_rows

    # ----------------------------------------------------------------------------- requests that come and go

    def clear(self) -> None:
        super().clear()
        self.ending.clear()
        self._in_flight.clear()
        self._repeated = None

    def _admitted(self) -> Iterable[SequenceState]:
        return (*self.running, *self.ending)

    @property
    def _has_begun(self) -> bool:
        return bool(self._in_flight)

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self, limits: StepLimits = NO_LIMITS) -> list[tuple[Hashable, InputError]]:
        """Gives running sequences slots for their next rows, and admits waiting sequences while there is room. Returns
        the requests that can never run, which it has ended, as (key, error). limits: of the next step, as known so far
        """
        failures: list[tuple[Hashable, InputError]] = []
        if self.cache is not None:
            self.cache.expire()
        repeated = self._repeated
        if repeated is None or repeated.next == len(repeated.ahead):  # for the repetitions ahead there are slots
            self._grow_tails(failures)
        if len(self.waiting) and self._has_room():
            self._admit_waiting(failures, limits)
        return failures

    def plan(self, limits: StepLimits = NO_LIMITS) -> GenerateStep | None:
        """Returns the next step of the running sequences; changes nothing.

        Returns None if no sequence runs, or none may have rows now, or one gets no slot for its next row until a step
        in flight is committed.
        """
        repeated = self._repeated
        if repeated is not None and self._all_go_on(repeated.step, limits) and (step := repeated.again()) is not None:
            return step
        if not self.running or not self._has_room():
            return None
        plan = self.waiting.fill(self._new_plan(limits), self.running, limits)
        return self._lay_out(plan) if plan.computed_rows or plan.rereads or plan.repeats else None

    def _all_go_on(self, before: GenerateStep, limits: StepLimits) -> bool:
        """Returns whether the next step has a row of each running sequence, as the step before it had. In a step that
        followed each that ran had a row, and none was admitted since: if there are as many, they are the same."""
        running, rows, are_alike = self.running, len(before.consumers), self.waiting.are_alike(limits)
        fit = len(running) == rows <= self._max_rows(limits) and (are_alike or rows <= (limits.batch_rows or 0))
        return fit and (before.message.follows or all([sequence in running for sequence in before.consumers]))

    _repeats = True  # whether a step can be the same again
    _lay_out: Callable[..., GenerateStep] = staticmethod(lay_out)

    def _new_plan(self, limits: StepLimits) -> StepPlan:
        return StepPlan(self._max_rows(limits), self._holds_rows)

    def begin(self, step: GenerateStep) -> None:
        """Books a step as started: the next step can be planned before the tokens of this one are there."""
        self._in_flight.append(step)
        repeated = self._repeated
        if repeated is not None and step.message.follows:
            repeated.step, repeated.next = step, repeated.next + 1
        else:
            self._repeated = RepeatedStep.of(step) if self._repeats else None
        stats = self.stats
        in_use = self.pool.used_slots - (self.cache.rows if self.cache else 0)
        if in_use != self._in_use or not step.message.follows or not stats.steps:
            self._in_use = in_use
            unshared = sum(len(sequence.tail.slots) + sequence.leaf.stop for sequence in self._admitted())
            stats.running_peak = max(stats.running_peak, len(self.running))
            stats.kv_bytes_peak = max(stats.kv_bytes_peak, in_use * self._slot_bytes)
            stats.kv_bytes_unshared_peak = max(stats.kv_bytes_unshared_peak, unshared * self._slot_bytes)
        for node, rows in step.computed_rows:
            node.num_computed += rows
            node.lost = node.lost and node.num_pending > 0
            if self.tree.on_store:
                self.tree.stored(node)
        for number, sequence in enumerate(step.consumers):
            sequence.ready = True
            sequence.tail.tokens.append(-1 - number)
            if len(sequence.tail.tokens) == sequence.limit:
                del self.running[sequence]
                self.ending[sequence] = None
                sequence.state = "ending"

    def commit(
        self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool], result: SlotResult | None = None
    ) -> list[SequenceState]:
        """Books the tokens of a step, and returns the sequences that have ended, by `ended` or by their limit.

        tokens  the token of each of `step.consumers`; ignored for a sequence that had ended before
        ended   whether each of them ends here; its token is then no part of the output
        result  the worker's result, whose ids are the tokens; None: the tokens alone are known

        Raises ValueError if this is not the step that was begun first.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError("this is not the step that was begun first")
        self._in_flight.popleft()
        step.ids = None if result is None else result.ids
        stats = self.stats
        stats.steps += 1
        stats.decode_rows += step.decode_rows
        stats.prefill_rows += step.num_rows - step.decode_rows
        stats.recomputed_rows += step.recomputed_rows
        finished, late = [], []
        for sequence, token, stop in zip(step.consumers, tokens, ended, strict=True):
            if sequence.state == "ended":
                late.append(sequence.tail)
                continue
            if not stop:
                sequence.tail.tokens[sequence.num_known] = int(token)
                sequence.num_known += 1
            if stop or sequence.num_known == sequence.limit:
                finished.append(sequence)
        if late:
            stats.discarded_rows += sum(rows for node, rows in step.computed_rows if node in late)
        for sequence in finished:
            self._end(sequence)
        stats.kv_bytes_now = self.pool.used_slots * self._slot_bytes
        return finished

    # ------------------------------------------------------------------------------------- running sequences

    def _has_room(self) -> bool:
        """Returns whether there is a slot for the next row of every running sequence."""
        return all([len(sequence.tail.slots) >= len(sequence.tail.tokens) for sequence in self.running])

    def _grow_tails(self, failures: list[tuple[Hashable, InputError]]) -> None:
        """Gives every running sequence a slot for its next row. If no slot is free, the sequence that was admitted
        last is preempted; but while a step is in flight nothing is done, because that step may free slots."""
        for sequence in list(self.running):
            tail = sequence.tail
            while len(tail.slots) < len(tail.tokens) and sequence.state == "running":
                slots = self._slots(self._tail_rows(sequence) - len(tail.slots))
                if slots is None:
                    slots = self._slots(1)
                if slots is not None:
                    tail.claim(slots)
                elif self._in_flight:
                    return
                elif len(self.running) > 1:
                    self._preempt(self.waiting.victim(self.running))
                elif not self._release_waiting(sequence):
                    failures.append(self._fail(sequence))

    def _admit_waiting(self, failures: list[tuple[Hashable, InputError]], limits: StepLimits) -> None:
        """Admits sequences in the order of the policy until a step is full. A sequence of a batch without room ends the
        admission of batches only."""
        pending = dict[Owner, int]()  # how many rows go before the rows of an owner's next sequence
        batches, max_rows = True, self._max_rows(limits)
        while (sequence := self.waiting.first(self, limits, batches=batches)) is not None:
            is_full = len(self.running) >= self.max_running
            if is_full and self.waiting.gives_way(sequence, self.running) is None:
                fits = False
            else:
                if sequence.owner not in pending:
                    before = self.waiting.before(sequence, self.running)
                    pending[sequence.owner] = len(before) + self._pending_rows(before)
                fits = pending[sequence.owner] < max_rows and (not is_full or self._make_way(sequence))
            rows = self._start(sequence, failures) if fits else None
            if rows is not None:
                for owner in pending:
                    pending[owner] += rows if owner == sequence.owner or owner.is_batch else 0
            elif sequence.owner.is_batch and batches:
                batches = False
            else:
                return

    def _start(self, sequence: SequenceState, failures: list[tuple[Hashable, InputError]]) -> int | None:
        """Lets a waiting sequence run, or fail if it never can. Returns how many rows it adds; None if it waits."""
        path = sequence.leaf.path()
        while True:
            scant = [] if self.cache is None else self.cache.scant(path)
            cached = {node: 0 if node in scant else len(node.slots) for node in path}
            fresh = {node: len(node) - count for node, count in cached.items() if count < len(node)}
            rows = sum(fresh.values())
            # The slots are neighbours, so that attention reads the rows of this sequence alone as one run.
            slots = self._slots(rows + self._tail_rows(sequence), path)
            if slots is not None:
                break
            if self._make_way(sequence):
                continue
            if self.running or self._in_flight:
                return None
            # Nothing runs that could free slots: waiting sequences give up rows, which are computed again.
            if not self._release_waiting(sequence):
                failures.append(self._fail(sequence))
                return 0
        self._count_admission(sequence, path, fresh)
        for node, count in fresh.items():
            node.claim(slots[:count])
            slots = slots[count:]
        sequence.tail.claim(slots)
        sequence.state, sequence.ready = "running", False
        self.running[sequence], self._repeated = None, None
        rows -= self._spare(sequence)
        self.waiting.note_admission(sequence, rows)
        return 1 + rows + len(sequence.tail)

    def _spare(self, sequence: SequenceState) -> int:
        """Returns how many missing rows of a newly admitted sequence need not be computed; a subclass may copy some."""
        return 0

    def _tail_rows(self, sequence: SequenceState) -> int:
        """Returns how many slots a sequence's tail should have: for its whole output if that is reserved, or for
        TAIL_SLOTS further rows."""
        last = sequence.limit - 1  # the last token is no row
        return last if sequence.reserve else min(last, len(sequence.tail) + TAIL_SLOTS)

    def _pending_rows(self, running: Collection[SequenceState]) -> int:
        """Returns how many rows must be computed before all these sequences generate."""
        counted: set[Node] = set()
        pending = 0
        for sequence in running:
            if not sequence.ready:
                for node in sequence.leaf.path():
                    if node not in counted:
                        counted.add(node)
                        pending += node.num_pending
                pending += len(sequence.tail)
        return pending

    def _slots(self, count: int, path: Sequence[Node] = ()) -> np.ndarray | None:
        """Returns so many slots, or None if even evicting all kept rows would not free enough, and then changes
        nothing.

        path  the path of a sequence that is admitted: the cache gives up its scant rows (see `RadixCache.scant`)
        """
        if self.cache is not None:
            given_up = sum(len(node.slots) for node in self.cache.scant(path))
            short = count - self.pool.free_slots - given_up
            if short > self.cache.rows:
                return None
            self.cache.use(path)
            if short > 0:
                self.cache.evict(short)
        return self.pool.allocate(count)

    def _fail(self, sequence: SequenceState) -> tuple[Hashable, InputError]:
        return self._too_small(f"{self.pool.num_slots} rows", f"a sequence of {sequence.tail.stop + 1}", sequence)

    def _end(self, sequence: SequenceState) -> None:
        del sequence.tail.tokens[sequence.num_known :]
        super()._end(sequence)

    def _runs_no_more(self, sequence: SequenceState) -> None:
        del {"running": self.running, "ending": self.ending}[sequence.state][sequence]

    def _count_admission(self, sequence: SequenceState, path: list[Node], fresh: Collection[Node]) -> None:
        if sequence.cached_tokens is not None:
            return
        stats = self.stats
        cached = [node for node in path if node not in fresh]
        sequence.cached_tokens = sum(map(len, cached))
        for node in cached:
            if node.num_pending:
                stats.in_step_hits += len(node)
            elif node.uses:
                stats.cross_window_hits += len(node)
            else:
                stats.first_admission_hits += len(node)

    # ------------------------------------------------------------------------------------------------- checking
