"""A step of generation: the rows that it computes, laid out depth-first, and the sequences that receive its tokens.

A StepPlan collects rows for admitted sequences; `lay_out` turns it into a step. If the next step is the same again, a
RepeatedStep derives it from the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import numpy as np

from ...spec.requests import Namespace, Owner
from ...trie import MEDIA_BASE, SPAN_BASE, clear_of_span, span_starts
from ..cache import SCRATCH
from ..cache.tree import Node
from .steps import SlotStep


def repeat_rows(
    node: Node, rows: range, run: int, row_lists: Sequence[list[int]], key_lists: Sequence[list[int]]
) -> None:
    """Add rows of a node to a step a second time, and split the node's keys into single-key runs.

    Each repeated row then sees the keys up to its own. Later rows of the step see all keys.

    Args:
        run: Number of the first run of the node's keys.
        row_lists: Tokens, positions and slots of the step's rows.
        key_lists: Start, count, position, first and last of the step's key runs; runs from `run` on are replaced.
    """
    computed, query = node.num_computed, len(row_lists[0])
    row_lists[0].extend(np.asarray(node.tokens[rows.start : rows.stop]).tolist())
    row_lists[1].extend(range(node.start + rows.start, node.start + rows.stop))
    row_lists[2].extend([SCRATCH] * len(rows))
    first = query + np.clip(np.arange(computed) - rows.start, 0, len(rows))
    positions = range(node.start, node.start + computed)
    keys = (node.slots[:computed].tolist(), [1] * computed, positions, first.tolist(), [0] * computed)
    for numbers, more in zip(key_lists, keys, strict=True):
        numbers[run:] = more


def visible_runs(
    start: np.ndarray, count: np.ndarray, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the runs of keys that any row of the step sees.

    If only some rows of a node are repeated, no row may see the keys behind them.
    """
    is_seen = first < last
    return start[is_seen], count[is_seen], position[is_seen], first[is_seen], last[is_seen]


# Maps ids of image rows, int32 [n], to a bool [n]: True if the worker has the row and can put it into a step.
HoldsRows = Callable[[np.ndarray], np.ndarray]
NO_OWNER = Owner()
MOST_AHEAD = 32  # maximum number of repetitions of a step for which places are computed at once
N = TypeVar("N", bound=Any)  # a node class with a `parent`


class SequenceState:
    """The scheduler's state of a sequence: one sample of a request, from its arrival to its end.

    Attributes:
        key: The key of the request, as given to `submit`.
        sample: The number of the sample.
        limit: Maximum number of tokens to generate.
        reserve: Reserve slots for all these tokens at admission.
        priority: The priority of its rows in the cache.
        owner: The tenant and the class (interactive or batch).
        state: "waiting" for admission, "running", "ending" (its last token is in flight), or "ended".
        leaf: The node that ends with the prompt's last token.
        tail: The node of the generated tokens.
        cached_tokens: How many of the prompt's rows existed at admission; None before.
        ready: The prompt's rows are computed.
        num_known: How many of the tail's tokens are known. A token in flight is -1 - i for read i of its step.
    """

    __slots__ = (
        "cached_tokens", "key", "leaf", "limit", "num_known", "owner", "priority", "ready", "reserve", "sample",
        "state", "tail",
    )  # fmt: skip

    def __init__(
        self,
        key: Hashable,
        sample: int,
        leaf: Node,
        tokens: list[int],
        limit: int,
        reserve: bool,
        priority: int,
        owner: Owner = NO_OWNER,
    ):
        self.key = key
        self.sample = sample
        self.leaf = leaf
        self.limit = limit
        self.reserve = reserve
        self.priority = priority
        self.owner = owner
        self.state: Literal["waiting", "running", "ending", "ended"] = "waiting"
        self.cached_tokens: int | None = None
        self.ready = False
        self.num_known = len(tokens)
        self.tail = leaf.tail(tokens)
        self.tail.lost = bool(tokens)

    @property
    def unknown(self) -> int:
        """The number of its tokens in flight."""
        return len(self.tail.tokens) - self.num_known

    @property
    def tokens(self) -> list[int]:
        """The generated tokens; tokens in flight are -1 - i."""
        return self.tail.tokens


