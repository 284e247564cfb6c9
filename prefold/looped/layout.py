"""The message of a step whose rows go through blocks a visit at a time, and the sequences that take its results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..cache.tree import Node
from ..schedule.generate_step import join_runs, tree_above
from .cache import NodeVisit, Prefix
from .decode import DecodeRows, Decoding
from .draft import Take, VisitDraft
from .sequence import LoopedSequence
from .steps import PRELUDE, Routing, VisitStep


@dataclass(frozen=True, eq=False, slots=True)
class VisitPlan:
    """A VisitPlan holds the message of a step, which takes rows through one visit or several, and its consumers.

    Rows of prompts come first, depth-first; then those of sequences that generate.

    message      the message for the worker; the engine adds how tokens are chosen, and which reads give numbers
    consumers    the sequence that takes the result of each of the message's reads, if it is made: prompts' reads first
    prompts      how many of the consumers take reads of prompts
    namespaces   (namespace, its first query, the query behind its last) of each group of rows
    projects     the namespace of each row that is projected
    takes        (visit of a prompt's node, Take, the query of each row: -1 where it had left)
    routed       the sequences whose router is asked
    decode       the rows of sequences that generate; None: there are none
    """

    message: VisitStep
    consumers: list[LoopedSequence]
    prompts: int
    namespaces: list[tuple[tuple[Hashable, ...], int, int]]
    projects: list[tuple[Hashable, ...]]
    takes: list[tuple[NodeVisit, Take, np.ndarray]]
    routed: list[LoopedSequence]
    decode: DecodeRows | None

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through blocks, at most: one that makes several visits counts at each."""
        return self.message.num_rows

    @property
    def prompt_rows(self) -> int:
        """Returns how many of its queries are rows of prompts."""
        return self.num_rows - (0 if self.decode is None else len(self.decode.rows))

    @property
    def first_rows(self) -> int:
        """Returns how many of its rows begin with their first visit."""
        return int(np.count_nonzero(self.message.source == 0))

    @property
    def decode_rows(self) -> int:
        """Returns how many of its rows are the last token of a sequence and begin with their first visit."""
        return 0 if self.decode is None else int(np.count_nonzero(self.decode.at == 0))


class _Rows:
    """The rows and runs of a step while they are laid out.

    rows     of each query its token, position, source, prelude, slot and leaves, as of VisitStep
    runs     of each run its start, count, position and first query; last: the query behind its last
    queries  by the visit of a node, the query of each of its rows: -1 where it had left
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
        self.runs.extend((*run, len(self.rows)) for run in visit.runs)

    def add(self, visit: NodeVisit, take: Take) -> None:
        node, sequence, first, count = visit.node, take.sequence, visit.num_settled, take.rows
        rows, base = slice(first, first + count), len(self.rows)
        has_left, slots, prelude = sequence.has_left(node, take.t, rows), visit.slots[rows], np.zeros(count, np.int64)
        is_query = np.ones(count, bool) if has_left is None else ~has_left
        states = sequence.state_slots(node, take.t, rows)
        if sequence.route[0] == PRELUDE and take.t:
            prelude = node.visits[sequence.prefixes[0]].slots[rows]
        positions = np.arange(node.start + first, node.start + rows.stop)
        leaves, criteria = sequence.leaving(range(node.start + first, node.start + rows.stop), take.t)
        columns = (np.asarray(node.tokens[rows], np.int64), positions, states, prelude, slots, leaves)
        self.rows += np.stack(columns, 1)[is_query].tolist()
        self.criteria += [criteria] * (len(self.rows) - base)
        # A row that is computed is seen from its own query on, another from the next.
        number = base + np.cumsum(is_query)
        self.runs += np.stack((slots, np.ones_like(slots), positions, number - is_query), 1).tolist()
        self.queries[visit] = np.where(is_query, number - 1, -1)
        projected = np.flatnonzero(~is_query & visit.owns_slot[rows])
        self.project += np.stack((slots, states, prelude, positions), 1)[projected].tolist()
        self.project_of += [sequence.namespace] * len(projected)


def lay_out(draft: VisitDraft, decoding: Decoding) -> VisitPlan:
    """Returns the VisitPlan of a draft; changes nothing."""
    out, namespaces = _depth_first(draft)
    columns, consumers = _of_prompts(draft, out)
    prompts, projects, rounds = len(consumers), list(out.project_of), None
    if (decode := draft.decode) is not None:
        first, sequences = len(out.rows), decode.batch.sequences
        more, rounds = decoding.lay_out(decode, first)
        more["reads"] += len(columns["read_slots"])
        columns = {name: np.concatenate((column, more[name])) for name, column in columns.items()}
        consumers += [sequences[number] for number in decode.members[decode.reads].tolist()]
        projects += [sequences[number].namespace for number in decode.late_members[decode.projected].tolist()]
        queries = decode.members[decode.rows].tolist()
        namespaces += [(sequences[number].namespace, i, i + 1) for i, number in enumerate(queries, first)]
    return VisitPlan(
        VisitStep(block=draft.unit or 0, routings=_routings(draft.routings), rounds=rounds, **columns),
        consumers=consumers,
        prompts=prompts,
        namespaces=namespaces,
        projects=projects,
        takes=[(visit, take, out.queries[visit]) for visit, take in draft.takes.items()],
        routed=sorted(draft.routings, key=lambda sequence: len(sequence.route)),
        decode=decode,
    )


def _depth_first(draft: VisitDraft) -> tuple[_Rows, list[tuple[tuple[Hashable, ...], int, int]]]:
    """Returns the rows of prompts, depth-first and those of one route prefix side by side, and their namespaces, as of
    VisitPlan."""
    out, namespaces = _Rows(), []
    tops, below = tree_above(draft.takes)
    groups: dict[tuple[Node, Prefix], list[NodeVisit]] = {}
    for top in tops:
        groups.setdefault((top.root, top.prefix), []).append(top)
    stack: list[tuple[NodeVisit, range | None]] = []
    for top in chain.from_iterable(groups.values()):
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
            namespaces.append((top.root.namespace, first_query, len(out.rows)))
    return out, namespaces  # type: ignore[return-value]


def _of_prompts(draft: VisitDraft, out: _Rows) -> tuple[dict[str, np.ndarray], list[LoopedSequence]]:
    """Returns the fields of a VisitStep of the rows of prompts, and the sequences that take the results of reads."""
    runs = [*_columns(out.runs, 4), np.array(out.last, np.int64)]
    visible = runs[4] > runs[3]
    runs = join_runs(*(numbers[visible] for numbers in runs))
    tokens, positions, source, prelude, slots, leaves = _columns(out.rows, 6)
    project = _columns(out.project, 4)
    reads = [(int(slots[out.queries[visit][-1]]), sequence) for sequence, visit in draft.reads]
    reads += [(slot, sequence) for sequence, slot in draft.finished]
    reads.sort(key=lambda read: read[0])
    read_slots, index = np.unique(np.array([slot for slot, _ in reads], np.int64), return_inverse=True)
    columns = {
        "tokens": tokens.astype(np.int32),
        "positions": positions.astype(np.int32),
        "source": source,
        "preludes": prelude,
        "slots": slots,
        "leaves": leaves.astype(np.int8),
        "criteria": np.array(out.criteria, np.float64).reshape(-1, 2),
        "run_start": runs[0], "run_count": runs[1], "run_position": runs[2], "run_first": runs[3], "run_last": runs[4],
        "project_slots": project[0], "project_sources": project[1], "project_preludes": project[2],
        "project_positions": project[3],
        "read_slots": read_slots,
        "read_rows": np.full(len(read_slots), -1),
        "reads": index.reshape(-1).astype(np.int64),
    }  # fmt: skip
    return columns, [sequence for _, sequence in reads]


def _columns(table: list[Sequence[int]], columns: int) -> np.ndarray:
    """Returns a list of rows as one array a column, int64 [columns, rows]."""
    flat = np.fromiter(chain.from_iterable(table), np.int64, columns * len(table))
    return np.ascontiguousarray(flat.reshape(-1, columns).T)


def _routings(sequences: Sequence[LoopedSequence]) -> tuple[Routing, ...]:
    """Returns the Routings that ask the router about these sequences, one for each number of visits made."""
    routings = []
    for step in sorted({len(sequence.route) for sequence in sequences}):
        group = [sequence for sequence in sequences if len(sequence.route) == step]
        paths = [sequence.leaf.path() for sequence in group]
        sizes = [sequence.leaf.stop for sequence in group]
        tokens, slots = np.empty(0, np.int32), np.empty(0, np.int64)
        if step:
            slots = np.concatenate(
                [
                    node.visits[sequence.prefixes[-1]].slots[: len(node)]  # type: ignore[attr-defined]
                    for sequence, path in zip(group, paths, strict=True)
                    for node in path
                ]
            )
        else:
            tokens = np.concatenate([np.asarray(node.tokens, np.int32) for path in paths for node in path])
        num_visits = step - (group[0].route[:1] == [PRELUDE])
        fewest = np.array([sequence.exits.min_visits for sequence in group], np.int64)
        routings.append(Routing(np.concatenate(([0], np.cumsum(sizes))), slots, tokens, num_visits, fewest))
    return tuple(routings)
