"""The generation scheduler that reuses chunks of text at other positions than they were computed at.

When a request is admitted, the rows of its prompt that nobody else has or waits for are looked up in the `ChunkIndex`.
From the first row on that is to be copied, the prompt then leaves the trie: its rows lie in nodes of its own, which
know the node above them and are no children of it, as a tail is. So a row that is copied, or that sees one, is met by
no other request, and is given up when the request ends.

What is copied where is in `moves`, which the worker has to be given before the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.cache import CacheOptions, SlotPool
from ...engine.cache.tree import Node
from ...engine.meter import Meter
from ...engine.protocol import EngineOptions, GenerateOptions
from ...engine.requests import ValueReader
from ...engine.schedule.generate_step import HoldsRows, SequenceState
from ...engine.schedule.parts import EnginePart, over_store
from ...engine.schedule.scheduler import Scheduler
from ...engine.worker import Worker
from ...errors import InputError
from .chunks import ChunkIndex, MoveRows, ShiftedFacts
from .options import ShiftedReuse


@dataclass(frozen=True, eq=False, slots=True)
class RowMove:
    """A RowMove is a copy of rows for a request.

    key      the request's
    message  which rows, for the worker
    """

    key: Hashable
    message: MoveRows

    def __len__(self) -> int:
        return len(self.message.slots)


class ShiftingScheduler(Scheduler):
    """A ShiftingScheduler is a Scheduler that reuses chunks, by the options `shifted.chunks`.

    moves  what the worker has to be given before the next step, in this order; whoever gives it empties the list
    """

    def __init__(self, pool: SlotPool, *, cache: CacheOptions, **options: Any):
        super().__init__(pool, cache=cache, **options)
        assert isinstance(cache.shifted, ShiftedReuse) and self.cache is not None
        self.chunks = ChunkIndex(self.tree, cache.shifted)
        self.moves: list[RowMove] = []
        self.may_shift: set[Hashable] = set()  # requests of which no sequence was admitted yet
        self.apart: dict[Node, None] = {}  # the nodes of prompts that are not in the trie

    def submit(self, key: Hashable, tokens: np.ndarray, *, shifts: bool = False, **options: Any) -> None:
        """Takes a prompt, as a Scheduler does. shifts: whether chunks are reused for it."""
        super().submit(key, tokens, **options)
        if shifts:
            self.may_shift.add(key)

    def clear(self) -> None:
        super().clear()
        self.moves.clear()
        self.may_shift.clear()
        self.apart.clear()

    # ------------------------------------------------------------------------------------------ who comes

    def _spare(self, sequence: SequenceState) -> int:
        if sequence.key not in self.may_shift:
            return 0
        self.may_shift.discard(sequence.key)
        return self._shift(sequence)

    def _shift(self, sequence: SequenceState) -> int:
        """Has chunks copied for a request whose first sequence was admitted; returns how many rows these are."""
        request, path = self.requests[sequence.key], sequence.leaf.path()
        # Rows that are there, that others wait for, or that kept rows lie below of, are in the trie, and exact.
        first = 0
        for node, below in zip(path, (*path[1:], None), strict=True):
            if node.users > len(request) or any(child is not below for child in node.children.values()):
                first = node.stop
            elif node.num_computed:
                first = node.start + node.num_computed
        root = path[0].parent
        assert root is not None and self.cache is not None
        tokens = np.concatenate([node.tokens for node in path])
        chunks = self.chunks.find(root.namespace, tokens, first)
        if not chunks:
            return 0
        recompute = self.chunks.options.recompute
        # The first row of a prompt is always computed: nodes lie below others.
        cut = max(1, chunks[0].start + recompute)
        above, slots = self._take_out(path, cut, len(request))
        copies = [chunk.behind(max(cut, chunk.start + recompute)) for chunk in chunks]
        for chunk in chunks:
            self.cache.touch(chunk.node)
        leaf, at = above, cut
        for copy in copies:
            leaf = self._hang(leaf, tokens[at : copy.start], slots[at - cut : copy.start - cut], request)
            leaf = self._hang(leaf, tokens[copy.start : copy.stop], slots[copy.start - cut : copy.stop - cut], request)
            leaf.num_computed, at = len(leaf), copy.stop
        leaf = self._hang(leaf, tokens[at:], slots[at - cut :], request)
        for one in request:
            one.leaf = one.tail.parent = leaf
        message = MoveRows(
            sources=np.concatenate([copy.slots for copy in copies]),
            positions=np.concatenate([np.arange(len(copy)) + copy.position for copy in copies]),
            slots=np.concatenate([slots[copy.start - cut : copy.stop - cut] for copy in copies]),
            new_positions=np.concatenate([np.arange(copy.start, copy.stop) for copy in copies]),
        )
        self.moves.append(RowMove(sequence.key, message))
        self.stats.copied_rows += len(message.slots)
        return len(message.slots)

    def _take_out(self, path: list[Node], cut: int, users: int) -> tuple[Node, np.ndarray]:
        """Takes the rows of a prompt from `cut` on out of the trie. Returns the node that ends before `cut`, and the
        slots of the rows, int64."""
        at = next(i for i, node in enumerate(path) if node.stop > cut)
        above = path[at].parent if path[at].start == cut else self.tree.split(path[at], cut - path[at].start)
        assert above is not None and above.parent is not None
        slots = []
        for node in reversed(path[at:]):
            assert not node.children
            node.users -= users
            slots.append(self.tree.drop(node))
            self._let_go(node)
        return above, np.concatenate(slots[::-1])

    def _hang(self, above: Node, tokens: np.ndarray, slots: np.ndarray, request: Collection[SequenceState]) -> Node:
        """Returns a node below `above` for rows that no other request shares; `above` itself without rows."""
        if not len(tokens):
            return above
        node = above.tail(tokens.tolist())
        node.claim(slots)
        node.users, node.priority = len(request), above.priority
        self.apart[node] = None
        return node

    # ------------------------------------------------------------------------------------------ who goes

    def _end(self, sequence: SequenceState) -> None:
        super()._end(sequence)
        if sequence.key not in self.requests:
            self.may_shift.discard(sequence.key)

    def _let_go(self, node: Node) -> None:
        if node in self.apart:
            del self.apart[node]
            self.pool.free(node.give_up())
        else:
            super()._let_go(node)

    def _is_prompt_like(self, sequence: SequenceState) -> bool:
        return sequence.leaf not in self.apart

    def nodes(self) -> Iterator[Node]:
        yield from super().nodes()
        yield from self.apart


class Shifting(EnginePart):
    """A Shifting is the part of an engine that reuses chunks of other prompts."""

    def __init__(self, worker: Worker, options: GenerateOptions, meter: Meter):
        self._worker, self._options, self._meter = worker, options, meter

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> ShiftingScheduler:
        return over_store(ShiftingScheduler, self._worker, self._options, max_batch_rows, holds_rows)

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Returns whether chunks may be reused for a request: it makes text, and has made none yet. Numbers are read of
        exact rows only; an answer that was begun goes on from rows that are computed."""
        if any(isinstance(reader, ValueReader) or reader.tokens for reader in request.readers):
            return {"shifts": False}
        request.noted.pop("approximate_tokens", None)
        return {"shifts": True}

    def before_plan(self, scheduler: ShiftingScheduler, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Gives the worker the copies that were decided on, and adds them to the requests' counts. No step is planned
        between the decision and this call, so the rows that are copied are still there."""
        for moved in scheduler.moves:
            self._worker.start(moved.message).result()
            if moved.key in requests:
                requests[moved.key].noted["approximate_tokens"] = len(moved)
            self._meter.add(unique_tokens=len(moved))  # they would have been computed
        scheduler.moves.clear()
        return {}


def engine_part(worker: Worker, options: EngineOptions, meter: Meter) -> Shifting | None:
    """Returns the part of an engine that reuses chunks; None where reuse is exact. Raises InputError where the model
    cannot reuse chunks at other positions."""
    cache, field = options.generation.cache, "cache_reuse_shifted"
    if cache is None or cache.shifted is None:
        return None
    shifted = worker.facts.of(ShiftedFacts)
    if shifted is not None and shifted.fixed is not None:
        message = f"rows of this model cannot be reused at other positions: {shifted.fixed}"
        raise InputError(message, field=field, remedy="leave it out", code="fixed_rows")
    if options.sharing != "full":
        message = f"chunks of other prompts cannot be reused with sharing {options.sharing!r}"
        raise InputError(message, field=field, remedy='leave it out, or give sharing="full"', code="fixed_rows")
    return Shifting(worker, options.generation, meter)