@dataclass(eq=False, slots=True)
class GenerateStep:
    """One forward pass, and its meaning for the sequences.

    Its rows are its queries. They are depth-first, so the rows below a node are consecutive.
    """

    message: SlotStep  # for the worker; the engine adds sampling and read-outs
    consumers: list[SequenceState]  # for each read of the message: the sequence that gets its token or values
    namespaces: list[tuple[Namespace, int, int]]  # (namespace, its first query, the query just past its last)
    computed_rows: list[tuple[Node, int]]  # (node, how many of its rows are computed)
    last_row: Mapping[Node, int]  # the last row in the step of each node with rows
    decode_rows: int  # rows that are the last token of a sequence
    recomputed_rows: int  # rows that had been computed before
    ids: np.ndarray | None = None  # the tokens of its consumers; None while they are in flight

    @property
    def num_rows(self) -> int:
        """The number of rows computed."""
        return len(self.message.tokens)


@dataclass(slots=True)
class StepPlan:
    """The rows of a step, as they are collected."""

    max_rows: int
    holds_rows: HoldsRows | None = None  # tells which image rows can be in the step; None: the model has no image input
    room: int = field(init=False)  # number of rows that may still be added
    computed_rows: dict[Node, int] = field(default_factory=dict)  # {node: number of its next rows in the step}
    # (sequence, node): the sequence gets a token from the last row of the node.
    reads: list[tuple[SequenceState, Node]] = field(default_factory=list)
    # Nodes with a last row that runs again only for its result, with the sequences that get a token from it.
    rereads: dict[Node, list[SequenceState]] = field(default_factory=dict)
    # Rows of a node that run again without writing K/V; the node's new rows follow them.
    repeats: dict[Node, range] = field(default_factory=dict)
    last_row: dict[Node, int] = field(default_factory=dict)  # set by `lay_out`: the last row of each node with rows
    decode_rows: int = 0  # rows that are the last token of a sequence

    def __post_init__(self) -> None:
        self.room = self.max_rows

    @property
    def num_rows(self) -> int:
        """The number of rows added."""
        return sum(self.computed_rows.values()) + len(self.rereads) + sum(map(len, self.repeats.values()))

    def fill(self, running: Collection[SequenceState]) -> None:
        """Add a row for each generating sequence, then prompt rows in sequence order, until the step is full.

        A span is added whole. If the first prompt's next span does not fit beside the generating sequences, it goes
        before all other rows. Image rows that the worker does not have are left out, and so are the rows after them.
        """
        begins_with_span = self.holds_rows is not None and self._add_span_first(running)
        for sequence in running:
            if sequence.ready:
                self._add_tail(sequence)
        for sequence in running:
            if not self.room and not begins_with_span:
                break
            if not sequence.ready:
                self._add_prompt(sequence)
                begins_with_span = False

    def _add_span_first(self, running: Collection[SequenceState]) -> bool:
        """Add the first unfinished prompt's next span, if generating sequences would leave too few rows for it.

        Return True if it was added.
        """
        first = next((sequence for sequence in running if not sequence.ready), None)
        node = None if first is None else next((node for node in first.leaf.path() if node.num_pending), None)
        if node is None or node.tokens[node.num_computed] < SPAN_BASE:
            return False
        rows = int(np.searchsorted(_starts(node, node.num_computed), 0, side="right"))
        generating = sum(sequence.tail.num_pending for sequence in running if sequence.ready)
        planned = self.num_rows
        if rows <= self.room - generating or (planned and rows > self.max_rows - planned):
            return False
        if self._num_available(node, node.num_computed, rows) < rows:
            return False
        self.computed_rows[node] = rows
        self.room = max(0, self.room - rows)
        return True

    def _num_available(self, node: Node, first: int, rows: int) -> int:
        """Return how many of `rows` rows of a node, from `first` on, can be computed.

        The count ends before the first image that the worker does not have.
        """
        assert self.holds_rows is not None
        tokens = np.asarray(node.tokens[first:])
        ids = tokens[:rows]
        media = np.flatnonzero(ids >= MEDIA_BASE)
        missing = media[~self.holds_rows(ids[media])] if len(media) else media
        return clear_of_span(tokens, int(missing[0]) if len(missing) else rows)

    def _add_tail(self, sequence: SequenceState) -> None:
        tail = sequence.tail
        rows = min(tail.num_pending, self.room)
        self.room -= rows
        if rows:
            self.computed_rows[tail] = rows
        if rows and rows == tail.num_pending:
            self.reads.append((sequence, tail))
            self.decode_rows += 1

    def _add_prompt(self, sequence: SequenceState) -> None:
        for node in sequence.leaf.path():
            planned = self.computed_rows.get(node, 0)
            missing = node.num_pending - planned
            if missing:
                rows = min(missing, self.room)
                if rows and self.holds_rows is not None:
                    rows = self._num_available(node, node.num_computed + planned, rows)
                if rows:
                    self.computed_rows[node] = planned + rows
                    self.room -= rows
                if rows < missing:
                    return
        if sequence.tail.tokens:  # it was preempted: the rows of its own tokens are recomputed
            self._add_tail(sequence)
        elif sequence.leaf in self.computed_rows:
            self.reads.append((sequence, sequence.leaf))
        elif sequence.leaf in self.rereads:
            self.rereads[sequence.leaf].append(sequence)
        elif self.room and (self.holds_rows is None or self._num_available(sequence.leaf, len(sequence.leaf) - 1, 1)):
            # All prompt rows exist, but not the result of the last row: that row runs again, only for its result.
            self.rereads[sequence.leaf] = [sequence]
            self.room -= 1


