"""A generation step: which rows, laid out depth-first, and who takes a token from them.

Who runs is settled before, by the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..cache import SCRATCH
from ..cache.tree import Node
from .steps import SlotStep

__all__ = ["Draft", "GenerateStep", "Running", "lay_out"]


class Running:
    """One sample of a request, from its arrival to its end.

    key, sample    whose it is: what `submit` was given, and which of its samples
    limit          tokens it may make
    reserve        room for all of them is set aside when it is admitted
    leaf           the node that ends with the prompt
    tail           the node of its own tokens
    cached_tokens  of the prompt, not computed for this sequence; known once it was admitted
    ready          the prompt's rows are computed
    known          of its tokens; those after them are on their way, each -1 - i: what the i-th read of its step gives
    """

    __slots__ = (
        "cached_tokens", "key", "known", "leaf", "limit", "priority", "ready", "reserve", "sample", "state", "tail",
    )  # fmt: skip

    def __init__(
        self, key: Hashable, sample: int, leaf: Node, tokens: list[int], limit: int, reserve: bool, priority: int
    ):
        self.key = key
        self.sample = sample
        self.leaf = leaf
        self.limit = limit
        self.reserve = reserve
        self.priority = priority
        self.state: Literal["waiting", "running", "ending", "ended"] = "waiting"
        self.cached_tokens: int | None = None
        self.ready = False
        self.known = len(tokens)
        self.tail = Node(leaf, tokens, leaf.stop)
        self.tail.lost = bool(tokens)

    @property
    def unknown(self) -> int:
        """Tokens on their way."""
        return len(self.tail.tokens) - self.known

    @property
    def tokens(self) -> list[int]:
        return self.tail.tokens


@dataclass(frozen=True, slots=True)
class GenerateStep:
    """One forward pass. Its rows are its queries, depth-first: those below one node lie side by side.

    message      for the worker; how tokens are chosen and what is read as numbers is not in it yet
    takers       who takes what each of the message's reads gives
    spans        (namespace, first query, past the last)
    takes        (node, number of its rows that are computed here)
    decode_rows  sequences that go on
    again        rows that had been computed before
    """

    message: SlotStep
    takers: list[Running]
    spans: list[tuple[tuple[Hashable, ...], int, int]]
    takes: list[tuple[Node, int]]
    decode_rows: int
    again: int

    @property
    def num_rows(self) -> int:
        return self.message.num_rows


@dataclass(slots=True)
class Draft:
    """What a step will compute, as it is being decided.

    left         rows of its budget that are still free
    takes        how many of a node's next rows are computed
    reads        who takes a token from the last of a node's rows
    again        nodes whose last row runs once more, for its result only, and who takes a token from it
    decode_rows  sequences that go on
    """

    left: int
    takes: dict[Node, int] = field(default_factory=dict)
    reads: list[tuple[Running, Node]] = field(default_factory=list)
    again: dict[Node, list[Running]] = field(default_factory=dict)
    decode_rows: int = 0

    @classmethod
    def of(cls, running: Collection[Running], most: int) -> Draft:
        """At most so many rows: one for each that is generating, then prompts in order, as far as that goes."""
        draft = cls(most)
        for sequence in running:
            if sequence.ready:
                draft._read_tail(sequence)
        for sequence in running:
            if not draft.left:
                break
            if not sequence.ready:
                draft._read_prompt(sequence)
        return draft

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
        elif self.left:
            # All its rows are there, but what the last one gave is gone: that row runs again, for its result only.
            self.again[sequence.leaf] = [sequence]
            self.left -= 1


def lay_out(draft: Draft) -> GenerateStep:
    """The step's rows depth-first over the nodes that have some, or lie above those that have."""
    roots, children = _marked(draft)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    start: list[int] = []
    count: list[int] = []
    position: list[int] = []
    first: list[int] = []
    last: list[int] = []
    last_row: dict[Node, int] = {}
    spans = []
    for root in roots:
        span = len(tokens)
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
                first.extend(range(query, query + rows))
                last.extend([0] * rows)
                last_row[node] = len(tokens) - 1
            if node in draft.again:
                last_row[node] = len(tokens)
                tokens.append(int(node.tokens[-1]))
                positions.append(node.stop - 1)
                slots.append(SCRATCH)
            stack.append((node, range(run, len(start))))
            stack.extend((child, None) for child in reversed(children.get(node, ())))
        spans.append((root.namespace, span, len(tokens)))
    reads = draft.reads + [(sequence, node) for node, sequences in draft.again.items() for sequence in sequences]
    rows_read = np.array([last_row[node] for _, node in reads], np.int64)
    read_rows, index = np.unique(rows_read, return_inverse=True)
    index = index.reshape(-1)
    order = np.argsort(index, kind="stable")
    joined = _joined(*(np.array(numbers, np.int64) for numbers in (start, count, position, first, last)))
    message = SlotStep(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int64), *joined, read_rows,
        index[order],
    )  # fmt: skip
    return GenerateStep(
        message,
        takers=[reads[i][0] for i in order.tolist()],
        spans=spans,
        takes=list(draft.takes.items()),
        decode_rows=draft.decode_rows,
        again=len(draft.again) + sum(rows for node, rows in draft.takes.items() if node.lost),
    )


def _joined(
    start: np.ndarray, count: np.ndarray, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Runs with those made one that lie side by side and are seen by the same queries: the nodes of a path of which
    the step has one branch only. A result is then the same however the path is split into nodes."""
    if len(start) < 2:
        return start, count, position, first, last
    follows = (start[:-1] + count[:-1] == start[1:]) & (position[:-1] + count[:-1] == position[1:])
    follows &= (first[:-1] == first[1:]) & (last[:-1] == last[1:])
    heads = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return start[heads], np.add.reduceat(count, heads), position[heads], first[heads], last[heads]


def _marked(draft: Draft) -> tuple[list[Node], dict[Node, list[Node]]]:
    """The roots, and the children, of nodes on the way to a row of the step."""
    roots: list[Node] = []
    children: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in _with_rows(draft):
        while node not in seen:
            seen.add(node)
            parent = node.parent
            if parent is None:
                roots.append(node)
                break
            children.setdefault(parent, []).append(node)
            node = parent
    return roots, children


def _with_rows(draft: Draft) -> Iterator[Node]:
    yield from draft.takes
    yield from draft.again
