"""A generation step: which rows, laid out depth-first, and who takes a token from them.

Who runs is settled before, by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from ..cache import SCRATCH
from ..cache.tree import Node
from ..prefix import MEDIA_BASE, SPAN_BASE, clear_of_span, span_starts
from ..types import Owner
from .steps import SlotStep

# Returns which rows of images, by their ids int32 [n], the worker holds and can put into a step: bool [n].
Held = Callable[[np.ndarray], np.ndarray]
NOBODY = Owner()
N = TypeVar("N", bound=Any)  # of nodes, each of which has a parent


class Running:
    """A Running is one sample of a request, from its arrival to its end: a sequence.

    key, sample    the key of the request, as `submit` was given it, and which of its samples this is
    limit          how many tokens it may make
    reserve        whether room for all of these is set aside when it is admitted
    owner          for whom it runs
    route          the blocks of a looped model that its rows visit; None: as the model's order says
    leaf           the node that ends with the prompt
    tail           the node of the tokens that it makes
    cached_tokens  how many of the prompt's rows were there when it was admitted; None before
    ready          whether the prompt's rows are computed
    known          how many of its tokens are known; those behind them are still to come, and each is held as -1 - i:
                   the i-th read of the step that brings it
    """

    __slots__ = (
        "cached_tokens", "key", "known", "leaf", "limit", "owner", "priority", "ready", "reserve", "route", "sample",
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
        owner: Owner = NOBODY,
        route: tuple[int, ...] | None = None,
    ):
        self.key = key
        self.sample = sample
        self.leaf = leaf
        self.limit = limit
        self.reserve = reserve
        self.priority = priority
        self.owner = owner
        self.route = route
        self.state: Literal["waiting", "running", "ending", "ended"] = "waiting"
        self.cached_tokens: int | None = None
        self.ready = False
        self.known = len(tokens)
        self.tail = Node(leaf, tokens, leaf.stop)
        self.tail.lost = bool(tokens)

    @property
    def unknown(self) -> int:
        """Returns how many of its tokens are still to come from steps that have begun."""
        return len(self.tail.tokens) - self.known

    @property
    def tokens(self) -> list[int]:
        """Returns the tokens that it has made, and those that are still to come as -1 - i."""
        return self.tail.tokens


@dataclass(frozen=True, slots=True)
class GenerateStep:
    """A GenerateStep is one forward pass, and what it means for the sequences that run.

    Its rows are its queries and lie depth-first: those below one node lie side by side.

    message      what the worker is given; the engine adds how tokens are chosen, and which reads give numbers
    takers       the sequence that takes what each of the message's reads gives
    namespaces   (namespace, its first query, the query behind its last) of each namespace
    takes        (node, how many of its rows are computed here)
    decode_rows  how many of its rows are the last token of a sequence
    again        how many of its rows had been computed before
    growth       where it follows another: 1 for each run that grows by a row in the next step, 0 for others, int64 [r],
                 and for how many steps that goes on
    """

    message: SlotStep
    takers: list[Running]
    namespaces: list[tuple[tuple[Hashable, ...], int, int]]
    takes: list[tuple[Node, int]]
    decode_rows: int
    again: int
    growth: tuple[np.ndarray, int] | None = None

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the model."""
        return self.message.num_rows

    @property
    def first_rows(self) -> int:
        """Returns how many of its rows come into the model: all."""
        return self.message.num_rows


