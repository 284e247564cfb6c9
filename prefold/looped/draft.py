"""A step of rows that go through blocks a visit at a time: which rows, laid out depth-first, and who takes what.

Who runs, and which block the step visits, is settled before, by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

from ..cache.tree import Node
from ..schedule.generate_step import Running, joined
from .cache import NodeVisit, Prefix
from .sequence import Routed
from .steps import PRELUDE, Routing, VisitStep


@dataclass(frozen=True, slots=True)
class Take:
    """A Take is some rows of a node that a step brings to a visit: the next `rows` that are not settled.

    sequence  the first that needs them
    t         which visit of its route
    """

    sequence: Routed
    t: int
    rows: int


@dataclass(slots=True)
class VisitDraft:
    """A VisitDraft is what a step will compute, while that is being decided.

    most      the most rows of the step
    add       adds rows of sequences to a draft
    unit      the block that it visits, PRELUDE or CODA; None: it only reads or routes
    left      how many more rows the step may have
    group     which sequences it has rows of, as their block or their template and visit
    takes     the rows, by what they are of
    reads     (sequence, what its last row has at this visit, whether its route ends here): the sequence takes a token
              if it does, or the row leaves
    finished  (sequence, slot): the sequence takes a token from the state in the slot
    routings  sequences whose router is asked how their route goes on
    """

    most: int
    add: Callable[[VisitDraft, Collection[Running]], None]
    unit: int | None = None
    left: int = field(init=False)
    group: Hashable = None
    takes: dict[NodeVisit, Take] = field(default_factory=dict)
    reads: list[tuple[Routed, NodeVisit, bool]] = field(default_factory=list)
    finished: list[tuple[Routed, int]] = field(default_factory=list)
    routings: list[Routed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.most

    @property
    def num_taken(self) -> int:
        """Returns how many rows were added."""
        return sum(take.rows for take in self.takes.values())

    def fill(self, running: Collection[Running]) -> None:
        """Adds rows of these sequences, while there is room."""
        self.add(self, running)

    @property
    def is_empty(self) -> bool:
        """Returns whether the step would do nothing."""
        return not (self.takes or self.finished or self.routings)


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """A RoutedStep is one visit of some rows to a block, and what it means for the sequences that run.

    message      what the worker is given; the engine adds how tokens are chosen, and which reads give numbers
    takers       the sequence that takes what each of the message's reads gives, if it is made
    visits       the visit of each taker's row
    namespaces   (namespace, its first query, the query behind its last) of each group of rows
    projects     the namespace of each row that is projected
    takes        (what the rows are of, Take, the query of each row: -1 where it had left)
    routed       the sequences whose router is asked
    decode_rows  how many of its rows are the last token of a sequence, at their first visit
    """

    message: VisitStep
    takers: list[Routed]
    visits: list[int]
    namespaces: list[tuple[tuple[Hashable, ...], int, int]]
    projects: list[tuple[Hashable, ...]]
    takes: list[tuple[NodeVisit, Take, np.ndarray]]
    routed: list[Routed]
    decode_rows: int

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the block."""
        return self.message.num_rows

    @property
    def first_rows(self) -> int:
        """Returns how many of its rows are at their first visit."""
        return int(np.count_nonzero(self.message.source == 0))


