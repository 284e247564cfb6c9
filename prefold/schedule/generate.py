"""The generation scheduler: which rows the next step computes, and whose tokens it brings.

A step has one row for every running sequence, and new rows of prompts in what remains of its budget. Every
row is a row of one trie: prompts, and below them the tokens each sequence has made (its *tail*). A node's
rows are computed once, whoever waits for them; they stay while a sequence below is waiting or running, and
in the moment the last of these ends their slots are free (with a radix cache: may be evicted).

`plan` settles who runs and returns the next step; called again before `commit` it returns the same. No
tensors, no clock; what a step computes comes back to `commit` as tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..cache import SCRATCH, CacheOptions, RadixCache, SlotPool
from ..errors import InputError
from ..prefix.radix import Node, RadixTree, common_prefix
from ..types import GenerationStats

__all__ = ["GenerateScheduler", "GenerateStep", "Running"]

# Slots that a sequence of unknown length takes at once, so that its rows lie side by side.
TAIL_SLOTS = 16


@dataclass(eq=False, slots=True)
class Running:
    """One sample of a request, from its arrival to its end.

    key, sample    whose it is: what `submit` was given, and which of its samples
    leaf           the node that ends with the prompt
    tail           the node of its own tokens
    limit          tokens it may make
    reserve        room for all of them is set aside when it is admitted
    cached_tokens  of the prompt, not computed for this sequence; known once it was admitted
    ready          the prompt's rows are computed
    """

    key: Hashable
    sample: int
    leaf: Node
    tail: Node
    limit: int
    reserve: bool
    priority: int = 0
    state: Literal["waiting", "running", "ended"] = "waiting"
    cached_tokens: int | None = None
    ready: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.tail.tokens


@dataclass(frozen=True, slots=True)
class GenerateStep:
    """One forward pass. Its n rows are its queries, depth-first: those below one node lie side by side.

    tokens, positions  int32 [n]
    slots              int64 [n]: where each row's K/V goes; SCRATCH: nowhere
    run_*              int64 [r]: keys as runs of neighbouring slots. The `run_count` slots from `run_start` on hold
                       the rows of positions from `run_position` on, and are visible to the queries from `run_first`
                       up to, not including, `run_last`. A new row is a run of its own, from its own query on
    read_rows          int64, ascending: queries whose logits are wanted
    reads              (sequence, index into read_rows): who takes a token from them
    spans              (namespace, first query, past the last)
    takes              (node, number of its rows that are computed here)
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    run_start: np.ndarray
    run_count: np.ndarray
    run_position: np.ndarray
    run_first: np.ndarray
    run_last: np.ndarray
    read_rows: np.ndarray
    reads: list[tuple[Running, int]]
    spans: list[tuple[Hashable, int, int]]
    takes: list[tuple[Node, int]]
    decode_rows: int

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class _Arrival:
    key: Hashable
    tokens: np.ndarray
    samples: int
    limit: int
    reserve: bool
    namespace: Hashable
    priority: int


