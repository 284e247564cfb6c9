"""Whether the books of a VisitScheduler agree."""

from __future__ import annotations

import numpy as np

from prefold.cache.tree import Node
from prefold.looped.cache import NodeVisit, VisitNode
from prefold.looped.outputs import OutputRows
from prefold.looped.scheduler import VisitScheduler
from prefold.looped.sequence import Routed
from prefold.looped.steps import CODA


def check_visits(scheduler: VisitScheduler) -> None:
    """Raises AssertionError where slots, users of nodes and states of sequences do not agree."""
    held = [np.arange(start, start + size) for start, size in scheduler.pool.free_list()]
    users: dict[Node, int] = {}
    takes: dict[NodeVisit, int] = {}
    scheduler.waiting.check(scheduler.running)
    sequences: list[Routed] = [*scheduler.running, *scheduler.waiting]  # type: ignore[list-item]
    for sequence in sequences:
        assert sequence in (scheduler.running if sequence.state == "running" else scheduler.waiting)
        assert sequence.state == "running" or not sequence.tail.num_slots
        assert len(sequence.prefixes) == len(sequence.route) >= sequence.visit
        for node in sequence.nodes():
            users[node] = users.get(node, 0) + 1
            for prefix in sequence.prefixes:
                takes[node.visits[prefix]] = takes.get(node.visits[prefix], 0) + 1
        _check_deeper(sequence)
        _check_tail(sequence)
    nodes: list[VisitNode] = [*scheduler.tree.nodes(), *(sequence.tail for sequence in sequences)]  # type: ignore[list-item]
    for node in nodes:
        is_tail = node.parent is None or node.parent.children.get(int(node.tokens[0]) if len(node) else -1) is not node
        assert is_tail or node.users == users.get(node, 0)
        assert is_tail or node.users or node.kept, "a node that nobody needs"
        for visit in node.visits.values():
            assert visit.users == takes.get(visit, 0)
            assert visit.done <= len(node)
            held += [visit.slots[visit.owned], visit.spare]
            assert sum(visit.counts) == visit.done and visit.slots[: visit.done].all()
            flat = [
                slot
                for start, count in zip(visit.starts, visit.counts, strict=True)
                for slot in range(start, start + count)
            ]
            assert flat == visit.slots[: visit.done].tolist()
    places = [sequence.tail.place for sequence in scheduler.running]
    assert len(set(places)) == len(places), "two tails in one place"
    check_tails(scheduler._outputs)
    slots = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    assert np.array_equal(slots, np.arange(1, scheduler.pool.num_slots + 1)), "slots leak, or are used twice"
    assert len(scheduler.running) <= scheduler.max_running
    assert {*sequences} == {sequence for request in scheduler._requests.values() for sequence in request}
    if scheduler.cache is not None:
        scheduler.cache.check()
        for account in scheduler.cache.accounts:
            assert account.held == sum(node.num_slots for node in nodes if node.account is account)


def check_tails(tails: OutputRows) -> None:
    """Raises AssertionError where anything is left in a place that nobody has."""
    for array in (tails.slots, tails.owned, tails.left, tails.done, tails.num_runs, tails.num_spare, tails.visit):
        assert not array[tails._free].any()


def _check_tail(sequence: Routed) -> None:
    """What is held of the last row of a tail is what the tail has."""
    tail, tails = sequence.tail, sequence.outputs
    if tail.place is None:
        assert sequence.state == "waiting"
        return
    assert tail.place not in tails._free and tails.row[tail.place] == len(tail.tokens) - 1
    if tail.tokens:
        assert tails.token[tail.place] == tail.tokens[-1]
        assert (tails.decides[tail.place], tails.leaves[tail.place]) == sequence.when(len(tail.tokens) - 1)


def _check_deeper(sequence: Routed) -> None:
    """A visit has no more rows than the one before, and what it sees of a row that left is a slot of that row."""
    for node in sequence.nodes():
        own: set[int] = set()
        done = len(node)
        for t, prefix in enumerate(sequence.prefixes):
            visit = node.visits[prefix]
            assert visit.done <= done or sequence.route[t] == CODA, "rows that left come to the coda at once"
            done = visit.done
            if t and sequence.route[t] >= 0:
                left = node.visits[sequence.prefixes[t - 1]].left[:done]
                assert visit.left[:done][left].all(), "a row that had left is back"
            own |= {int(slot) for slot in visit.slots[: visit.done]} if t == 0 else set()
            own |= {int(slot) for slot in visit.slots[visit.owned]}
            assert {int(slot) for slot in visit.slots[: visit.done]} <= own
