"""The policy of a server: classes, tenants that share the engine by their weights, and room for interactive requests.

What a policy does is said in `admission.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..types import Owner, Share
from .admission import Admission, D
from .generate_step import Running

if TYPE_CHECKING:
    from ..cache import RadixCache
    from .sequences import Sequences

# Of so many that wait first of a tenant, the one with the fewest rows to compute is admitted; one that others were
# preferred to so often is admitted before them.
LOOK = 8
MOST_PASSED = 8
# The part of the sequences, and of the slots, that is left to interactive requests; that of the sequences is lent to
# batches where nobody has come for a while.
LEFT_TO_INTERACTIVE = 0.25
# Lines that are held, with those of owners that have nothing at present, before some are forgotten.
IDLE_LINES = 1024


class _Line:
    """A _Line is what one owner has waiting and running.

    waiting  {sequence: how often another was preferred to it}, in the order of their coming
    running  the sequences that were admitted and have not ended
    given    rows that it was given, over its weight: those of prompts from their admission on, those of outputs once
             they have ended
    entered  whether it is in its class's heap
    """

    __slots__ = ("entered", "given", "owner", "running", "share", "waiting")

    def __init__(self, owner: Owner, share: Share, given: float):
        self.owner, self.share, self.given = owner, share, given
        self.waiting: OrderedDict[Running, int] = OrderedDict()
        self.running: dict[Running, None] = {}
        self.entered = False

    @property
    def tag(self) -> float:
        """Returns `given`, with the outputs that are being made."""
        return self.given + sum(len(sequence.tail.tokens) for sequence in self.running) / self.share.weight

    @property
    def may_run(self) -> bool:
        most = self.share.max_running
        return bool(self.waiting) and (most is None or len(self.running) < most)


class FairAdmission:
    """A FairAdmission admits interactive requests before batches, and shares the engine between tenants.

    Of the tenants of a class the one is next that was given the fewest rows, over its weight: rows of prompts that had
    to be computed, and of outputs. A tenant that comes back has no claim on what it did not use: it begins where the
    one stands that was admitted last (start-time fair queueing, Goyal et al. 1996). Of a tenant's own sequences the one
    is next that has the fewest rows which are neither there nor being computed; none is passed over more than
    MOST_PASSED times.

    A part of the sequences and slots is left to interactive requests. While these wait, a batch gets `batch_share` of
    the rows of prompts. Where there is no room for an interactive request, the sequence of a batch that was admitted
    last gives up its own rows, and goes on later; the first one stays.

    tenant_of    says to which tenant a namespace belongs, for what is kept
    batch_rows   the most rows of batches in a step; None: as many as there is room for. The engine sets it
    batch_first  whether these come before rows of interactive requests
    lends        whether batches may have all sequences, and not only those that are not left to interactive requests.
                 The engine sets it
    """

    def __init__(
        self,
        share_of: Callable[[Hashable], Share] = lambda tenant: Share(),
        *,
        tenant_of: Callable[[Hashable], Hashable] = lambda namespace: None,
        batch_share: float = 0.02,
    ):
        self.share_of, self.tenant_of = share_of, tenant_of
        self.batch_share = batch_share
        self.batch_rows: int | None = None
        self.batch_first = False
        self.lends = False
        self.clear()

    def clear(self) -> None:
        self._lines: dict[Owner, _Line] = {}
        # Lines that may have somebody to admit, of interactive requests and of batches: (tag at its entry, number,
        # line), the least first. Tags only grow, so one that has not is the least of all.
        self._heaps: tuple[list[tuple[float, int, _Line]], list[tuple[float, int, _Line]]] = ([], [])
        self._numbers = itertools.count()
        self._now = [0.0, 0.0]  # the tag of the line of each class that was admitted from last
        self._num_waiting = [0, 0]
        self._num_running = [0, 0]
        self._most_lines = IDLE_LINES
        self._credit = 0.0  # rows that a batch may have before interactive requests

    def __len__(self) -> int:
        return sum(self._num_waiting)

    def __iter__(self) -> Iterator[Running]:
        return (sequence for line in self._lines.values() for sequence in line.waiting)

    def __contains__(self, sequence: object) -> bool:
        line = self._lines.get(sequence.owner) if isinstance(sequence, Running) else None
        return line is not None and sequence in line.waiting

    def num_waiting(self, *, batch: bool) -> int:
        """Returns how many sequences of a class wait."""
        return self._num_waiting[batch]

    def num_running(self, *, batch: bool) -> int:
        """Returns how many sequences of a class have been admitted and have not ended."""
        return self._num_running[batch]

    def take_over(self, before: Admission, running: Iterable[Running]) -> None:
        self.add(before)
        for sequence in running:
            self._line(sequence.owner).running[sequence] = None
            self._num_running[sequence.owner.is_batch] += 1

    def read_shares(self, cache: RadixCache | None = None) -> None:
        """Asks for the tenants' shares again, also of what a cache keeps for them."""
        if cache is not None:
            cache.set_tenants(self.tenant_of, self.share_of)
        for line in self._lines.values():
            line.share = self.share_of(line.owner.tenant)
            self._enter(line)

    # ------------------------------------------------------------------------------------------ who comes and goes

    def add(self, sequences: Iterable[Running]) -> None:
        for sequence in sequences:
            line = self._line(sequence.owner)
            if not line.waiting and not line.running:
                line.given = max(line.given, self._now[sequence.owner.is_batch])
            line.waiting[sequence] = 0
            self._num_waiting[sequence.owner.is_batch] += 1
            self._enter(line)

    def put_back(self, sequence: Running) -> None:
        line = self._lines[sequence.owner]
        del line.running[sequence]
        self._num_running[sequence.owner.is_batch] -= 1
        line.waiting[sequence] = MOST_PASSED
        line.waiting.move_to_end(sequence, last=False)
        self._num_waiting[sequence.owner.is_batch] += 1
        self._enter(line)

    def remove(self, sequence: Running) -> None:
        line = self._lines[sequence.owner]
        del line.waiting[sequence]
        self._num_waiting[sequence.owner.is_batch] -= 1

    def admitted(self, sequence: Running, rows: int) -> None:
        line = self._lines[sequence.owner]
        is_batch = sequence.owner.is_batch
        for other in line.waiting:
            if other is sequence:
                break
            line.waiting[other] += 1
        del line.waiting[sequence]
        line.running[sequence] = None
        self._num_waiting[is_batch] -= 1
        self._num_running[is_batch] += 1
        self._now[is_batch] = max(self._now[is_batch], line.tag)
        line.given += rows / line.share.weight
        if self._num_waiting[not is_batch]:
            self._credit += -rows if is_batch else self.batch_share * rows
        elif is_batch:
            self._credit = 0.0

    def ended(self, sequence: Running) -> None:
        line = self._lines[sequence.owner]
        del line.running[sequence]
        self._num_running[sequence.owner.is_batch] -= 1
        line.given += len(sequence.tail.tokens) / line.share.weight
        self._enter(line)

    # ------------------------------------------------------------------------------------------------- who is next

    def first(self, scheduler: Sequences, *, batches: bool = True) -> Running | None:
        line = self._least(False)
        batch = self._least(True) if batches and self._num_waiting[True] else None
        if batch is not None:
            found = _cheapest(batch)
            rows = found.leaf.stop
            if (line is None or self._credit >= rows) and self._has_room(found, scheduler):
                return found
        return None if line is None else _cheapest(line)

    def before(self, sequence: Running, running: Collection[Running]) -> Collection[Running]:
        return running if sequence.owner.is_batch else _of_class(running, False)

    def gives_way(self, sequence: Running, running: Collection[Running]) -> Running | None:
        # One goes on, so that batches come to an end however many others there are.
        return self._last_of_batch(running) if not sequence.owner.is_batch and self._num_running[True] > 1 else None

    def victim(self, running: Collection[Running]) -> Running:
        return self._last_of_batch(running) or next(reversed(running))  # type: ignore[call-overload]

    @property
    def are_alike(self) -> bool:
        return not self._num_running[True] or (not self._num_running[False] and self.batch_rows is None)

    def draft(self, running: Collection[Running], draft: D) -> D:
        """Returns the draft of a step: rows of interactive requests first, then of batches, at most `batch_rows`. Where
        these are too few for all sequences of batches, those that have made the fewest tokens have them."""
        if not self._num_running[True]:
            draft.fill(running)
            return draft
        for is_batch in (True, False) if self.batch_first else (False, True):
            some = _of_class(running, is_batch)
            if not is_batch or self.batch_rows is None or self.batch_rows >= draft.left:
                draft.fill(some)
            elif self.batch_rows:
                draft.left = self.batch_rows
                if draft.left < len(some):
                    some.sort(key=lambda sequence: len(sequence.tail.tokens))
                draft.fill(some)
                draft.left = max(0, draft.most - draft.num_taken)
        return draft

    def _has_room(self, sequence: Running, scheduler: Sequences) -> bool:
        """Returns whether a sequence of a batch leaves enough to interactive requests, or is alone."""
        if not scheduler.running:
            return True
        left = 0.0 if self.lends else LEFT_TO_INTERACTIVE
        if self._num_running[True] >= max(1, int((1 - left) * scheduler.max_running)):
            return False
        kept = 0 if scheduler.cache is None else scheduler.cache.rows
        rows = sequence.leaf.stop + (sequence.limit if sequence.reserve else 0)
        pool = scheduler.pool
        slots = pool.free_slots + (kept - rows) * scheduler.slots_per_row
        return slots >= LEFT_TO_INTERACTIVE * pool.num_slots

    def _last_of_batch(self, running: Collection[Running]) -> Running | None:
        if not self._num_running[True]:
            return None
        return next((one for one in reversed(running) if one.owner.is_batch), None)  # type: ignore[call-overload]

    # -------------------------------------------------------------------------------------------------- the lines

    def _line(self, owner: Owner) -> _Line:
        line = self._lines.get(owner)
        if line is None:
            self._forget_idle()
            line = self._lines[owner] = _Line(owner, self.share_of(owner.tenant), self._now[owner.is_batch])
        return line

    def _enter(self, line: _Line) -> None:
        if not line.entered and line.may_run:
            line.entered = True
            heapq.heappush(self._heaps[line.owner.is_batch], (line.tag, next(self._numbers), line))

    def _forget_idle(self) -> None:
        """Forgets lines that have nothing, and were not given more than others."""
        if len(self._lines) > self._most_lines:
            self._lines = {
                owner: line
                for owner, line in self._lines.items()
                if line.waiting or line.running or line.entered or line.given > self._now[owner.is_batch]
            }
            self._most_lines = max(IDLE_LINES, 2 * len(self._lines))

    def _least(self, is_batch: bool) -> _Line | None:
        """Returns the line of a class that was given least, of those that have somebody to admit."""
        heap = self._heaps[is_batch]
        while heap:
            tag, _, line = heap[0]
            if not line.may_run:
                heapq.heappop(heap)
                line.entered = False
            elif (now := line.tag) > tag:
                heapq.heapreplace(heap, (now, next(self._numbers), line))
            else:
                return line
        return None

    def check(self, running: Collection[Running]) -> None:
        """Raises AssertionError where lines, counts and those who run do not agree; for tests."""
        admitted = {sequence for line in self._lines.values() for sequence in line.running}
        assert set(running) <= admitted
        assert all(sequence.state in ("running", "ending") for sequence in admitted)
        for is_batch in (False, True):
            lines = [line for line in self._lines.values() if line.owner.is_batch == is_batch]
            assert self._num_waiting[is_batch] == sum(len(line.waiting) for line in lines)
            assert self._num_running[is_batch] == sum(len(line.running) for line in lines)
            entered = [line for _, _, line in self._heaps[is_batch]]
            assert len(set(entered)) == len(entered)
            assert {line for line in lines if line.entered} == set(entered)
            assert all(line.entered for line in lines if line.may_run), "somebody is never admitted"
        for line in self._lines.values():
            assert list(line.waiting.values()) == sorted(line.waiting.values(), reverse=True)


def _of_class(running: Collection[Running], is_batch: bool) -> list[Running]:
    return [sequence for sequence in running if sequence.owner.is_batch == is_batch]


def _cheapest(line: _Line) -> Running:
    """Returns who of a line is next: of the first few, the one that has the fewest rows to compute."""
    first, passed = next(iter(line.waiting.items()))
    if passed >= MOST_PASSED or len(line.waiting) == 1:
        return first
    return min(itertools.islice(line.waiting, LOOK), key=_rows_missing)


def _rows_missing(sequence: Running) -> int:
    return sum(node.num_missing for node in sequence.leaf.path())