@dataclass(slots=True)
class Draft:
    """A Draft is what a step will compute, while that is being decided.

    most         the most rows of the step
    held         which rows of images can be in it; None: there are no images
    left         how many more rows may be added
    takes        how many of each node's next rows are computed
    reads        (sequence, node): the sequence takes a token from the last row of the node
    again        nodes whose last row is computed once more, only for its result, and the sequences that take a token
                 from it
    decode_rows  how many of its rows are the last token of a sequence
    """

    most: int
    held: Held | None = None
    left: int = field(init=False)
    takes: dict[Node, int] = field(default_factory=dict)
    reads: list[tuple[Running, Node]] = field(default_factory=list)
    again: dict[Node, list[Running]] = field(default_factory=dict)
    decode_rows: int = 0

    def __post_init__(self) -> None:
        self.left = self.most

    @property
    def num_taken(self) -> int:
        """Returns how many rows were added."""
        return sum(self.takes.values()) + len(self.again)

    def fill(self, running: Collection[Running]) -> None:
        """Adds a row for each of these sequences that generates, then rows of prompts, in the order of the sequences,
        while there is room.

        A span is taken whole. One that has no room beside the sequences that generate comes before these, once it is
        the first of all that wait. Rows of images that are not held are not taken, nor rows behind them.
        """
        opens = self.held is not None and self._open(running)
        for sequence in running:
            if sequence.ready:
                self._read_tail(sequence)
        for sequence in running:
            if not self.left and not opens:
                break
            if not sequence.ready:
                self._read_prompt(sequence)
                opens = False

    def _open(self, running: Collection[Running]) -> bool:
        """Takes the span that the first sequence with a prompt to compute goes on with, where it is too long for the
        room that sequences that generate would leave, and returns whether it did."""
        first = next((sequence for sequence in running if not sequence.ready), None)
        node = None if first is None else next((node for node in first.leaf.path() if node.pending), None)
        if node is None or node.tokens[node.computed] < SPAN_BASE:
            return False
        rows = int(np.searchsorted(_starts(node, node.computed), 0, side="right"))
        generating = sum(sequence.tail.pending for sequence in running if sequence.ready)
        taken = self.num_taken
        if rows <= self.left - generating or (taken and rows > self.most - taken):
            return False
        if self._ready(node, node.computed, rows) < rows:
            return False
        self.takes[node] = rows
        self.left = max(0, self.left - rows)
        return True

    def _ready(self, node: Node, first: int, rows: int) -> int:
        """Returns how many of the `rows` rows of a node from `first` on may be taken."""
        assert self.held is not None
        tokens = np.asarray(node.tokens[first:])
        ids = tokens[:rows]
        images = np.flatnonzero(ids >= MEDIA_BASE)
        missing = images[~self.held(ids[images])] if len(images) else images
        return clear_of_span(tokens, int(missing[0]) if len(missing) else rows)

    def _read_tail(self, sequence: Running) -> None:
        tail = sequence.tail
        rows = min(tail.pending, self.left)
        self.left -= rows
        if rows:
            self.takes[tail] = rows
        if rows and rows == tail.pending:
            self.reads.append((sequence, tail))
            self.decode_rows += 1

    def _read_prompt(self, sequence: Running) -> None:
        for node in sequence.leaf.path():
            taken = self.takes.get(node, 0)
            missing = node.pending - taken
            if missing:
                rows = min(missing, self.left)
                if rows and self.held is not None:
                    rows = self._ready(node, node.computed + taken, rows)
                if rows:
                    self.takes[node] = taken + rows
                    self.left -= rows
                if rows < missing:
                    return
        if sequence.tail.tokens:  # it was preempted: its own tokens' rows once more
            self._read_tail(sequence)
        elif sequence.leaf in self.takes:
            self.reads.append((sequence, sequence.leaf))
        elif sequence.leaf in self.again:
            self.again[sequence.leaf].append(sequence)
        elif self.left and (self.held is None or self._ready(sequence.leaf, len(sequence.leaf) - 1, 1)):
            # All its rows are there, but what the last one gave is gone: that row runs again, for its result only.
            self.again[sequence.leaf] = [sequence]
            self.left -= 1


def _starts(node: Node, first: int) -> np.ndarray:
    """Returns of each row of a node from `first` on the first row of its span, or the row itself, counted from
    `first`."""
    starts = span_starts(np.asarray(node.tokens[first:]))
    return np.arange(len(node) - first) if starts is None else starts