def _starts(node: Node, first: int) -> np.ndarray:
    """Return the first row of the span of each row from `first` on, or the row itself outside of spans.

    The result is counted from `first`, int64 [n].
    """
    starts = span_starts(np.asarray(node.tokens[first:]))
    return np.arange(len(node) - first) if starts is None else starts


def lay_out(plan: StepPlan) -> GenerateStep:
    """Return the step of a plan.

    Its rows are depth-first over the nodes with rows in the step and the nodes above them. Every run of keys
    (`SlotStep.run_*`) is visible to the queries below its node. So the stack has each node twice: first to add its keys
    and rows, and, after all nodes below it, to set the end of its queries.
    """
    roots, children = tree_above((*plan.computed_rows, *plan.rereads, *plan.repeats))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    start: list[int] = []
    count: list[int] = []
    position: list[int] = []
    first: list[int] = []
    last: list[int] = []
    last_row = plan.last_row
    namespaces = []
    for root in roots:
        first_query = len(tokens)
        stack: list[tuple[Node, range | None]] = [(root, None)]
        while stack:
            node, runs = stack.pop()
            if runs is not None:  # all nodes below have been added: the node's keys are visible up to here
                last[runs.start : runs.stop] = [len(tokens)] * len(runs)
                continue
            query, run = len(tokens), len(start)
            for slot, size, at in node.runs(node.num_computed):
                start.append(slot)
                count.append(size)
                position.append(at)
                first.append(query)
                last.append(0)
            if node in plan.repeats:
                lists = (tokens, positions, slots), (start, count, position, first, last)
                repeat_rows(node, plan.repeats[node], run, *lists)
                last_row[node] = len(tokens) - 1
                query = len(tokens)
            rows = plan.computed_rows.get(node, 0)
            if rows == 1:  # the row of a generating sequence; short arrays would be slower
                slot, at = int(node.slots[node.num_computed]), node.start + node.num_computed
                tokens.append(int(node.tokens[node.num_computed]))
                positions.append(at)
                slots.append(slot)
                start.append(slot)
                count.append(1)
                position.append(at)
                first.append(query)
                last.append(0)
                last_row[node] = query
            elif rows:
                from_row = node.num_computed
                row_slots = node.slots[from_row : from_row + rows].tolist()
                row_positions = range(node.start + from_row, node.start + from_row + rows)
                tokens.extend(np.asarray(node.tokens[from_row : from_row + rows]).tolist())
                positions.extend(row_positions)
                slots.extend(row_slots)
                start.extend(row_slots)
                count.extend([1] * rows)
                position.extend(row_positions)
                if plan.holds_rows is None:
                    first.extend(range(query, query + rows))
                else:  # a row of a span is visible from the span's first row on
                    first.extend((query + _starts(node, from_row)[:rows]).tolist())
                last.extend([0] * rows)
                last_row[node] = len(tokens) - 1
            if node in plan.rereads:
                last_row[node] = len(tokens)
                tokens.append(int(node.tokens[-1]))
                positions.append(node.stop - 1)
                slots.append(SCRATCH)
            stack.append((node, range(run, len(start))))
            stack.extend((child, None) for child in reversed(children.get(node, ())))
        namespaces.append((root.namespace, first_query, len(tokens)))
    reads = plan.reads + [(sequence, node) for node, sequences in plan.rereads.items() for sequence in sequences]
    rows_read = np.array([last_row[node] for _, node in reads], np.int64)
    read_rows, index = np.unique(rows_read, return_inverse=True)
    index = index.reshape(-1)
    order = np.argsort(index, kind="stable")
    arrays = (np.array(numbers, np.int64) for numbers in (start, count, position, first, last))
    runs = join_runs(*(visible_runs(*arrays) if plan.repeats else arrays))
    message = SlotStep(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int64), *runs, read_rows,
        index[order],
    )  # fmt: skip
    return GenerateStep(
        message,
        consumers=[reads[i][0] for i in order.tolist()],
        namespaces=namespaces,
        computed_rows=list(plan.computed_rows.items()),
        last_row=last_row,
        decode_rows=plan.decode_rows,
        recomputed_rows=plan.num_rows - sum(rows for node, rows in plan.computed_rows.items() if not node.lost),
    )