@dataclass(slots=True)
class _Draft:
    """What a step will compute, as it is being decided."""

    left: int
    takes: dict[Node, int] = field(default_factory=dict)
    reads: list[tuple[Running, Node]] = field(default_factory=list)
    again: dict[Node, list[Running]] = field(default_factory=dict)
    decode_rows: int = 0


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
        return bool(self.running or self.waiting or self._arrivals)

    # ------------------------------------------------------------------------------------------ plan and commit

    def plan(self) -> GenerateStep | None:
        """The next step; None when no sequence can run."""
        if self._planned is None:
            self._take_arrivals()
            self._drop_cancelled()
            if self.cache is not None:
                self.cache.expire()
            self._grow_tails()
            self._admit()
            if self.running:
                self._planned = _lay_out(self._choose_rows())
        return self._planned

    def commit(self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool]) -> list[Running]:
        """The step was run: the token each of `step.reads` got, and whether it ends there (its token is then no part
        of the output). Returns the sequences that have ended, by that or by their limit."""
        if step is not self._planned:
            raise ValueError("this is not the step that was planned last")
        self._planned = None
        self._count(step)
        for node, rows in step.takes:
            node.computed += rows
            node.lost &= node.pending > 0
        done = []
        for (sequence, _), token, stop in zip(step.reads, tokens, ended, strict=True):
            sequence.ready = True
            if not stop:
                sequence.tail.tokens.append(int(token))
            if stop or len(sequence.tail.tokens) == sequence.limit:
                done.append(sequence)
        for sequence in done:
            self._end(sequence)
        self._drop_cancelled()
        return done

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
            for sequence in [s for s in (*self.running, *self.waiting) if s.key in self._cancelled]:
                self._end(sequence)
            self._cancelled.clear()

    def _grow_tails(self) -> None:
        """A slot for the next row of every running sequence; where there is none, the latest makes room."""
        for sequence in list(self.running):
            tail = sequence.tail
            while sequence.state == "running" and len(tail.slots) < len(tail):
                slots = self._slots(self._tail_rows(sequence) - len(tail.slots))
                if slots is None:
                    slots = self._slots(1)
                if slots is not None:
                    tail.claim(slots)
                elif len(self.running) > 1:
                    self._preempt(self.running[-1])
                elif not self._release_waiting(sequence):
                    self._fail(sequence)

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
            if not self._make_room(rows + tail_rows, alone=not self.running, sequence=sequence):
                if self.running:
                    return
                self._fail(sequence)
                continue
            self.waiting.popleft()
            self._count_admission(sequence, path, fresh)
            for node in fresh:
                slots = self.pool.allocate(len(node) - len(node.slots))
                assert slots is not None
                node.claim(slots)
            tail_slots = self.pool.allocate(tail_rows)
            assert tail_slots is not None
            sequence.tail.claim(tail_slots)
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
        for other in [s for s in (*self.running, *self.waiting) if s.key == sequence.key]:
            self._end(other)

    def _end(self, sequence: Running) -> None:
        if sequence.state == "running":
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = "ended"
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
        rows = tail.computed
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

    # -------------------------------------------------------------------------------------------- rows of a step

    def _choose_rows(self) -> _Draft:
        """One row for each that is generating, then prompts in order, as far as the budget goes."""
        draft = _Draft(self.max_batch_rows)
        for sequence in self.running:
            if sequence.ready:
                self._read_tail(draft, sequence)
        for sequence in self.running:
            if not draft.left:
                break
            if not sequence.ready:
                self._read_prompt(draft, sequence)
        return draft

    def _read_tail(self, draft: _Draft, sequence: Running) -> None:
        tail = sequence.tail
        rows = min(tail.pending, draft.left)
        draft.left -= rows
        if rows:
            draft.takes[tail] = rows
        if rows and rows == tail.pending:
            draft.reads.append((sequence, tail))
            draft.decode_rows += 1

    def _read_prompt(self, draft: _Draft, sequence: Running) -> None:
        for node in sequence.leaf.path():
            taken = draft.takes.get(node, 0)
            missing = node.pending - taken
            if missing:
                rows = min(missing, draft.left)
                if rows:
                    draft.takes[node] = taken + rows
                    draft.left -= rows
                if rows < missing:
                    return
        if sequence.tail.tokens:  # it was preempted: its own tokens' rows once more
            self._read_tail(draft, sequence)
        elif sequence.leaf in draft.takes:
            draft.reads.append((sequence, sequence.leaf))
        elif sequence.leaf in draft.again:
            draft.again[sequence.leaf].append(sequence)
        elif draft.left:
            # All its rows are there, but what the last one gave is gone: that row runs again, for its result only.
            draft.again[sequence.leaf] = [sequence]
            draft.left -= 1

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
        stats.generated_tokens += len(step.reads)
        stats.running_peak = max(stats.running_peak, len(self.running))
        held = self.pool.used_slots - (self.cache.rows if self.cache else 0)
        self.rows_held_peak = max(self.rows_held_peak, held)
        unshared = sum(len(s.tail.slots) + s.leaf.stop for s in self.running)
        self.rows_unshared_peak = max(self.rows_unshared_peak, unshared)

    # ------------------------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """AssertionError where the books do not balance: slots, users, states."""
        held = [np.arange(start, start + size) for start, size in self.pool.free_list()]
        users: dict[Node, int] = {}
        for sequence in (*self.running, *self.waiting):
            assert sequence.state == ("running" if sequence in self.running else "waiting")
            assert sequence.state == "running" or not len(sequence.tail.slots)
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


