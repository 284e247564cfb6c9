"""The scheduler: which rows the next step computes, and which sequences get its tokens.

A step has one row for every running sequence, and fills the rest of its budget with prompt rows. Every row belongs to
one trie: prompts, and below each prompt the tokens that its sequences have generated (a sequence's *tail*). A node's
rows are computed once, no matter how many sequences wait for them. They stay while a sequence below the node waits or
runs. When the last of these ends, their slots are freed (with a radix cache: they become evictable).

`admit` decides which sequences run. `plan` returns the next step and changes nothing. `begin` and `commit` record the
step. `commit` receives the result of a step as tokens; the scheduler sees no tensors. The next step may be planned
between `begin` and `commit` of a step: it refers to a token in flight by the number of its read. Nothing may change
between `plan` and `begin`.

One thread owns the books: the trie, the slots, the waiting and running sequences. If a change raises an exception, the
books cannot be trusted: `clear` empties them, and the requests are submitted again with their tokens so far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...errors import InputError
from ...spec.requests import NO_NAMESPACE, Asked, GenerationStats, Namespace, Owner
from ...trie import token_bytes
from ..cache import CacheOptions, RadixCache, SlotPool
from ..cache.tree import Node, RowTrie
from .admission import NO_LIMITS, Admission, InOrder, StepLimits
from .generate_step import NO_OWNER, GenerateStep, HoldsRows, RepeatedStep, SequenceState, StepPlan, lay_out
from .steps import SlotResult

# Slots that a sequence of unknown length gets at once, so that its rows are neighbours.
TAIL_SLOTS = 16


class Scheduler:
    """Decides what each step of continuous batching over one trie computes.

    Attributes:
        pool: The slots of the KV store.
        tree: The trie of all rows.
        cache: Keeps rows of ended sequences; None: they are freed at once.
        max_batch_rows: The most rows of a step, unless its limits override it.
        max_running: The most running sequences; never more than the rows of a step.
        stats: The counters.
        running: The running sequences, in order of admission.
        ending: The sequences with their last token in flight.
        waiting: The waiting sequences, in an admission policy.
        requests: {key: its sequences that have not ended}.
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
        """Create the books of a KV store.

        Args:
            cache: Options of the radix cache for rows of ended sequences; None: rows are freed at once.
            clock: Returns the time in seconds, for the cache.
            slot_bytes: Bytes of one slot, for the statistics.
            holds_rows: Tells which image rows the worker has; None: the model has no image input.
        """
        self.pool, self.tree = pool, RowTrie()
        self.cache = None if cache is None else RadixCache(self.tree, pool, cache, clock)
        self.max_batch_rows = max_batch_rows
        self.max_running = min(max_running, max_batch_rows)
        self.stats = GenerationStats()
        self.running: dict[SequenceState, None] = {}
        self.waiting: Admission = InOrder()
        self.requests: dict[Hashable, dict[SequenceState, None]] = {}
        self._slot_bytes = slot_bytes
        if self.cache is not None:
            self.cache.namespace_of = self.namespace_of
        self.ending: dict[SequenceState, None] = {}
        self._in_flight: deque[GenerateStep] = deque()
        # The last step, if it may repeat: no sequence was admitted since.
        self._repeated: RepeatedStep | None = None
        self._in_use = 0  # slots used by sequences when the last step began
        self._holds_rows = holds_rows

    # ----------------------------------------------------------------------------- requests that come and go

    def submit(
        self,
        key: Hashable,
        tokens: np.ndarray,
        *,
        limit: int,
        samples: int = 1,
        reserve: bool = True,
        namespace: Namespace = NO_NAMESPACE,
        priority: int = 0,
        outputs: Mapping[int, Sequence[int]] | None = None,
        owner: Owner = NO_OWNER,
    ) -> None:
        """Submit a prompt, int32 [n], n >= 1, to be continued `samples` times by at most `limit` >= 1 tokens.

        Args:
            reserve: Reserve slots for the whole output when the prompt is admitted. Otherwise the output gets slots as
                it grows, and a sequence may be preempted.
            namespace: Rows are shared only between prompts of one namespace.
            priority: The priority of its rows in the cache.
            outputs: For a request submitted before: {number of a sample that has not ended: its tokens}.
            owner: The tenant and the class (interactive or batch) of the request.

        Raises:
            InputError: The KV store is too small for this request alone.
        """
        rows = len(tokens) + (limit - 1 if reserve else 0)
        if rows > self.pool.num_slots:
            raise InputError(
                f"the request needs the K/V of {rows} rows, but the KV store has only {self.pool.num_slots}",
                field="max_tokens" if rows > len(tokens) else "prompt",
                remedy="give a larger kv_memory (--kv-memory), or ask for fewer tokens",
                code="kv_memory",
            )

        def make(sample: int, leaf: Node, tokens: list[int]) -> SequenceState:
            return SequenceState(key, sample, leaf, tokens, limit, reserve, priority, owner)

        outputs = dict.fromkeys(range(samples), ()) if outputs is None else outputs
        self._enter(key, namespace, tokens, outputs, priority, make)

    def _enter(
        self,
        key: Hashable,
        namespace: Namespace,
        tokens: np.ndarray,
        outputs: Mapping[int, Sequence[int]],
        priority: int,
        make: Callable[[int, Node, list[int]], SequenceState],
    ) -> None:
        """Insert a prompt into the trie, and its sequences into the queue.

        Args:
            outputs: {number of a sample: its tokens}.
            make: make(number of a sample, node that ends with the prompt, the sample's tokens) -> its sequence.
        """
        if self.cache is not None:
            self.cache.expire()  # the last step may be long ago
        leaf = self.tree.insert(namespace, token_bytes(tokens))
        path = leaf.path()
        if self.cache is not None:
            self.cache.take(path)
        sequences = [make(sample, leaf, list(made_tokens)) for sample, made_tokens in outputs.items()]
        for node in path:
            node.users += len(sequences)
            node.priority = max(node.priority, priority)
        self.requests[key] = dict.fromkeys(sequences)
        self.waiting.add(sequences)

    def namespace_of(self, namespace: Namespace, asked: Asked | None, tokens: np.ndarray) -> Namespace:
        """Return the namespace of a prompt's rows, given the namespace of its request and its question."""
        return namespace

    def cancel(self, key: Hashable) -> None:
        """End all sequences of a request; do nothing if the request has ended."""
        for sequence in list(self.requests.get(key, ())):
            self._end(sequence)

    def clear(self) -> None:
        """Forget all requests, all steps in flight, and all rows: every slot is free."""
        self.pool.clear()
        self.tree.clear()
        if self.cache is not None:
            self.cache.forget_all()
        self.waiting.clear()
        self.running.clear()
        self.ending.clear()
        self.requests.clear()
        self._in_flight.clear()
        self._repeated = None

    def admit_by(self, policy: Admission) -> None:
        """Admit by another policy from now on, which must be empty; do nothing for the current policy."""
        if policy is self.waiting:
            return
        policy.take_over(self.waiting, tuple(self._admitted()))
        self.waiting = policy

    def _admitted(self) -> Iterable[SequenceState]:
        """Return the sequences that were admitted and have not ended."""
        return (*self.running, *self.ending)

    @property
    def num_waiting(self) -> int:
        """The number of sequences not admitted yet, or preempted."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or a step is in flight."""
        return bool(self.requests or self._has_begun)

    @property
    def _has_begun(self) -> bool:
        return bool(self._in_flight)

    @property
    def can_plan(self) -> bool:
        """True if any sequence runs or waits: a step can be planned for it, at the latest after the steps in flight."""
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------------------------------ plan and commit

    def admit(self, limits: StepLimits = NO_LIMITS) -> list[tuple[Hashable, InputError]]:
        """Give running sequences slots for their next rows, and admit waiting sequences while there is capacity.

        Return (key, error) for requests that can never run; they have been ended. `limits` are the limits of the next
        step that are known so far.
        """
        failures: list[tuple[Hashable, InputError]] = []
        if self.cache is not None:
            self.cache.expire()
        repeated = self._repeated
        if repeated is None or repeated.next == len(repeated.ahead):  # repetitions ahead already have slots
            self._grow_tails(failures)
        if len(self.waiting) and self._has_room():
            self._admit_waiting(failures, limits)
        return failures

    def plan(self, limits: StepLimits = NO_LIMITS) -> GenerateStep | None:
        """Return the next step of the running sequences; change nothing.

        Return None if no sequence runs, or none may have rows now, or one has no slot for its next row until a step in
        flight is committed.
        """
        repeated = self._repeated
        if repeated is not None and self._all_go_on(repeated.step, limits) and (step := repeated.again()) is not None:
            return step
        if not self.running or not self._has_room():
            return None
        plan = self.waiting.fill(self._new_plan(limits), self.running, limits)
        return self._lay_out(plan) if plan.computed_rows or plan.rereads or plan.repeats else None

    def _all_go_on(self, before: GenerateStep, limits: StepLimits) -> bool:
        """Return True if the next step has a row of each running sequence, like the step before.

        In a repetition every running sequence had a row, and none was admitted since. So if the numbers are equal, the
        sequences are the same.
        """
        running, rows, are_alike = self.running, len(before.consumers), self.waiting.are_alike(limits)
        fit = len(running) == rows <= self._max_rows(limits) and (are_alike or rows <= (limits.batch_rows or 0))
        return fit and (before.message.follows or all([sequence in running for sequence in before.consumers]))

    _repeated_of: Callable[[GenerateStep], RepeatedStep | None] = staticmethod(RepeatedStep.of)
    _lay_out: Callable[..., GenerateStep] = staticmethod(lay_out)

    def _new_plan(self, limits: StepLimits) -> StepPlan:
        return StepPlan(self._max_rows(limits), self._holds_rows)

    def begin(self, step: GenerateStep) -> None:
        """Record a step as started: the next step can be planned before the tokens of this step arrive."""
        self._in_flight.append(step)
        repeated = self._repeated
        if repeated is not None and step.message.follows:
            repeated.step, repeated.next = step, repeated.next + 1
        else:
            self._repeated = self._repeated_of(step)
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
        """Record the tokens of a step, and return the sequences that have ended, by `ended` or by their limit.

        Args:
            tokens: The token of each of `step.consumers`; ignored for sequences that had ended before.
            ended: True for each consumer that ends here; its token is then not part of the output.
            result: The worker's result, with the tokens as ids; None if only the tokens are known.

        Raises:
            ValueError: This is not the oldest step in flight.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError("this is not the oldest step in flight")
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
        """Return True if there is a slot for the next row of every running sequence."""
        return all([len(sequence.tail.slots) >= len(sequence.tail.tokens) for sequence in self.running])

    def _grow_tails(self, failures: list[tuple[Hashable, InputError]]) -> None:
        """Give every running sequence a slot for its next row.

        If no slot is free, the sequence admitted last is preempted. While a step is in flight nothing is preempted,
        because that step may free slots.
        """
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
        """Admit sequences in the order of the policy until a step is full.

        If a sequence of a batch does not fit, only the admission of batches ends.
        """
        pending = dict[Owner, int]()  # rows that come before the rows of an owner's next sequence
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
        """Let a waiting sequence run, or fail if it never can. Return how many rows it adds; None if it still waits."""
        path = sequence.leaf.path()
        while True:
            scant = [] if self.cache is None else self.cache.scant(path)
            cached = {node: 0 if node in scant else len(node.slots) for node in path}
            fresh = {node: len(node) - count for node, count in cached.items() if count < len(node)}
            rows = sum(fresh.values())
            # The slots are neighbours, so that attention reads the rows that only this sequence uses as one run.
            slots = self._slots(rows + self._tail_rows(sequence), path)
            if slots is not None:
                break
            if self._make_way(sequence):
                continue
            if self.running or self._in_flight:
                return None
            # No running sequence could free slots, so rows of waiting sequences are discarded and recomputed later.
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
        """Return how many missing rows of a newly admitted sequence need not be computed; a subclass may copy some."""
        return 0

    def _tail_rows(self, sequence: SequenceState) -> int:
        """Return how many slots a sequence's tail should have.

        That is its whole output if slots are reserved, else its rows so far and TAIL_SLOTS more.
        """
        last = sequence.limit - 1  # the last token needs no row
        return last if sequence.reserve else min(last, len(sequence.tail) + TAIL_SLOTS)

    def _pending_rows(self, running: Collection[SequenceState]) -> int:
        """Return how many rows must be computed before all these sequences generate."""
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

    def _max_rows(self, limits: StepLimits) -> int:
        return self.max_batch_rows if limits.rows is None else limits.rows

    def _make_way(self, sequence: SequenceState) -> bool:
        """Preempt a running sequence for a waiting one if the policy says so; return True if it did."""
        victim = None if self._has_begun else self.waiting.gives_way(sequence, self.running)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, sequence: SequenceState) -> None:
        """Put a sequence back at the head of the queue, and discard the rows of its own tokens.

        The rows of its prompt stay while slots are free.
        """
        del self.running[sequence]
        sequence.tail.lost |= sequence.tail.num_computed > 0
        self.pool.free(sequence.tail.give_up())
        sequence.state, sequence.ready = "waiting", False
        self.waiting.put_back(sequence)
        self.stats.preemptions += 1
        if not self.pool.free_slots:
            self._release_waiting(*self.running)

    def _release_waiting(self, *keep: SequenceState) -> bool:
        """Discard the rows of prompts that only waiting sequences need, except rows that sequences in `keep` need.

        Return True if there were any.
        """
        needed = {node for sequence in keep for node in sequence.leaf.path()}
        has_released = False
        for node in self.nodes():
            if node.users and node not in needed and not node.pins and node.num_slots:
                has_released = True
                node.lost |= node.num_computed > 0
                self.pool.free(self.tree.drop(node))
        return has_released

    def _too_small(self, holds: str, needs: str, sequence: SequenceState) -> tuple[Hashable, InputError]:
        """End a sequence's request, and return its key with the error.

        `holds` and `needs` describe the rows that the store has and the sequence needs.
        """
        pinned = sum(node.num_slots for node in self.nodes() if node.pins)
        remedy = "give a larger kv_memory (--kv-memory), or a max_tokens that fits"
        error = InputError(
            f"the KV store holds {holds}{f' ({pinned} of them pinned)' if pinned else ''}, too few for {needs}",
            field="max_tokens",
            remedy=f"unpin prompts, {remedy}" if pinned else remedy,
            code="kv_memory",
        )
        self.cancel(sequence.key)
        return sequence.key, error

    def _slots(self, count: int, path: Sequence[Node] = ()) -> np.ndarray | None:
        """Return `count` slots; None, without any change, if even evicting all kept rows would not free enough.

        `path` is the path of a sequence being admitted: the cache discards its scant rows (see `RadixCache.scant`).
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
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        else:
            self._runs_no_more(sequence)
            self.waiting.note_end(sequence)
        sequence.state = "ended"
        request = self.requests[sequence.key]
        del request[sequence]
        if not request:
            del self.requests[sequence.key]
        if self.cache is not None and sequence.ready and self._is_prompt_like(sequence):
            self.cache.graft(sequence.tail, sequence.priority)
        else:
            self.pool.free(sequence.tail.give_up())
        node: Node | None = sequence.leaf
        while node is not None and node.parent is not None:
            parent = node.parent
            node.users -= 1
            if not node.users:
                self._let_go(node)
            node = parent

    def _let_go(self, node: Node) -> None:
        """Keep the rows of a node that no sequence uses any more in the cache, or free them without a cache."""
        if self.cache is not None:
            self.cache.keep(node)
        else:
            self.pool.free(self.tree.drop(node))
            self.tree.remove(node)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of prompts, without tails."""
        return self.tree.nodes()

    def _runs_no_more(self, sequence: SequenceState) -> None:
        """Remove an admitted sequence from `running` or `ending`."""
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

    def _is_prompt_like(self, sequence: SequenceState) -> bool:
        """Return True if the rows of the sequence's tokens equal the rows of a prompt with the same tokens."""
        return True

    # ------------------------------------------------------------------------------------------------- checking
