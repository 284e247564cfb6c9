"""The admission policy of a server: interactive requests come before batches, and tenants share the engine by weight.

`admission.Admission` describes the methods of a policy.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator

from ...spec.requests import Owner, Share
from ..cache import RadixCache
from .admission import Admission, Capacity, StepLimits
from .generate_step import SequenceState, StepPlan

# Among the first LOOK_AHEAD waiting sequences of a tenant, the sequence with the fewest rows to compute is admitted. A
# sequence that was passed over MAX_PASSED times goes first.
LOOK_AHEAD = 8
MAX_PASSED = 8
# Share of running sequences and of slots reserved for interactive requests. Batches may borrow the reserved sequences
# if no interactive request came for a while.
RESERVED_SHARE = 0.25
# Number of owner queues, including idle ones, above which idle queues are forgotten.
IDLE_QUEUES = 1024


class _OwnerQueue:
    """The waiting and the running sequences of one owner.

    Attributes:
        waiting: {sequence: how often it was passed over}, in order of arrival.
        running: The sequences that were admitted and have not ended.
        service: The rows that the owner got, divided by its weight. Prompt rows count from admission on, output rows
            once the sequence has ended.
        entered: The queue is in the heap of its class.
    """

    __slots__ = ("entered", "owner", "running", "service", "share", "waiting")

    def __init__(self, owner: Owner, share: Share, service: float):
        self.owner, self.share, self.service = owner, share, service
        self.waiting: OrderedDict[SequenceState, int] = OrderedDict()
        self.running: dict[SequenceState, None] = {}
        self.entered = False

    @property
    def tag(self) -> float:
        """`service` plus the output rows of running sequences per weight; owners are ordered by it."""
        return self.service + self.num_output_rows / self.share.weight

    @property
    def num_output_rows(self) -> int:
        """The output rows of running sequences."""
        return sum([len(sequence.tail.tokens) for sequence in self.running])

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def may_run(self) -> bool:
        most = self.share.max_running
        return bool(self.waiting) and (most is None or len(self.running) < most)


class FairAdmission:
    """Admits interactive requests before batches, and shares the engine between tenants.

    Within a class, the owner that got the fewest rows per weight is next; computed prompt rows and output rows count.
    An owner gets no credit for the time in which it was idle: it starts at the tag of the owner whose sequence was
    admitted last (start-time fair queueing, Goyal et al. 1996). Within an owner, the sequence with the fewest missing
    rows is next, but no sequence is passed over more than MAX_PASSED times.

    If several tenants have interactive requests, they divide the prompt rows of a step by weight, and a tenant's
    prompts wait only for the same tenant's other prompts.

    A share of the sequences and slots is reserved for interactive requests. While these wait, batches get `batch_share`
    of the prompt rows. If an interactive request finds no free capacity, the batch sequence admitted last is preempted;
    one sequence of a batch always stays.

    Args:
        share_of: Returns the Share of a tenant.
        tenant_of: Returns the tenant of a namespace, for the accounts of the cache.
        batch_share: Share of prompt rows for batches while interactive requests wait.
        idle_queues: Number of queues above which queues without sequences are forgotten.
    """

    def __init__(
        self,
        share_of: Callable[[Hashable], Share] = lambda tenant: Share(),
        *,
        tenant_of: Callable[[Hashable], Hashable] = lambda namespace: None,
        batch_share: float = 0.02,
        idle_queues: int = IDLE_QUEUES,
    ):
        self.share_of, self.tenant_of = share_of, tenant_of
        self.batch_share, self.idle_queues = batch_share, idle_queues
        self.clear()

    def clear(self) -> None:
        self.queues: dict[Owner, _OwnerQueue] = {}
        # Heaps of the queues with a sequence to admit, for interactive requests and for batches: (tag when pushed,
        # number, queue). Tags only grow, so the head has the least tag if its tag is still current.
        self.heaps: tuple[list[tuple[float, int, _OwnerQueue]], list[tuple[float, int, _OwnerQueue]]] = ([], [])
        self._numbers = itertools.count()
        self._now = [0.0, 0.0]  # for each class, the tag of the queue whose sequence was admitted last
        self._num_waiting = [0, 0]
        self._num_running = [0, 0]
        self._num_owners = [0, 0]  # for each class, the number of owners with a sequence
        self._max_queues = self.idle_queues
        self._credit = 0.0  # prompt rows that a batch may get before interactive requests
        # Cached output rows of running sequences per queue, valid while one sequence after the other is admitted.
        self._outputs: dict[_OwnerQueue, int] = {}
        self._has_admitted = False  # the last call was an admission, so `_outputs` is still valid

    def __len__(self) -> int:
        return sum(self._num_waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        return (sequence for queue in self.queues.values() for sequence in queue.waiting)

    def __contains__(self, sequence: object) -> bool:
        queue = self.queues.get(sequence.owner) if isinstance(sequence, SequenceState) else None
        return queue is not None and sequence in queue.waiting

    def num_waiting(self, *, batch: bool) -> int:
        """Return how many sequences of a class wait."""
        return self._num_waiting[batch]

    def num_running(self, *, batch: bool) -> int:
        """Return how many sequences of a class were admitted and have not ended."""
        return self._num_running[batch]

    def num_owners(self, *, batch: bool) -> int:
        """Return how many owners of a class have waiting or running sequences."""
        return self._num_owners[batch]

    def take_over(self, before: Admission, running: Iterable[SequenceState]) -> None:
        self.add(before)
        for sequence in running:
            queue = self._queue(sequence.owner)
            self._num_owners[sequence.owner.is_batch] += queue.is_idle
            queue.running[sequence] = None
            self._num_running[sequence.owner.is_batch] += 1

    def read_shares(self, cache: RadixCache | None = None) -> None:
        """Read the tenants' shares again, and update the cache's accounts."""
        if cache is not None:
            cache.set_tenants(self.tenant_of, self.share_of)
        for queue in self.queues.values():
            queue.share = self.share_of(queue.owner.tenant)
            self._enter(queue)

    # ---------------------------------------------------------------------------- sequences that come and go

    def add(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in sequences:
            queue = self._queue(sequence.owner)
            if queue.is_idle:
                self._num_owners[sequence.owner.is_batch] += 1
                queue.service = max(queue.service, self._now[sequence.owner.is_batch])
            queue.waiting[sequence] = 0
            self._num_waiting[sequence.owner.is_batch] += 1
            self._enter(queue)

    def put_back(self, sequence: SequenceState) -> None:
        queue = self.queues[sequence.owner]
        del queue.running[sequence]
        self._outputs.clear()
        self._num_running[sequence.owner.is_batch] -= 1
        queue.waiting[sequence] = MAX_PASSED
        queue.waiting.move_to_end(sequence, last=False)
        self._num_waiting[sequence.owner.is_batch] += 1
        self._enter(queue)

    def remove(self, sequence: SequenceState) -> None:
        queue = self.queues[sequence.owner]
        del queue.waiting[sequence]
        self._num_waiting[sequence.owner.is_batch] -= 1
        self._num_owners[sequence.owner.is_batch] -= queue.is_idle

    def note_admission(self, sequence: SequenceState, rows: int) -> None:
        queue = self.queues[sequence.owner]
        is_batch = sequence.owner.is_batch
        for other in queue.waiting:
            if other is sequence:
                break
            queue.waiting[other] += 1
        del queue.waiting[sequence]
        queue.running[sequence] = None
        self._num_waiting[is_batch] -= 1
        self._num_running[is_batch] += 1
        if queue in self._outputs:
            self._outputs[queue] += len(sequence.tail.tokens)
        self._has_admitted = True
        self._now[is_batch] = max(self._now[is_batch], self._tag(queue))
        queue.service += rows / queue.share.weight
        if self._num_waiting[not is_batch]:
            self._credit += -rows if is_batch else self.batch_share * rows
        elif is_batch:
            self._credit = 0.0

    def note_end(self, sequence: SequenceState) -> None:
        queue = self.queues[sequence.owner]
        del queue.running[sequence]
        self._outputs.clear()
        self._num_running[sequence.owner.is_batch] -= 1
        self._num_owners[sequence.owner.is_batch] -= queue.is_idle
        queue.service += len(sequence.tail.tokens) / queue.share.weight
        self._enter(queue)

    # ------------------------------------------------------------------------------------ the next sequence

    def first(self, scheduler: Capacity, limits: StepLimits, *, batches: bool = True) -> SequenceState | None:
        if not self._has_admitted:
            self._outputs.clear()
        self._has_admitted = False
        queue = self._least(False)
        batch = self._least(True) if batches and self._num_waiting[True] else None
        if batch is not None:
            sequence = _cheapest(batch)
            has_turn = queue is None or self._credit >= sequence.leaf.stop
            if has_turn and self._has_room(sequence, scheduler, limits.lends):
                return sequence
        return None if queue is None else _cheapest(queue)

    def before(self, sequence: SequenceState, running: Collection[SequenceState]) -> Collection[SequenceState]:
        if sequence.owner.is_batch:
            return running
        live = _of_class(running, False)
        if self._num_owners[False] < 2:
            return live
        return [other for other in live if other.ready or other.owner == sequence.owner]

    def gives_way(self, sequence: SequenceState, running: Collection[SequenceState]) -> SequenceState | None:
        # One sequence of a batch always continues, so that batches end even under constant interactive load.
        return self._last_of_batch(running) if not sequence.owner.is_batch and self._num_running[True] > 1 else None

    def victim(self, running: Collection[SequenceState]) -> SequenceState:
        return self._last_of_batch(running) or next(reversed(running))  # type: ignore[call-overload]

    def are_alike(self, limits: StepLimits) -> bool:
        return not self._num_running[True] or (not self._num_running[False] and limits.batch_rows is None)

    def fill(self, plan: StepPlan, running: Collection[SequenceState], limits: StepLimits) -> StepPlan:
        """Add rows of interactive requests to the plan of a step, then rows of batches.

        If there are too few rows for all sequences of batches, the sequences with the fewest generated tokens get a
        row.
        """
        if not self._num_running[True]:
            self._fill_live(plan, running)
            return plan
        for is_batch in (True, False) if limits.batch_first else (False, True):
            sequences = _of_class(running, is_batch)
            if not is_batch:
                self._fill_live(plan, sequences)
            elif limits.batch_rows is None or limits.batch_rows >= plan.room:
                plan.fill(sequences)
            elif limits.batch_rows:
                plan.room = limits.batch_rows
                if plan.room < len(sequences):
                    sequences.sort(key=lambda sequence: len(sequence.tail.tokens))
                plan.fill(sequences)
                plan.room = max(0, plan.max_rows - plan.num_rows)
        return plan

    def _fill_live(self, plan: StepPlan, running: Collection[SequenceState]) -> None:
        """Add rows of interactive requests to a step: of all sequences that generate, and of prompts.

        The tenants divide the prompt rows. The unused share of a tenant goes to tenants with longer prompts.
        """
        prompts: dict[Owner, list[SequenceState]] = {}
        if self._num_owners[False] > 1:
            for sequence in running:
                if not sequence.ready:
                    prompts.setdefault(sequence.owner, []).append(sequence)
        if len(prompts) < 2:
            plan.fill(running)
            return
        owners = list(prompts)
        if plan.holds_rows is None:  # an image's span may have to be the first of a step
            owners.sort(key=lambda owner: sum(sequence.leaf.stop for sequence in prompts[owner]))
        generating = [sequence for sequence in running if sequence.ready]
        room, weight = plan.room, sum(self.queues[owner].share.weight for owner in owners)
        for owner in owners:
            share = self.queues[owner].share.weight / weight
            rows = min(room, len(generating) + math.ceil(max(0, room - len(generating)) * share))
            plan.room, before = rows, plan.num_rows
            plan.fill([*generating, *prompts[owner]])
            room = max(0, room - (plan.num_rows - before))
            weight -= self.queues[owner].share.weight
            generating = []
        plan.room = room

    def _has_room(self, sequence: SequenceState, scheduler: Capacity, lends: bool) -> bool:
        """Return True if a batch sequence leaves enough capacity for interactive requests, or if nothing else runs."""
        if not scheduler.running:
            return True
        reserved = 0.0 if lends else RESERVED_SHARE
        if self._num_running[True] >= max(1, int((1 - reserved) * scheduler.max_running)):
            return False
        evictable = 0 if scheduler.cache is None else scheduler.cache.rows
        rows = sequence.leaf.stop + (sequence.limit if sequence.reserve else 0)
        pool = scheduler.pool
        slots = pool.free_slots + evictable - rows
        return slots >= RESERVED_SHARE * pool.num_slots

    def _last_of_batch(self, running: Collection[SequenceState]) -> SequenceState | None:
        if not self._num_running[True]:
            return None
        return next((latest for latest in reversed(running) if latest.owner.is_batch), None)  # type: ignore[call-overload]

    # ------------------------------------------------------------------------------------------- the queues

    def _queue(self, owner: Owner) -> _OwnerQueue:
        queue = self.queues.get(owner)
        if queue is None:
            self._forget_idle()
            queue = self.queues[owner] = _OwnerQueue(owner, self.share_of(owner.tenant), self._now[owner.is_batch])
        return queue

    def _enter(self, queue: _OwnerQueue) -> None:
        if not queue.entered and queue.may_run:
            queue.entered = True
            heapq.heappush(self.heaps[queue.owner.is_batch], (queue.tag, next(self._numbers), queue))

    def _forget_idle(self) -> None:
        """Forget queues without sequences, unless their owners got more rows than others."""
        if len(self.queues) > self._max_queues:
            self.queues = {
                owner: queue
                for owner, queue in self.queues.items()
                if queue.waiting or queue.running or queue.entered or queue.service > self._now[owner.is_batch]
            }
            self._max_queues = max(self.idle_queues, 2 * len(self.queues))

    def _tag(self, queue: _OwnerQueue) -> float:
        """Return a queue's tag during admissions, with its output rows cached."""
        if queue not in self._outputs:
            self._outputs[queue] = queue.num_output_rows
        return queue.service + self._outputs[queue] / queue.share.weight

    def _least(self, is_batch: bool) -> _OwnerQueue | None:
        """Return the queue of a class with the least tag, among queues with a sequence to admit."""
        heap = self.heaps[is_batch]
        while heap:
            tag, _, queue = heap[0]
            if not queue.may_run:
                heapq.heappop(heap)
                queue.entered = False
            elif (now := self._tag(queue)) > tag:
                heapq.heapreplace(heap, (now, next(self._numbers), queue))
            else:
                return queue
        return None


def _of_class(running: Collection[SequenceState], is_batch: bool) -> list[SequenceState]:
    return [sequence for sequence in running if sequence.owner.is_batch == is_batch]


def _cheapest(queue: _OwnerQueue) -> SequenceState:
    """Return the next sequence of a queue: among the first few, the sequence with the fewest rows to compute."""
    first, num_passed = next(iter(queue.waiting.items()))
    if num_passed >= MAX_PASSED or len(queue.waiting) == 1:
        return first
    return min(itertools.islice(queue.waiting, LOOK_AHEAD), key=_rows_missing)


def _rows_missing(sequence: SequenceState) -> int:
    node, rows = sequence.leaf, 0
    while node.parent is not None:  # a loop without `path()`, because this is called often
        rows += len(node.tokens) - len(node.slots)
        node = node.parent
    return rows
