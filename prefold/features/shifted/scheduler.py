"""The generation scheduler that reuses chunks of text at positions other than their original ones.

When a request is admitted, the rows of its prompt that no other request has or waits for are looked up in the
`ChunkIndex`. From the first copied row on, the prompt leaves the trie: its rows are in separate nodes, which refer to
the node above them but are not its children, like tails. So no other request finds a row that is copied or that sees a
copied row. The rows are freed when the request ends.

`moves` lists the copies that the worker must make before the next step.
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
    """A copy of rows for a request."""

    key: Hashable  # the key of the request
    message: MoveRows

    def __len__(self) -> int:
        return len(self.message.slots)


class ShiftingScheduler(Scheduler):
    """A Scheduler that reuses chunks by the options of `CacheOptions.shifted`.

    Attributes:
        moves: messages for the worker before the next step, in this order; the caller that sends them empties the list
    """

    def __init__(self, pool: SlotPool, *, cache: CacheOptions, **options: Any):
        super().__init__(pool, cache=cache, **options)
        assert isinstance(cache.shifted, ShiftedReuse) and self.cache is not None
        self.chunks = ChunkIndex(self.tree, cache.shifted)
        self.moves: list[RowMove] = []
        self.may_shift: set[Hashable] = set()  # requests without an admitted sequence so far
        self.apart: dict[Node, None] = {}  # nodes of prompts outside the trie

    def submit(self, key: Hashable, tokens: np.ndarray, *, shifts: bool = False, **options: Any) -> None:
        """Submit a prompt, as in Scheduler.

        Args:
            shifts: chunks may be reused for it
        """
        super().submit(key, tokens, **options)
        if shifts:
            self.may_shift.add(key)

    def clear(self) -> None:
        super().clear()
        self.moves.clear()
        self.may_shift.clear()
        self.apart.clear()

    # ------------------------------------------------------------------------------------------ admission

    def _spare(self, sequence: SequenceState) -> int:
        if sequence.key not in self.may_shift:
            return 0
        self.may_shift.discard(sequence.key)
        return self._shift(sequence)

    def _shift(self, sequence: SequenceState) -> int:
        """Plan copies of chunks after a request's first sequence was admitted. Return the number of rows."""
        request, path = self.requests[sequence.key], sequence.leaf.path()
        # Rows stay exact and in the trie if they are computed, if other requests wait for them, or if cached rows are
        # below them.
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
        # The first row of a prompt is always computed, because the separate nodes need a node above them.
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
        """Remove the rows of a prompt from `cut` on from the trie.

        Return (the node that ends before `cut`, the slots of the rows, int64).
        """
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
        """Return a node below `above` for rows that no other request shares, or `above` itself if there are no rows."""
        if not len(tokens):
            return above
        node = above.tail(tokens.tolist())
        node.claim(slots)
        node.users, node.priority = len(request), above.priority
        self.apart[node] = None
        return node

    # ------------------------------------------------------------------------------------------ end

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
    """The engine part that reuses chunks of other prompts."""

    def __init__(self, worker: Worker, options: GenerateOptions, meter: Meter):
        self._worker, self._options, self._meter = worker, options, meter

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> ShiftingScheduler:
        return over_store(ShiftingScheduler, self._worker, self._options, max_batch_rows, holds_rows)

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Return whether chunks may be reused for a request: only for generation that has not started.

        Values are read only from exact rows. An answer that was started continues from computed rows.
        """
        if any(isinstance(reader, ValueReader) or reader.tokens for reader in request.readers):
            return {"shifts": False}
        request.noted.pop("approximate_tokens", None)
        return {"shifts": True}

    def before_plan(self, scheduler: ShiftingScheduler, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Send the planned copies to the worker, and add them to the requests' counts.

        No step is planned between the decision and this call, so the rows to be copied still exist.
        """
        for moved in scheduler.moves:
            self._worker.start(moved.message).result()
            if moved.key in requests:
                requests[moved.key].noted["approximate_tokens"] = len(moved)
            self._meter.add(unique_tokens=len(moved))  # an exact run would have computed them
        scheduler.moves.clear()
        return {}


def engine_part(worker: Worker, options: EngineOptions, meter: Meter) -> Shifting | None:
    """Return the engine part that reuses chunks, or None if reuse is exact.

    Raise InputError if the model cannot reuse chunks at other positions.
    """
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