class _Rows:
    """The rows and runs of a step while they are laid out.

    rows     of each query its token, position, source, given, slot and leaves, as of VisitStep
    runs     of each run its start, count, position and first query; last: the query behind its last
    queries  of what the rows are of, the query of each row: -1 where it had left
    """

    def __init__(self) -> None:
        self.rows: list[Sequence[int]] = []
        self.criteria: list[tuple[float, float]] = []
        self.runs: list[Sequence[int]] = []
        self.last: list[int] = []
        self.project: list[Sequence[int]] = []
        self.project_of: list[tuple[Hashable, ...]] = []
        self.queries: dict[NodeVisit, np.ndarray] = {}

    def add_settled(self, visit: NodeVisit) -> None:
        self.runs.extend(zip(visit.starts, visit.counts, visit.positions, repeat(len(self.rows))))

    def add_one(self, visit: NodeVisit, take: Take) -> bool:
        """Adds a row that goes on, as decode rows do: what `add` does, without arrays. Returns whether it is one."""
        node, sequence, first = visit.node, take.sequence, visit.done
        source = given = 0
        if take.t:
            before = node.visits[sequence.prefixes[take.t - 1]]
            if before.left[first]:
                return False
            source = int(before.slots[first])
            if sequence.route[0] == PRELUDE:
                given = int(node.visits[sequence.prefixes[0]].slots[first])
        query, position, slot = len(self.rows), node.start + first, int(visit.slots[first])
        leaves, criteria = sequence.leaving(range(position, position + 1), take.t)
        self.rows.append((int(node.tokens[first]), position, source, given, slot, leaves[0]))
        self.criteria.append(criteria)
        self.runs.append((slot, 1, position, query))
        self.queries[visit] = np.array([query])
        return True

    def add(self, visit: NodeVisit, take: Take) -> None:
        if take.rows == 1 and self.add_one(visit, take):
            return
        node, sequence, first, count = visit.node, take.sequence, visit.done, take.rows
        rows, base = slice(first, first + count), len(self.rows)
        left, slots, given = sequence.has_left(node, take.t, rows), visit.slots[rows], np.zeros(count, np.int64)
        own = np.ones(count, bool) if left is None else ~left
        states = sequence.state_slots(node, take.t, rows)
        if sequence.route[0] == PRELUDE and take.t:
            given = node.visits[sequence.prefixes[0]].slots[rows]
        positions = np.arange(node.start + first, node.start + rows.stop)
        leaves, criteria = sequence.leaving(range(node.start + first, node.start + rows.stop), take.t)
        columns = (np.asarray(node.tokens[rows], np.int64), positions, states, given, slots, np.array(leaves))
        self.rows += np.stack(columns, 1)[own].tolist()
        self.criteria += [criteria] * (len(self.rows) - base)
        # A row that is computed is seen from its own query on, another from the next.
        number = base + np.cumsum(own)
        self.runs += np.stack((slots, np.ones_like(slots), positions, number - own), 1).tolist()
        self.queries[visit] = np.where(own, number - 1, -1)
        made = np.flatnonzero(~own & visit.owned[rows])
        self.project += np.stack((slots, states, given, positions), 1)[made].tolist()
        self.project_of += [sequence.namespace] * len(made)


def lay_out(draft: VisitDraft) -> RoutedStep:
    """Returns the step of a draft: its rows depth-first, those of one route prefix side by side."""
    out, namespaces = _Rows(), []
    tops, below = _marked(draft)
    stack: list[tuple[NodeVisit, range | None]] = []
    for top in tops:
        first_query = len(out.rows)
        stack.append((top, None))
        while stack:
            visit, runs = stack.pop()
            if runs is not None:
                out.last[runs.start : runs.stop] = [len(out.rows)] * len(runs)
                continue
            before = len(out.runs)
            out.add_settled(visit)
            if visit in draft.takes:
                out.add(visit, draft.takes[visit])
            out.last += [0] * (len(out.runs) - before)
            stack.append((visit, range(before, len(out.runs))))
            stack.extend((child, None) for child in reversed(below.get(visit, ())))
        if len(out.rows) > first_query:
            root = top.node.parent
            assert root is not None
            namespaces.append((root.namespace, first_query, len(out.rows)))
    return _step(draft, out, namespaces)  # type: ignore[arg-type]


