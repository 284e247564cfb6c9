"""The generation scheduler: which rows the next step computes, and whose tokens it brings.

A step has one row for every running sequence, and new rows of prompts in what remains of its budget. Every
row is a row of one trie: prompts, and below them the tokens each sequence has made (its *tail*). A node's
rows are computed once, whoever waits for them; they stay while a sequence below is waiting or running, and
in the moment the last of these ends their slots are free (with a radix cache: may be evicted).

`plan` settles who runs and returns the next step; called again before `begin` or `commit` it returns the same. No
tensors, no clock; what a step computes comes back to `commit` as tokens. Between `begin` and `commit` of a step the
next one may be planned: of a token that is still to come it says which one it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..cache import SCRATCH, CacheOptions, RadixCache, SlotPool
from ..cache.tree import Node, RadixTree, common_prefix
from ..errors import InputError
from ..types import GenerationStats
from .generate_step import Draft, GenerateStep, Running, lay_out

__all__ = ["GenerateScheduler"]

# Slots that a sequence of unknown length takes at once, so that its rows lie side by side.
TAIL_SLOTS = 16


@dataclass(slots=True)
class _Arrival:
    key: Hashable
    tokens: np.ndarray
    samples: int
    limit: int
    reserve: bool
    namespace: Hashable
    priority: int


class GenerateScheduler:
    """Continuous batching over one trie.

    pool            the slots of the KV store
    max_batch_rows  rows of a step
    max_running     sequences at once; never more than rows in a step
    sharing         False: every request has rows of its own
    cache           keep rows of ended sequences by these options; None: free them at once
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        max_batch_rows: int,
        max_running: int,
        sharing: bool = True,
        cache: CacheOptions | None = None,
    ):
        self.pool = pool
        self.tree = RadixTree()
        self.cache = None if cache is None else RadixCache(self.tree, pool, cache)
        self.max_batch_rows = max_batch_rows
        self.max_running = min(max_running, max_batch_rows)
        self.stats = GenerationStats()
        self.running: list[Running] = []
        self.waiting: deque[Running] = deque()
        self.failed: list[tuple[Hashable, InputError]] = []
        self._sharing = sharing
        self._arrivals: deque[_Arrival] = deque()
        self._cancelled: set[Hashable] = set()
        self._planned: GenerateStep | None = None
        self._begun: deque[GenerateStep] = deque()
        self._ending: list[Running] = []  # whose last token is on its way
        self.rows_held_peak = 0  # most slots in use by sequences
        self.rows_unshared_peak = 0  # what the same sequences would have held, had each rows of its own

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
    ) -> None:
        """A prompt, int32 [n], n >= 1, to be continued `samples` times by at most `limit` >= 1 tokens.

        Rows are shared within a namespace only. reserve: set aside room for the whole output when the prompt is
        admitted; else it grows, and the sequence may be preempted.

        InputError when the KV store could not hold even this one alone.
        """
        rows = len(tokens) + (limit - 1 if reserve else 0)
        if rows > self.pool.num_slots:
            raise InputError(
                f"the request needs the K/V of {rows} rows, the KV store holds {self.pool.num_slots}",
                field="max_tokens" if rows > len(tokens) else "prompt",
                remedy="give a larger kv_memory, or ask for fewer tokens",
                code="kv_memory",
            )
        if not self._sharing:
            namespace = (*namespace, key)
        self._arrivals.append(_Arrival(key, tokens, samples, limit, reserve, namespace, priority))

    def cancel(self, key: Hashable) -> None:
        """End all sequences of a request: at once, or when the step that is planned has been committed."""
        self._cancelled.add(key)
        self._drop_cancelled()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(arrival.samples for arrival in self._arrivals)

    @property
    def has_work(self) -> bool:
        return self.can_plan or bool(self._begun)

    @property
    def can_plan(self) -> bool:
        """Whether anybody is there for whom a step may be planned, now or when those that are being run have ended."""
        return bool(self.running or self.waiting or self._arrivals)

    # ------------------------------------------------------------------------------------------ plan and commit

    def plan(self) -> GenerateStep | None:
        """The next step; None when no sequence can run, or none before what is being run has come back."""
        if self._planned is None:
            self._take_arrivals()
            self._drop_cancelled()
            if self.cache is not None:
                self.cache.expire()
            if not self._grow_tails():
                return None
            self._admit()
            if self.running:
                self._planned = lay_out(Draft.of(self.running, self.max_batch_rows))
        return self._planned

    def begin(self, step: GenerateStep) -> None:
        """The step is being run: the next one may be planned before its tokens are there."""
        if step is not self._planned:
            raise ValueError("this is not the step that was planned last")
        self._planned = None
        self._begun.append(step)
        self._count(step)
        for node, rows in step.takes:
            node.computed += rows
            node.lost &= node.pending > 0
        for number, (sequence, _) in enumerate(step.reads):
            sequence.ready = True
            sequence.tail.tokens.append(-1 - number)
            if len(sequence.tail.tokens) == sequence.limit:
                self.running.remove(sequence)
                self._ending.append(sequence)
                sequence.state = "ending"

    def commit(self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool]) -> list[Running]:
        """The step was run: the token each of `step.reads` got, and whether it ends there (its token is then no part
        of the output). Of sequences that had ended before it is not looked at. Returns the sequences that have ended,
        by that or by their limit. Raises ValueError while another step is planned and not begun."""
        if self._planned is not None and (self._begun or step is not self._planned):
            raise ValueError("a step is planned: begin or abandon it before another one is committed")
        if self._planned is not None:
            self.begin(step)
        if not self._begun or step is not self._begun[0]:
            raise ValueError("this is not the step that was planned or begun first")
        self._begun.popleft()
        done, late = [], []
        for (sequence, _), token, stop in zip(step.reads, tokens, ended, strict=True):
            if sequence.state == "ended":
                late.append(sequence.tail)
                continue
            if not stop:
                sequence.tail.tokens[sequence.known] = int(token)
                sequence.known += 1
            if stop or sequence.known == sequence.limit:
                done.append(sequence)
        if late:
            self.stats.discarded_rows += sum(rows for node, rows in step.takes if node in late)
        for sequence in done:
            self._end(sequence)
        self._drop_cancelled()
        return done

    def abandon(self) -> None:
        """The step that was planned was not run to its end, and is forgotten; the next plan begins anew."""
        self._planned = None
        self._drop_cancelled()

    # ------------------------------------------------------------------------------------------------ who runs

    def _take_arrivals(self) -> None:
        while self._arrivals:
            arrival = self._arrivals.popleft()
            leaf = self.tree.insert(arrival.namespace, arrival.tokens)
            path = leaf.path()
            if self.cache is not None:
                self.cache.take(path)
            for node in path:
                node.users += arrival.samples
                node.priority = max(node.priority, arrival.priority)
            for sample in range(arrival.samples):
                tail = Node(leaf, [], leaf.stop)
                self.waiting.append(
                    Running(arrival.key, sample, leaf, tail, arrival.limit, arrival.reserve, arrival.priority)
                )

    def _drop_cancelled(self) -> None:
        if self._planned is None and self._cancelled:
            self._arrivals = deque(arrival for arrival in self._arrivals if arrival.key not in self._cancelled)
            for sequence in [s for s in (*self.running, *self.waiting, *self._ending) if s.key in self._cancelled]:
                self._end(sequence)
            self._cancelled.clear()

    def _grow_tails(self) -> bool:
        """A slot for the next row of every running sequence; where there is none, the latest makes room. False: what
        is being run may bring some, and is to be waited for."""
        for sequence in list(self.running):
            tail = sequence.tail
            while sequence.state == "running" and len(tail.slots) < len(tail):
                slots = self._slots(self._tail_rows(sequence) - len(tail.slots))
                if slots is None:
                    slots = self._slots(1)
                if slots is not None:
                    tail.claim(slots)
                elif self._begun:
                    return False
                elif len(self.running) > 1:
                    self._preempt(self.running[-1])
                elif not self._release_waiting(sequence):
                    self._fail(sequence)
        return True

    def _admit(self) -> None:
        pending = None
        while self.waiting and len(self.running) < self.max_running:
            if pending is None:
                pending = self._pending_rows()
            if pending >= self.max_batch_rows - len(self.running):
                return
            sequence = self.waiting[0]
            path = sequence.leaf.path()
            fresh = [node for node in path if len(node.slots) < len(node)]
            rows = sum(len(node) - len(node.slots) for node in fresh)
            tail_rows = self._tail_rows(sequence)
            if not self._make_room(rows + tail_rows, alone=not (self.running or self._begun), sequence=sequence):
                if self.running or self._begun:
                    return
                self._fail(sequence)
                continue
            self.waiting.popleft()
            self._count_admission(sequence, path, fresh)
            # Neighbours, so that what only this sequence sees is read as one run, however often its prompt was split.
            slots = self.pool.allocate(rows + tail_rows)
            assert slots is not None
            for node in fresh:
                count = len(node) - len(node.slots)
                node.claim(slots[:count])
                slots = slots[count:]
            sequence.tail.claim(slots)
            sequence.state, sequence.ready = "running", False
            self.running.append(sequence)
            pending += rows + len(sequence.tail)

    def _tail_rows(self, sequence: Running) -> int:
        """Slots a sequence's tail should have: for its whole output where that is reserved, else for some rows."""
        last = sequence.limit - 1  # the last token is no row
        return last if sequence.reserve else min(last, len(sequence.tail) + TAIL_SLOTS)

    def _pending_rows(self) -> int:
        seen: set[Node] = set()
        pending = 0
        for sequence in self.running:
            if not sequence.ready:
                for node in sequence.leaf.path():
                    if node not in seen:
                        seen.add(node)
                        pending += node.pending
                pending += len(sequence.tail)
        return pending

    def _slots(self, count: int) -> np.ndarray | None:
        if count > self.pool.free_slots and self.cache is not None:
            self.cache.evict(count - self.pool.free_slots)
        return self.pool.allocate(count)

    def _make_room(self, rows: int, *, alone: bool, sequence: Running) -> bool:
        short = rows - self.pool.free_slots
        if short > 0 and self.cache is not None:
            short -= self.cache.evict(short)
        if short > 0 and alone:
            # Nothing will end by itself: what those who wait have computed is computed again.
            self._release_waiting(sequence)
        return rows <= self.pool.free_slots

    def _preempt(self, sequence: Running) -> None:
        """Back to the head of the queue. Its own tokens' rows are given up; those of its prompt stay while they can."""
        self.running.remove(sequence)
        sequence.tail.lost |= sequence.tail.computed > 0
        self.pool.free(sequence.tail.give_up())
        sequence.state, sequence.ready = "waiting", False
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1
        if not self.pool.free_slots:
            self._release_waiting(*self.running)

    def _release_waiting(self, *keep: Running) -> bool:
        """Give up rows of prompts that nobody but waiting sequences needs; whether there were any."""
        needed = {node for sequence in keep for node in sequence.leaf.path()}
        found = False
        for node in self.tree.nodes():
            if node.users and len(node.slots) and node not in needed and not node.pins:
                found = True
                node.lost |= node.computed > 0
                self.pool.free(node.give_up())
        return found

    def _fail(self, sequence: Running) -> None:
        error = InputError(
            f"the KV store holds {self.pool.num_slots} rows, too few for a sequence of {sequence.tail.stop + 1}",
            field="max_tokens",
            remedy="give a larger kv_memory, or a max_tokens that fits",
            code="kv_memory",
        )
        self.failed.append((sequence.key, error))
        for other in [s for s in (*self.running, *self.waiting, *self._ending) if s.key == sequence.key]:
            self._end(other)

    def _end(self, sequence: Running) -> None:
        members = {"running": self.running, "waiting": self.waiting, "ending": self._ending}[sequence.state]
        members.remove(sequence)
        sequence.state = "ended"
        del sequence.tail.tokens[sequence.known :]
        if self.cache is not None and sequence.ready:
            self._graft(sequence)
        else:
            self.pool.free(sequence.tail.give_up())
        node: Node | None = sequence.leaf
        while node is not None and node.parent is not None:
            parent = node.parent
            node.users -= 1
            if not node.users:
                if self.cache is not None:
                    self.cache.keep(node)
                else:
                    self.pool.free(node.give_up())
                    node.detach()
            node = parent
        if not sequence.leaf.users:
            self.tree.forget_empty_roots()

    def _graft(self, sequence: Running) -> None:
        """Enter the rows of a sequence's own tokens into the trie, for prompts that go on from them."""
        tail, node = sequence.tail, sequence.leaf
        rows = min(tail.computed, len(tail.tokens))
        tokens, slots = np.asarray(tail.tokens[:rows], np.int32), tail.slots[:rows]
        self.pool.free(tail.give_up()[rows:])
        at = 0
        while at < rows:
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = Node(node, tokens[at:], node.stop)
                child.claim(slots[at:])
                child.computed, child.priority = rows - at, sequence.priority
                node.children[int(tokens[at])] = child
                assert self.cache is not None
                self.cache.keep(child)
                return
            found = common_prefix(child.tokens, tokens[at:])
            child = child if found == len(child) else self.tree.split(child, found)
            if len(child.slots):
                self.pool.free(slots[at : at + found])
            else:  # somebody waits for just these rows
                child.claim(slots[at : at + found])
                child.computed = found
            node, at = child, at + found

    # ------------------------------------------------------------------------------------------------- counting

    def _count_admission(self, sequence: Running, path: list[Node], fresh: list[Node]) -> None:
        stats = self.stats
        claimed = set(fresh)
        first = sequence.cached_tokens is None
        cached = 0
        for node in path:
            if node in claimed:
                continue
            cached += len(node)
            if first:
                if node.pending:
                    stats.in_step_hits += len(node)
                elif node.uses:
                    stats.cross_window_hits += len(node)
                else:
                    stats.first_admission_hits += len(node)
        if first:
            sequence.cached_tokens = cached

    def _count(self, step: GenerateStep) -> None:
        stats = self.stats
        stats.steps += 1
        stats.decode_rows += step.decode_rows
        stats.prefill_rows += step.num_rows - step.decode_rows
        again = int((step.slots == SCRATCH).sum())
        lost = sum(rows for node, rows in step.takes if node.lost)
        stats.recomputed_rows += again + lost
        stats.running_peak = max(stats.running_peak, len(self.running))
        held = self.pool.used_slots - (self.cache.rows if self.cache else 0)
        self.rows_held_peak = max(self.rows_held_peak, held)
        unshared = sum(len(s.tail.slots) + s.leaf.stop for s in (*self.running, *self._ending))
        self.rows_unshared_peak = max(self.rows_unshared_peak, unshared)

    # ------------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """AssertionError where the books do not balance: slots, users, states."""
        held = [np.arange(start, start + size) for start, size in self.pool.free_list()]
        users: dict[Node, int] = {}
        states = {"running": self.running, "waiting": self.waiting, "ending": self._ending}
        for sequence in (*self.running, *self.waiting, *self._ending):
            assert sequence in states[sequence.state]
            assert sequence.state != "waiting" or not len(sequence.tail.slots)
            held.append(sequence.tail.slots)
            assert sequence.tail.computed <= len(sequence.tail.slots)
            for node in sequence.leaf.path():
                users[node] = users.get(node, 0) + 1
                assert sequence.state == "waiting" or len(node.slots) == len(node)
        for node in self.tree.nodes():
            held.append(node.slots)
            assert node.computed <= len(node.slots) <= len(node)
            assert node.users == users.get(node, 0), (node.users, users.get(node, 0))
            assert node.users or node.kept, "a node that nobody needs"
            assert all(int(child.tokens[0]) == first and child.parent is node for first, child in node.children.items())
        slots = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
        assert np.array_equal(slots, np.arange(1, self.pool.num_slots + 1)), "slots leak, or are used twice"
        assert len(self.running) <= self.max_running
        if self.cache is not None:
            self.cache.check()