@dataclass(eq=False, slots=True)
class RepeatedStep:
    """A step of decode rows that can repeat, with each of its sequences one token further.

    Only the scheduler decides that the next step is a repetition, and records each repetition here. The generator and
    the worker see the decision in `SlotStep.follows`.
    """

    step: GenerateStep  # the last step: laid out, or a repetition
    ahead: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]] = ()  # positions, slots and run counts of repetitions
    next: int = 0  # number of the next repetition in `ahead`

    @classmethod
    def of(cls, step: GenerateStep) -> Self | None:
        """Return the RepeatedStep of a step that was laid out; None if the step has other rows than decode rows."""
        is_decode = step.decode_rows == len(step.computed_rows) == step.num_rows and not step.recomputed_rows
        return cls(step) if is_decode else None

    def again(self) -> GenerateStep | None:
        """Return the next repetition, equal to the step of `lay_out`.

        Return None if the next slot of a sequence is not directly after its last slot. The sequences must have run in
        every step since the previous one. Computed places stay in `ahead` even if the repetition never starts, because
        slots of running sequences do not move.
        """
        step = self.step
        last, sequences, ids = step.message, step.consumers, step.ids
        if self.next == len(self.ahead):
            steps = np.arange(1, 1 + min(MOST_AHEAD, *[sequence.tail.neighbours for sequence in sequences]))[:, None]
            if not len(steps):
                return None
            grows = np.isin(last.run_start + last.run_count, last.slots + 1)
            positions, slots = last.positions + steps.astype(np.int32), last.slots + steps
            self.ahead, self.next = list(zip(positions, slots, last.run_count + grows * steps, strict=True)), 0
        tokens = np.array([sequence.tail.tokens[-1] for sequence in sequences], np.int32) if ids is None else ids
        positions, slots, counts = self.ahead[self.next]
        message = SlotStep(
            tokens, positions, slots, last.run_start, counts, last.run_position, last.run_first, last.run_last,
            last.read_rows, last.reads, state_reads=last.state_reads, follows=True,
        )  # fmt: skip
        return GenerateStep(
            message, sequences, step.namespaces, step.computed_rows, step.last_row, len(sequences), recomputed_rows=0
        )


def join_runs(
    start: np.ndarray, count: np.ndarray, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Join runs of keys with neighbouring slots that the same queries see; return the joined runs.

    The nodes of a path without branches in the step form such runs. Joined, they give bit-equal results however the
    path is split into nodes.
    """
    if len(start) < 2:
        return start, count, position, first, last
    follows = (start[:-1] + count[:-1] == start[1:]) & (position[:-1] + count[:-1] == position[1:])
    follows &= (first[:-1] == first[1:]) & (last[:-1] == last[1:])
    heads = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return start[heads], np.add.reduceat(count, heads), position[heads], first[heads], last[heads]


def tree_above(nodes: Iterable[N]) -> tuple[list[N], dict[N, list[N]]]:
    """Return the roots above the nodes, and, for each node above them, its children that lead to one of the nodes."""
    roots: list[N] = []
    children: dict[N, list[N]] = {}
    visited: set[N] = set()
    for node in nodes:
        while node not in visited:
            visited.add(node)
            parent = node.parent
            if parent is None:
                roots.append(node)
                break
            children.setdefault(parent, []).append(node)
            node = parent
    return roots, children
