"""Ids for the rows of images. Ids that are no longer used are freed.

The key of an image is a digest of its pixels and of all processing. The rows of each tile have consecutive ids. The ids
stay valid while they are used: by a request that holds the image's Medium, by a radix tree, or by a store of encoded
images. Images of two tenants have different ids, so no tenant reuses rows of another tenant's images.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from ...engine.cache.tree import RowTrie
from ...errors import InputError
from ...spec.requests import Medium
from ...trie import MEDIA_BASE, SPAN_BASE

# A sweep for unused ids starts when there are more images than twice the number after the last sweep plus this number.
SLACK = 256


class Store(Protocol):
    """A store with data under the ids of images' rows."""

    def firsts(self) -> Iterable[int]:
        """Return the first ids of these images."""


class MediaTable:
    """The ids of images' rows. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, bytes], np.ndarray] = {}
        self._media: WeakValueDictionary[tuple[str, bytes], Medium] = WeakValueDictionary()
        self._owners: dict[int, tuple[str, bytes]] = {}  # names of images by first id
        self._firsts: list[int] = []
        self._free: dict[tuple[bool, int], list[int]] = {}  # first ids by (of spans, number of ids)
        self._next = {False: MEDIA_BASE, True: SPAN_BASE}
        self._trees: WeakSet[RowTrie] = WeakSet()
        self._stores: WeakSet[Store] = WeakSet()
        self._in_use = 0
        self._requested: set[tuple[str, bytes]] = set()  # since the last sweep began
        self._sweeping = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def for_replicas(self) -> Any:
        """Return a SentImages, by which this table's images are sent to replicas."""
        from .sending import SentImages

        return SentImages(self)

    def medium(
        self, key: bytes, *, tiles: int, rows_per_tile: int, span: bool, load: Callable[[], np.ndarray], salt: str = ""
    ) -> Medium:
        """Return the medium of an image: the same object for the same key and salt while any reference to it exists.

        Raise InputError if no ids are left.

        Args:
            tiles: number of tiles
            rows_per_tile: rows of each tile
            span: each tile's rows form one span
            load: returns the tiles as the tower reads them
            salt: the salt of the requests, which separates tenants
        """
        name = (salt, key)
        if len(self._ids) > 2 * self._in_use + SLACK:
            self.sweep()
        with self._lock:
            self._requested.add(name)
            medium = self._media.get(name)
            if medium is None:
                ids = self._ids.get(name)
                if ids is None:
                    ids = self._bind(name, tiles, rows_per_tile, span)
                medium = self._media[name] = Medium(key, salt, ids, load)
            return medium

    def find(self, ids: np.ndarray) -> list[Medium]:
        """Return the media of rows with these ids, in the order of the media's first rows.

        Raise LookupError for an id if it never had a medium, or if its medium no longer exists.
        """
        with self._lock:
            # A gap in the ids starts another tile or image, because one id between two tiles is unused.
            heads = ids[np.flatnonzero(np.diff(ids, prepend=-1) != 1)].tolist()
            firsts = dict.fromkeys(self._firsts[bisect_right(self._firsts, head) - 1] for head in heads)
            return [self._media[self._owners[first]] for first in firsts]

    def add_tree(self, tree: RowTrie) -> None:
        """Register a tree. Ids stay valid while they are in it."""
        self._trees.add(tree)

    def add_store(self, store: Store) -> None:
        """Register a store. Ids stay valid while it has data under them."""
        self._stores.add(store)

    def sweep(self) -> None:
        """Free the ids that are no longer used."""
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._requested.clear()
                unheld = {int(ids[0]): name for name, ids in self._ids.items() if name not in self._media}
                firsts = np.array(self._firsts)
            # Without the lock, because a thread that changes a tree may call the table. Images that enter a tree from
            # now on are in `_requested`.
            for first in self._used(firsts):
                unheld.pop(first, None)
            with self._lock:
                for first, name in unheld.items():
                    if name not in self._requested:
                        self._free_ids(first, name)
                self._firsts = sorted(self._owners)
                self._in_use = len(self._ids)
        finally:
            self._sweeping.release()

    def _bind(self, name: tuple[str, bytes], tiles: int, rows_per_tile: int, span: bool) -> np.ndarray:
        # One id after each tile stays unused, so that neighbouring tiles are distinct.
        size = tiles * (rows_per_tile + 1)
        free = self._free.get((span, size))
        if free:
            first = free.pop()
        else:
            first = self._next[span]
            if first + size > (2**31 if span else SPAN_BASE):
                raise InputError(
                    f"{len(self._ids):,} different images are in use at once, so the {SPAN_BASE - MEDIA_BASE:,} ids "
                    "for rows of images are used up",
                    field="image",
                    remedy="try again when other requests are done, or divide a job into several",
                    code="image_count",
                )
            self._next[span] = first + size
        rows = np.arange(size, dtype=np.int32).reshape(tiles, -1)[:, :rows_per_tile]
        ids = self._ids[name] = (first + rows.ravel()).astype(np.int32)
        ids.flags.writeable = False
        self._owners[first] = name
        insort(self._firsts, first)
        return ids

    def _free_ids(self, first: int, name: tuple[str, bytes]) -> None:
        ids, span = self._ids.pop(name), first >= SPAN_BASE
        del self._owners[first]
        self._free.setdefault((span, int(ids[-1] - ids[0]) + 2), []).append(first)

    def _used(self, firsts: np.ndarray) -> Iterator[int]:
        """Yield the first ids of images with rows in stores or trees.

        Args:
            firsts: the first ids of all images, ascending
        """
        for store in list(self._stores):
            yield from store.firsts()
        for tree in list(self._trees):
            for tokens in tree.owner(lambda tree=tree: [np.asarray(node.tokens) for node in tree.nodes()]):
                ids = tokens[tokens >= MEDIA_BASE]
                yield from firsts[np.unique(np.searchsorted(firsts, ids, side="right") - 1)].tolist()
