"""The base of the schedulers of generation: the sequences that wait and run over one trie, and the rows that they
use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ...errors import InputError
from ...spec.requests import NO_NAMESPACE, Asked, GenerationStats, Namespace, Owner
from ...trie import token_bytes
from ..cache import RadixCache, SlotPool
from ..cache.tree import Node, RowTrie
from .admission import Admission, InOrder, StepLimits
from .generate_step import NO_OWNER, SequenceState


class SequenceScheduler:
    """A SequenceScheduler takes requests, and keeps their sequences while these wait and run.

    pool            the slots of the KV store
    tree            the trie of all rows
    cache           keeps rows of ended sequences; None: they are freed at once
    max_batch_rows  the most rows of a step whose limits say nothing of them
    max_running     the most sequences that run at once; never more than the rows of a step
    stats           the counters
    running         the sequences that run, in the order of their admission
    waiting         the sequences that wait, in an admission policy
    """

    def __init__(
        self,
        pool: SlotPool,
        tree: RowTrie,
        cache: RadixCache | None,
        *,
        max_batch_rows: int,
        max_running: int,
        slot_bytes: int,
    ):
        self.pool, self.tree, self.cache = pool, tree, cache
        self.max_batch_rows = max_batch_rows
        self.max_running = min(max_running, max_batch_rows)
        self.stats = GenerationStats()
        self.running: dict[SequenceState, None] = {}
        self.waiting: Admission = InOrder()
        self.requests: dict[Hashable, dict[SequenceState, None]] = {}  # by key, the sequences that have not ended
        self._slot_bytes = slot_bytes
        if cache is not None:
            cache.namespace_of = self.namespace_of

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
        """Takes a prompt, int32 [n], n >= 1, that is continued `samples` times by at most `limit` >= 1 tokens.

        reserve    whether room for the whole output is set aside when the prompt is admitted; otherwise the output
                   takes room as it grows, and a sequence may be preempted
        namespace  rows are shared only between prompts of one namespace
        priority   the priority of its rows in the cache
        outputs    for a request that was submitted before: {number of a sample that has not ended: its tokens}
        owner      the tenant and the class that it runs for

        Raises InputError if the KV store could not hold this request even alone.
        """
        rows = len(tokens) + (limit - 1 if reserve else 0)
        if rows > self.pool.num_slots:
            raise InputError(
                f"the request needs the K/V of {rows} rows, the KV store holds {self.pool.num_slots}",
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
        """Enters a prompt into the trie, and its sequences into the queue.

        outputs  {number of a sample: its tokens}
        make     returns a sequence by a sample's number, the node that ends with the prompt, and the sample's tokens
        """
        if self.cache is not None:
            self.cache.expire()  # no step may have been made for long
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
        """Return the namespace of a prompt's rows, by the namespace of its request and what is asked of it."""
        return namespace

    def cancel(self, key: Hashable) -> None:
        """Ends all sequences of a request; does nothing if the request has ended."""
        for sequence in list(self.requests.get(key, ())):
            self._end(sequence)

    def clear(self) -> None:
        """Forgets all requests, all steps in flight, and all rows: every slot is free."""
        self.pool.clear()
        self.tree.clear()
        if self.cache is not None:
            self.cache.forget_all()
        self.waiting.clear()
        self.running.clear()
        self.requests.clear()

    def admit_by(self, policy: Admission) -> None:
        """Admits by another policy from now on, which must hold no sequences yet; does nothing for the current one."""
        if policy is self.waiting:
            return
        policy.take_over(self.waiting, tuple(self._admitted()))
        self.waiting = policy

    def _admitted(self) -> Iterable[SequenceState]:
        """Returns the sequences that were admitted and have not ended."""
        return self.running

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences have not been admitted yet, or were preempted."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Returns whether a request has not ended, or a step is in flight."""
        return bool(self.requests or self._has_begun)

    @property
    def _has_begun(self) -> bool:
        raise NotImplementedError

    @property
    def can_plan(self) -> bool:
        """Returns whether any sequence runs or waits: a step can be planned for it, at the latest when the steps in
        flight are committed."""
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------------------------- running sequences

    def _max_rows(self, limits: StepLimits) -> int:
        return self.max_batch_rows if limits.rows is None else limits.rows

    def _make_way(self, sequence: SequenceState) -> bool:
        """Preempts a running sequence for a waiting one if the policy says so; returns whether it did."""
        victim = None if self._has_begun else self.waiting.gives_way(sequence, self.running)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, sequence: SequenceState) -> None:
        """Puts a sequence back at the head of the queue, and gives up the rows of its own tokens. The rows of its
        prompt stay while there is room."""
        del self.running[sequence]
        sequence.tail.lost |= sequence.tail.num_computed > 0
        self.pool.free(sequence.tail.give_up())
        sequence.state, sequence.ready = "waiting", False
        self.waiting.put_back(sequence)
        self.stats.preemptions += 1
        if not self.pool.free_slots:
            self._release_waiting(*self.running)

    def _release_waiting(self, *keep: SequenceState) -> bool:
        """Gives up the rows of prompts that only waiting sequences need, and returns whether there were any. The
        rows that the sequences in `keep` need are not given up."""
        needed = {node for sequence in keep for node in sequence.leaf.path()}
        has_released = False
        for node in self.nodes():
            if node.users and node not in needed and not node.pins and node.num_slots:
                has_released = True
                node.lost |= node.num_computed > 0
                self.pool.free(self.tree.drop(node))
        return has_released

    def _too_small(self, holds: str, needs: str, sequence: SequenceState) -> tuple[Hashable, InputError]:
        """Ends a sequence's request, and returns its key with the error. holds, needs: the rows that the store holds
        and that the sequence needs, in words."""
        pinned = sum(node.num_slots for node in self.nodes() if node.pins)
        remedy = "give a larger kv_memory (--kv-memory), or a max_tokens that fits"
        error = InputError(
            f"the KV store holds {holds}{f', of which {pinned} are pinned' if pinned else ''}, too few for {needs}",
            field="max_tokens",
            remedy=f"unpin prompts, {remedy}" if pinned else remedy,
            code="kv_memory",
        )
        self.cancel(sequence.key)
        return sequence.key, error

    def _end(self, sequence: SequenceState) -> None:
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
        """Keeps the rows of a node that no sequence uses any more in the cache, or frees them without a cache."""
        if self.cache is not None:
            self.cache.keep(node)
        else:
            self.pool.free(self.tree.drop(node))
            self.tree.remove(node)

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes of prompts; tails are no such nodes."""
        return self.tree.nodes()

    def _runs_no_more(self, sequence: SequenceState) -> None:
        """Removes an admitted sequence from those that run."""
        del self.running[sequence]

    def _is_prompt_like(self, sequence: SequenceState) -> bool:
        """Returns whether the rows of the sequence's tokens equal those of a prompt with the same tokens."""
        return True