def lay_out(draft: Draft) -> GenerateStep:
    """Returns the step of a draft: its rows depth-first over the nodes that have some, or lie above such a node."""
    roots, children = marked((*draft.takes, *draft.again))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    start: list[int] = []
    count: list[int] = []
    position: list[int] = []
    first: list[int] = []
    last: list[int] = []
    last_row: dict[Node, int] = {}
    namespaces = []
    for root in roots:
        first_query = len(tokens)
        stack: list[tuple[Node, range | None]] = [(root, None)]
        while stack:
            node, runs = stack.pop()
            if runs is not None:  # everything below the node is done: its keys are visible up to here
                last[runs.start : runs.stop] = [len(tokens)] * len(runs)
                continue
            query, run = len(tokens), len(start)
            for slot, size, at in node.runs(node.computed):
                start.append(slot)
                count.append(size)
                position.append(at)
                first.append(query)
                last.append(0)
            rows = draft.takes.get(node, 0)
            if rows == 1:  # as for a sequence that generates: without the cost of short arrays
                slot, at = int(node.slots[node.computed]), node.start + node.computed
                tokens.append(int(node.tokens[node.computed]))
                positions.append(at)
                slots.append(slot)
                start.append(slot)
                count.append(1)
                position.append(at)
                first.append(query)
                last.append(0)
                last_row[node] = query
            elif rows:
                done = node.computed
                row_slots = node.slots[done : done + rows].tolist()
                row_positions = range(node.start + done, node.start + done + rows)
                tokens.extend(np.asarray(node.tokens[done : done + rows]).tolist())
                positions.extend(row_positions)
                slots.extend(row_slots)
                start.extend(row_slots)
                count.extend([1] * rows)
                position.extend(row_positions)
                if draft.held is None:
                    first.extend(range(query, query + rows))
                else:  # rows of a span are seen from its first row on
                    first.extend((query + _starts(node, done)[:rows]).tolist())
                last.extend([0] * rows)
                last_row[node] = len(tokens) - 1
            if node in draft.again:
                last_row[node] = len(tokens)
                tokens.append(int(node.tokens[-1]))
                positions.append(node.stop - 1)
                slots.append(SCRATCH)
            stack.append((node, range(run, len(start))))
            stack.extend((child, None) for child in reversed(children.get(node, ())))
        namespaces.append((root.namespace, first_query, len(tokens)))
    reads = draft.reads + [(sequence, node) for node, sequences in draft.again.items() for sequence in sequences]
    rows_read = np.array([last_row[node] for _, node in reads], np.int64)
    read_rows, index = np.unique(rows_read, return_inverse=True)
    index = index.reshape(-1)
    order = np.argsort(index, kind="stable")
    runs = joined(*(np.array(numbers, np.int64) for numbers in (start, count, position, first, last)))
    message = SlotStep(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int64), *runs, read_rows,
        index[order],
    )  # fmt: skip
    return GenerateStep(
        message,
        takers=[reads[i][0] for i in order.tolist()],
        namespaces=namespaces,
        takes=list(draft.takes.items()),
        decode_rows=draft.decode_rows,
        again=len(draft.again) + sum(rows for node, rows in draft.takes.items() if node.lost),
    )


def following(before: GenerateStep, draft: Draft) -> GenerateStep | None:
    """Returns what `lay_out` does of the draft of a step that follows one that has begun, where it has one more row of
    the same sequences, and nothing else; else None. The sequences have run since without a break."""
    last, takers = before.message, before.takers
    if before.again or draft.again or not before.decode_rows == len(before.takes) == before.num_rows:
        return None
    if list(draft.takes.items()) != before.takes:
        return None
    if before.growth is None:
        grows = np.isin(last.run_start + last.run_count, last.slots + 1).astype(np.int64)
        left = min(sequence.tail.neighbours for sequence in takers)
    else:
        grows, left = before.growth
    if not left:
        return None
    message = SlotStep(
        np.array([sequence.tail.tokens[-1] for sequence in takers], np.int32), last.positions + 1, last.slots + 1,
        last.run_start, last.run_count + grows, last.run_position, last.run_first, last.run_last, last.read_rows,
        last.reads, follows=True,
    )  # fmt: skip
    growth = grows, left - 1
    return GenerateStep(message, takers, before.namespaces, before.takes, before.decode_rows, 0, growth)


def joined(
    start: np.ndarray, count: np.ndarray, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns the runs, where neighbours that lie side by side and are seen by the same queries are one.

    Such are the nodes of a path of which the step has one branch only. Joined, they give the same result to the last
    bit however the path is split into nodes.
    """
    if len(start) < 2:
        return start, count, position, first, last
    follows = (start[:-1] + count[:-1] == start[1:]) & (position[:-1] + count[:-1] == position[1:])
    follows &= (first[:-1] == first[1:]) & (last[:-1] == last[1:])
    heads = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return start[heads], np.add.reduceat(count, heads), position[heads], first[heads], last[heads]


def marked(nodes: Iterable[N]) -> tuple[list[N], dict[N, list[N]]]:
    """Returns the roots above nodes, and of every node above one the children that lead to such nodes."""
    roots: list[N] = []
    children: dict[N, list[N]] = {}
    seen: set[N] = set()
    for node in nodes:
        while node not in seen:
            seen.add(node)
            parent = node.parent
            if parent is None:
                roots.append(node)
                break
            children.setdefault(parent, []).append(node)
            node = parent
    return roots, children
