"""What an engine of one model has counted, and what its KV store holds, for pages, metrics and listings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .cache.listing import TreePath, held_rows, paths_of
from .protocol import RunningSequence, Snapshot

Wants = Callable[[Hashable], bool]


def with_store(
    now: Snapshot, scheduler: Any, call: Callable[..., Any], *, rows: bool, paths: int, wants: Wants | None
) -> Snapshot:
    """Returns a snapshot with what a scheduler has (see `Engine.snapshot`). call: calls a function in the engine's
    thread"""
    pool, cache = scheduler.pool, scheduler.cache
    seconds = None if cache is None else cache.seconds
    now = replace(now, slots=pool.num_slots, used_slots=pool.used_slots, cache_seconds=seconds)
    if rows:
        now = replace(now, rows=call(partial(held_rows, scheduler.tree)))
    if paths:
        tree_paths, running = call(partial(_paths, scheduler, paths, wants))
        now = replace(now, paths=tree_paths, running=running)
    return now


def _paths(scheduler: Any, most: int, wants: Wants | None) -> tuple[list[TreePath], list[RunningSequence]]:
    """Returns at most so many paths of the trie, of namespaces that are wanted, and all sequences that run."""
    tails: dict[Any, list[Sequence[int]]] = defaultdict(list)
    running = []
    for sequence in scheduler.running:
        leaf = root = sequence.leaf
        tails[leaf].append(sequence.tail.tokens)
        while root.parent is not None:
            root = root.parent
        counts = leaf.stop, sequence.cached_tokens or 0, sequence.num_known, sequence.limit
        running.append(RunningSequence(root.namespace, *counts))
    return paths_of(scheduler.tree, tails, most=most, wants=wants), running