def _step(draft: VisitDraft, out: _Rows, namespaces: list[tuple[tuple[Hashable, ...], int, int]]) -> RoutedStep:
    columns = [*_columns(out.runs, 4), np.array(out.last, np.int64)]
    seen = columns[4] > columns[3]
    runs = joined(*(numbers[seen] for numbers in columns))
    tokens, positions, source, given, slots, leaves = _columns(out.rows, 6)
    project = _columns(out.project, 4)
    reads: list[tuple[int, int, Routed]] = []  # (slot, row, taker)
    for sequence, visit, ends in draft.reads:
        row = int(out.queries[visit][-1])
        reads.append((int(slots[row]), -1 if ends else row, sequence))
    reads += [(slot, -1, sequence) for sequence, slot in draft.finished]
    reads.sort(key=lambda read: read[:2])
    read_slots, first, index = np.unique(
        np.array([slot for slot, _, _ in reads], np.int64), return_index=True, return_inverse=True
    )
    message = VisitStep(
        block=draft.unit if draft.unit is not None else 0,
        tokens=tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        source=source,
        given=given,
        slots=slots,
        leaves=leaves.astype(np.int8),
        criteria=np.array(out.criteria, np.float64).reshape(-1, 2),
        run_start=runs[0], run_count=runs[1], run_position=runs[2], run_first=runs[3], run_last=runs[4],
        project_slots=project[0], project_sources=project[1], project_given=project[2], project_positions=project[3],
        read_slots=read_slots,
        read_rows=np.array([reads[i][1] for i in first.tolist()], np.int64),
        reads=index.reshape(-1).astype(np.int64),
        routings=_routings(draft.routings),
    )  # fmt: skip
    takers = [sequence for _, _, sequence in reads]
    return RoutedStep(
        message,
        takers=takers,
        visits=[sequence.visit for sequence in takers],
        namespaces=namespaces,
        projects=out.project_of,
        takes=[(visit, take, out.queries[visit]) for visit, take in draft.takes.items()],
        routed=sorted(draft.routings, key=lambda sequence: len(sequence.route)),
        decode_rows=sum(take.rows for take in draft.takes.values() if take.sequence.ready and not take.t),
    )


def _columns(table: list[Sequence[int]], columns: int) -> np.ndarray:
    """Returns a list of rows as one array a column, int64 [columns, rows]."""
    flat = np.fromiter(chain.from_iterable(table), np.int64, columns * len(table))
    return np.ascontiguousarray(flat.reshape(-1, columns).T)


def _routings(sequences: Sequence[Routed]) -> tuple[Routing, ...]:
    """Returns what the router is asked for these sequences, those that made equally many visits together."""
    found = []
    for step in sorted({len(sequence.route) for sequence in sequences}):
        some = [sequence for sequence in sequences if len(sequence.route) == step]
        paths = [sequence.leaf.path() for sequence in some]
        sizes = [sequence.leaf.stop for sequence in some]
        tokens, slots = np.empty(0, np.int32), np.empty(0, np.int64)
        if step:
            slots = np.concatenate(
                [
                    node.visits[sequence.prefixes[-1]].slots[: len(node)]  # type: ignore[attr-defined]
                    for sequence, path in zip(some, paths, strict=True)
                    for node in path
                ]
            )
        else:
            tokens = np.concatenate([np.asarray(node.tokens, np.int32) for path in paths for node in path])
        made = step - (some[0].route[:1] == [PRELUDE])
        fewest = np.array([sequence.exits.min_visits for sequence in some], np.int64)
        found.append(Routing(np.concatenate(([0], np.cumsum(sizes))), slots, tokens, made, fewest))
    return tuple(found)


def _marked(draft: VisitDraft) -> tuple[list[NodeVisit], dict[NodeVisit, list[NodeVisit]]]:
    """Returns what the topmost nodes above the step's rows have at its visits, and below each of them what leads to
    such rows."""
    tops: dict[tuple[Node, Prefix], list[NodeVisit]] = {}
    below: dict[NodeVisit, list[NodeVisit]] = {}
    seen: set[NodeVisit] = set()
    for visit in draft.takes:
        while visit not in seen:
            seen.add(visit)
            above = visit.above
            if above is None:
                root = visit.node.parent
                assert root is not None
                tops.setdefault((root, visit.prefix), []).append(visit)
                break
            below.setdefault(above, []).append(visit)
            visit = above
    return [visit for some in tops.values() for visit in some], below
