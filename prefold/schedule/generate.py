"""The generation scheduler: which rows the next step computes, and whose tokens it brings.

A step has one row for every running sequence, and new rows of prompts in what remains of its budget. Every
row is a row of one trie: prompts, and below them the tokens each sequence has made (its *tail*). A node's
rows are computed once, whoever waits for them; they stay while a sequence below is waiting or running, and
in the moment the last of these ends their slots are free (with a radix cache: may be evicted).

`admit` settles who runs, `plan` only reads and returns the next step, `begin` and `commit` book it. No tensors, no
clock; what a step computes comes back to `commit` as tokens. Between `begin` and `commit` of a step the next one may
be planned: of a token that is still to come it says which one it is.

An exception may fall into the middle of a change (Ctrl-C falls anywhere). What cannot be derived are the requests,
and of their sequences the tokens and whether they have ended; each of these is changed in one stroke. All the rest
(the trie, slots, who runs) is made anew from them by whatever is called next: then everybody waits once more, and
the cache is empty.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..cache import SCRATCH, CacheOptions, RadixCache, SlotPool
from ..cache.tree import Node, RadixTree, common_prefix
from ..errors import InputError
from ..types import GenerationStats
from .generate_step import Draft, GenerateStep, Running, lay_out

__all__ = ["GenerateScheduler"]

# Slots that a sequence of unknown length takes at once, so that its rows lie side by side.
TAIL_SLOTS = 16


@dataclass(eq=False, slots=True)
class _Request:
    """What was submitted, and its sequences; `left` of them have not ended."""

    key: Hashable
    tokens: np.ndarray
    namespace: tuple[Hashable, ...]
    priority: int
    sequences: list[Running] = field(default_factory=list)
    left: int = 0


class GenerateScheduler:
    """Continuous batching over one trie.

    pool            the slots of the KV store
    max_batch_rows  rows of a step
    max_running     sequences at once; never more than rows in a step
    sharing         False: every request has rows of its own
    cache           keep rows of ended sequences by these options; None: free them at once
    clock           seconds, for the cache
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        max_batch_rows: int,
        max_running: int,
        sharing: bool = True,
        cache: CacheOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.pool = pool
        self.tree = RadixTree()
        self.tree.make_anew = self._make_anew
        self.cache = None if cache is None else RadixCache(self.tree, pool, cache, clock)
        self.max_batch_rows = max_batch_rows
        self.max_running = min(max_running, max_batch_rows)
        self.stats = GenerationStats()
        self.running: dict[Running, None] = {}  # in the order of their admission
        self.waiting: OrderedDict[Running, None] = OrderedDict()
        self._ending: dict[Running, None] = {}  # whose last token is on its way
        self._sharing = sharing
        self._requests: dict[Hashable, _Request] = {}
        self._arrivals: dict[Hashable, _Request] = {}  # those of the requests that are not in the trie yet
        self._failed: dict[Hashable, InputError] = {}
        self._begun: deque[GenerateStep] = deque()
        self._version = 0  # of the books: a step is planned for one of them
        self._remade = -1  # the version in which they were last made anew
        self._has_room = False  # whether there is a slot for the next row of every running sequence
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
        """Take a prompt, int32 [n], n >= 1, to be continued `samples` times by at most `limit` >= 1 tokens.

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
        if key in self._requests:  # it was taken, and then its taking broken off
            return
        request = _Request(key, tokens, namespace, priority)
        request.sequences = [Running(key, sample, limit, reserve, priority) for sample in range(samples)]
        request.left = samples
        with self._changes():
            self._requests[key] = request
            self._arrivals[key] = request

    def cancel(self, *keys: Hashable) -> None:
        """End all sequences of requests, where they are still there, and forget why they failed, if they have."""
        with self._changes():
            for key in keys:
                self._arrivals.pop(key, None)
                request = self._requests.pop(key, None)
                self._failed.pop(key, None)
                if request is not None:
                    self._end_all(request)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(request.left for request in self._arrivals.values())

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._begun)

    @property
    def can_plan(self) -> bool:
        """Whether anybody is there for whom a step may be planned, now or when those that are being run have ended."""
        return bool(self.running or self.waiting or self._arrivals)

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self) -> list[tuple[Hashable, InputError]]:
        """Settle who runs: those who came are entered into the trie, and as many admitted as there is room for.

        Returns the requests that can never run, with what is wrong; again at each call, until they are cancelled.
        """
        with self._changes():
            self._take_arrivals()
            if self.cache is not None:
                self.cache.expire()
            self._has_room = self._grow_tails()
            if self._has_room:
                self._admit()
        return list(self._failed.items())

    def plan(self) -> GenerateStep | None:
        """The next step of those who were admitted, which changes nothing; None when nobody can run, or nobody before
        what is being run has come back."""
        with self.tree.lock:
            if not self.running or not self._has_room or self.tree.changing:
                return None
            return lay_out(Draft.of(self.running, self.max_batch_rows), self._version)

    def begin(self, step: GenerateStep) -> None:
        """Book a step as being run: the next one may be planned before its tokens are there.

        Raises ValueError where something has changed since it was planned."""
        if step.version != self._version or self.tree.changing:
            raise ValueError("something has changed since this step was planned")
        with self._changes():
            self._has_room = False  # until tails have a slot for their next row
            self._begun.append(step)
            self._count(step)
            for node, rows in step.takes:
                node.computed += rows
                node.lost &= node.pending > 0
                if self.tree.on_store:
                    self.tree.stored(node)
            for number, (sequence, _) in enumerate(step.reads):
                sequence.ready = True
                sequence.tail.tokens.append(-1 - number)
                if len(sequence.tail.tokens) == sequence.limit:
                    del self.running[sequence]
                    self._ending[sequence] = None
                    sequence.state = "ending"

    def awaits(self, step: GenerateStep) -> bool:
        """Whether the tokens of a step are to be committed next: it was begun first, or by books that are no more."""
        self.tree.be_whole()
        return step.version <= self._remade or (bool(self._begun) and self._begun[0] is step)

    def commit(self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool]) -> list[Running]:
        """Book what a step has given: the token each of `step.reads` got, and whether it ends there (its token is then
        no part of the output). Of sequences that had ended before it is not looked at. Returns the sequences that have
        ended, by that or by their limit. Where it is broken off it may be called again with the same.

        Raises ValueError for another step than the one begun first."""
        if not self.awaits(step):
            raise ValueError("this is not the step that was begun first")
        with self._changes():
            if self._begun and self._begun[0] is step:
                self._begun.popleft()
            done, late = [], []
            for (sequence, _), at, token, stop in zip(step.reads, step.tokens_before, tokens, ended, strict=True):
                if sequence.state == "ended":
                    late.append(sequence.tail)
                    continue
                if not stop and sequence.known == at:
                    sequence.tail.tokens[at : at + 1] = [int(token)]
                    sequence.known = at + 1
                if stop or sequence.known == sequence.limit:
                    done.append(sequence)
            if late:
                self.stats.discarded_rows += sum(rows for node, rows in step.takes if node in late)
            for sequence in done:
                self._end(sequence)
        return done

    def start_anew(self) -> None:
        """Forget what was begun, and that any row is there: nobody knows what came of a step. Everybody waits again."""
        self.tree.changing = True
        self.tree.be_whole()

    # ----------------------------------------------------------------------------------------------- being whole

    @contextmanager
    def _changes(self) -> Iterator[None]:
        with self.tree.change():
            self._version += 1
            yield

    def _make_anew(self) -> None:
        """All books, from what cannot be derived."""
        self.pool.clear()
        self.tree.clear()
        if self.cache is not None:
            self.cache.forget_all()
        for some in (self.running, self.waiting, self._ending, self._begun):
            some.clear()
        self._has_room = False
        self._version += 1
        self._remade = self._version
        for key, request in list(self._requests.items()):
            left = [sequence for sequence in request.sequences if sequence.state != "ended"]
            request.left = len(left)
            if not left or key in self._failed:
                del self._requests[key]
            for sequence in left:
                sequence.wait_anew()
        self._arrivals = dict(self._requests)

    # ------------------------------------------------------------------------------------------------ who runs

    def _take_arrivals(self) -> None:
        for request in self._arrivals.values():
            leaf = self.tree.insert(request.namespace, request.tokens)
            path = leaf.path()
            if self.cache is not None:
                self.cache.take(path)
            for node in path:
                node.users += request.left
                node.priority = max(node.priority, request.priority)
            for sequence in request.sequences:
                if sequence.state != "ended":
                    sequence.enter(leaf)
                    self.waiting[sequence] = None
        self._arrivals = {}

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
                    self._preempt(next(reversed(self.running)))
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
            sequence = next(iter(self.waiting))
            path = sequence.leaf.path()
            fresh = [node for node in path if len(node.slots) < len(node)]
            rows = sum(len(node) - len(node.slots) for node in fresh)
            tail_rows = self._tail_rows(sequence)
            if not self._make_room(rows + tail_rows, alone=not (self.running or self._begun), sequence=sequence):
                if self.running or self._begun:
                    return
                self._fail(sequence)
                continue
            del self.waiting[sequence]
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
            self.running[sequence] = None
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
        del self.running[sequence]
        sequence.tail.lost |= sequence.tail.computed > 0
        self.pool.free(sequence.tail.give_up())
        sequence.state, sequence.ready = "waiting", False
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)
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
                self.pool.free(self.tree.drop(node))
        return found

    def _fail(self, sequence: Running) -> None:
        error = InputError(
            f"the KV store holds {self.pool.num_slots} rows, too few for a sequence of {sequence.tail.stop + 1}",
            field="max_tokens",
            remedy="give a larger kv_memory, or a max_tokens that fits",
            code="kv_memory",
        )
        self._failed[sequence.key] = error
        self._end_all(self._requests.pop(sequence.key))

    def _end_all(self, request: _Request) -> None:
        for sequence in request.sequences:
            if sequence.state != "ended":
                self._end(sequence)

    def _end(self, sequence: Running) -> None:
        del sequence.tail.tokens[sequence.known :]  # before it has ended: afterwards nobody would
        state, sequence.state = sequence.state, "ended"
        request = self._requests.get(sequence.key)
        if request is not None:
            request.left -= 1
            if not request.left:
                self._arrivals.pop(sequence.key, None)
                del self._requests[sequence.key]
        if state == "new":  # not in the trie yet
            return
        del {"running": self.running, "waiting": self.waiting, "ending": self._ending}[state][sequence]
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
                    self.pool.free(self.tree.drop(node))
                    self.tree.detach(node)
            node = parent

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
                self.tree.stored(child)
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
                self.tree.stored(child)
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
        assert not self.tree.changing, "a change was broken off"
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
        for node in self.tree.nodes():
            held.append(node.slots)
            assert node.computed <= len(node.slots) <= len(node)
            assert node.users == users.get(node, 0), (node.users, users.get(node, 0))
            assert node.users or node.kept, "a node that nobody needs"
            assert all(int(child.tokens[0]) == first and child.parent is node for first, child in node.children.items())
        assert all(root.children for root in self.tree.roots.values()), "a root that nobody needs"
        slots = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
        assert np.array_equal(slots, np.arange(1, self.pool.num_slots + 1)), "slots leak, or are used twice"
        assert len(self.running) <= self.max_running
        for key, request in self._requests.items():
            alive = [sequence.state for sequence in request.sequences if sequence.state != "ended"]
            assert request.left == len(alive) > 0
            assert ("new" in alive) == (key in self._arrivals)
        assert len(in_trie) == sum(r.left for key, r in self._requests.items() if key not in self._arrivals)
        if self.cache is not None:
            self.cache.check()