def _lay_out(draft: _Draft) -> GenerateStep:
    """The step's rows depth-first over the nodes that have some, or lie above those that have."""
    roots, children = _marked(draft)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    start: list[int] = []
    count: list[int] = []
    position: list[int] = []
    first: list[int] = []
    last: list[int] = []
    last_row: dict[Node, int] = {}
    spans = []
    for root in roots:
        span = len(tokens)
        stack: list[tuple[Node, range | None]] = [(root, None)]
        while stack:
            node, runs = stack.pop()
            if runs is not None:  # everything below the node is done: its keys are visible up to here
                last[runs.start : runs.stop] = [len(tokens)] * len(runs)
                continue
            query, run = len(tokens), len(start)
            for slot, size, at in node.runs(node.computed):
                start.append(slot)
                count.append(size)
                position.append(at)
                first.append(query)
                last.append(0)
            rows = draft.takes.get(node, 0)
            if rows == 1:  # as for a sequence that generates: without the cost of short arrays
                slot, at = int(node.slots[node.computed]), node.start + node.computed
                tokens.append(int(node.tokens[node.computed]))
                positions.append(at)
                slots.append(slot)
                start.append(slot)
                count.append(1)
                position.append(at)
                first.append(query)
                last.append(0)
                last_row[node] = query
            elif rows:
                done = node.computed
                row_slots = node.slots[done : done + rows].tolist()
                row_positions = range(node.start + done, node.start + done + rows)
                tokens.extend(np.asarray(node.tokens[done : done + rows]).tolist())
                positions.extend(row_positions)
                slots.extend(row_slots)
                start.extend(row_slots)
                count.extend([1] * rows)
                position.extend(row_positions)
                first.extend(range(query, query + rows))
                last.extend([0] * rows)
                last_row[node] = len(tokens) - 1
            if node in draft.again:
                last_row[node] = len(tokens)
                tokens.append(int(node.tokens[-1]))
                positions.append(node.stop - 1)
                slots.append(SCRATCH)
            stack.append((node, range(run, len(start))))
            stack.extend((child, None) for child in reversed(children.get(node, ())))
        spans.append((root.namespace, span, len(tokens)))
    reads = draft.reads + [(sequence, node) for node, sequences in draft.again.items() for sequence in sequences]
    rows_read = np.array([last_row[node] for _, node in reads], np.int64)
    read_rows, index = np.unique(rows_read, return_inverse=True)
    return GenerateStep(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int64),
        run_start=np.array(start, np.int64),
        run_count=np.array(count, np.int64),
        run_position=np.array(position, np.int64),
        run_first=np.array(first, np.int64),
        run_last=np.array(last, np.int64),
        read_rows=read_rows,
        reads=[(sequence, int(i)) for (sequence, _), i in zip(reads, index.reshape(-1), strict=True)],
        spans=spans,
        takes=list(draft.takes.items()),
        decode_rows=draft.decode_rows,
    )


def _marked(draft: _Draft) -> tuple[list[Node], dict[Node, list[Node]]]:
    """The roots, and the children, of nodes on the way to a row of the step."""
    roots: list[Node] = []
    children: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in _with_rows(draft):
        while node not in seen:
            seen.add(node)
            parent = node.parent
            if parent is None:
                roots.append(node)
                break
            children.setdefault(parent, []).append(node)
            node = parent
    return roots, children


def _with_rows(draft: _Draft) -> Iterator[Node]:
    yield from draft.takes
    yield from draft.again
