"""Whether the books of a VisitScheduler agree."""

from __future__ import annotations

import numpy as np
from books import check_admission, check_books

from prefold.cache.tree import Node
from prefold.looped.cache import NodeVisit, TailNode, VisitNode
from prefold.looped.outputs import OutputRows
from prefold.looped.scheduler import VisitScheduler
from prefold.looped.sequence import LoopedSequence
from prefold.looped.steps import CODA


def check_visits(scheduler: VisitScheduler) -> None:
    """Raises AssertionError where slots, users of nodes and states of sequences do not agree."""
    held = [np.arange(start, start + size) for start, size in scheduler.pool._sizes.items()]
    users: dict[Node, int] = {}
    takes: dict[NodeVisit, int] = {}
    check_admission(scheduler.waiting, scheduler.running)
    sequences: list[LoopedSequence] = [*scheduler.running, *scheduler.waiting]  # type: ignore[list-item]
    for sequence in sequences:
        assert sequence in (scheduler.running if sequence.state == "running" else scheduler.waiting)
        assert sequence.state == "running" or not (sequence.tail.num_slots or sequence.tail.place is not None)
        assert len(sequence.prefixes) == len(sequence.route) >= sequence.visit
        for node in sequence.nodes():
            users[node] = users.get(node, 0) + 1
            for prefix in sequence.prefixes:
                takes[node.visits[prefix]] = takes.get(node.visits[prefix], 0) + 1
        if sequence.ready:
            held.append(_tail_slots(sequence.tail))
        _check_deeper(sequence)
        _check_tail(sequence)
    nodes: list[VisitNode] = [*scheduler.tree.nodes(), *(sequence.tail for sequence in sequences)]  # type: ignore[list-item]
    for node in nodes:
        is_tail = node.parent is None or node.parent.children.get(node.ids[:4]) is not node
        assert is_tail or node.users == users.get(node, 0)
        assert is_tail or node.users or node.kept, "a node that nobody needs"
        for visit in node.visits.values():
            assert visit.users == takes.get(visit, 0)
            assert visit.num_settled <= len(node)
            held.append(visit.slots[visit.owns_slot])
            _check_runs(visit.runs, visit.slots[: visit.num_settled], node.start)
    places = [sequence.tail.place for sequence in scheduler.running]
    assert len(set(places)) == len(places), "two tails in one place"
    check_tails(scheduler._outputs)
    slots = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    assert np.array_equal(slots, np.arange(1, scheduler.pool.num_slots + 1)), "slots leak, or are used twice"
    assert len(scheduler.running) <= scheduler.max_running
    assert {*sequences} == {sequence for request in scheduler._requests.values() for sequence in request}
    if scheduler.cache is not None:
        check_books(scheduler.cache)
        for account in scheduler.cache.accounts:
            own = sum(node.num_slots for node in nodes if node.account is account)
            tails = [one.tail for one in sequences if one.ready and one.tail.account is account]
            assert account.num_slots == own + sum(len(_tail_slots(tail)) for tail in tails)


def _check_runs(runs: list[tuple[int, int, int]], slots: np.ndarray, start: int) -> None:
    """Runs of neighbouring slots are those of the settled rows."""
    assert [slot for first, count, _ in runs for slot in range(first, first + count)] == slots.tolist()
    assert [at for _, count, first in runs for at in range(first, first + count)] == list(
        range(start, start + len(slots))
    )
    assert slots.all()


def _tail_slots(tail: TailNode) -> np.ndarray:
    """Returns the slots that a tail holds in the arrays, those of rows to come too."""
    tails, at = tail.outputs, tail.place
    spare = [np.arange(count) + first for first, count in zip(tails.spare_at[at], tails.num_spare[at], strict=True)]
    return np.concatenate((tails.slots[at][tails.owns_slot[at]], *spare))


def check_tails(tails: OutputRows) -> None:
    """Raises AssertionError where anything is left in a place that nobody has."""
    for array in (
        tails.slots,
        tails.owns_slot,
        tails.has_left,
        tails.num_settled,
        tails.num_runs,
        tails.num_spare,
        tails.visit,
    ):
        assert not array[tails._free].any()


def _check_tail(sequence: LoopedSequence) -> None:
    """What is held of the last row of a tail is what the tail has."""
    tail, tails = sequence.tail, sequence.outputs
    if tail.place is None:
        assert sequence.state == "waiting"
        return
    assert tail.place not in tails._free and tails.row[tail.place] == len(tail.tokens) - 1
    if tail.tokens:
        assert tails.token[tail.place] == tail.tokens[-1]
        assert (tails.decides[tail.place], tails.leaves[tail.place]) == sequence.when(len(tail.tokens) - 1)
    for t in range(len(sequence.prefixes) if sequence.ready else 0):
        of_runs = (array[tail.place, t] for array in (tails.run_start, tails.run_count, tails.run_position))
        runs = list(zip(*(numbers[: tails.num_runs[tail.place, t]].tolist() for numbers in of_runs), strict=True))
        _check_runs(runs, tails.slots[tail.place, t, : tails.num_settled[tail.place, t]], tail.start)


def _check_deeper(sequence: LoopedSequence) -> None:
    """A visit has no more rows than the one before, and what it sees of a row that left is a slot of that row."""
    for node in sequence.nodes():
        visits = [node.visits[prefix] for prefix in sequence.prefixes]
        rows = [(visit.num_settled, visit.slots, visit.owns_slot, visit.has_left) for visit in visits]
        if sequence.ready and node is sequence.tail:
            tails, at = sequence.outputs, sequence.tail.place
            columns = (tails.num_settled[at].tolist(), tails.slots[at], tails.owns_slot[at], tails.has_left[at])
            rows = list(zip(*columns, strict=True))[: len(visits)]
        own: set[int] = set()
        most = len(node)
        for t, (num_settled, slots, owns_slot, has_left) in enumerate(rows):
            assert num_settled <= most or sequence.route[t] == CODA, "rows that left come to the coda at once"
            most = num_settled
            if t and sequence.route[t] >= 0:
                assert has_left[:most][rows[t - 1][3][:most]].all(), "a row that had left is back"
            own |= {int(slot) for slot in slots[:most]} if t == 0 else set()
            own |= {int(slot) for slot in slots[owns_slot]}
            assert {int(slot) for slot in slots[:most]} <= own
