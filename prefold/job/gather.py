"""Gathers the results of a record's requests, which run at different times, by the tags that the requests carry.

A record holds items (a rerank record has an item for each document), and an item holds requests. The tag of a request
says which one it is. The tag of an item's first request also carries the item's note, and the tag of a record's first
request what the output line needs. So nothing of a record is held in memory while its requests wait on disk.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from ..tasks.run import with_seed
from ..types import Request

_HEAD = struct.Struct("<QIIII")  # record, item, items of the record, part, parts of the item


def tagged(number: int, meta: Any, works: list[Any], seed: int = 0) -> list[tuple[Request, bytes]]:
    """Returns every request of a record with its tag. works: the tasks.Work of each of its items; seed: the job's."""
    requests = []
    for item, work in enumerate(works):
        for part, request in enumerate(work.requests):
            tag = _HEAD.pack(number, item, len(works), part, len(work.requests))
            if part == 0:
                tag += _encode([work.note, meta] if item == 0 else [work.note])
            requests.append((with_seed(request, seed, number, item, part), tag))
    return requests


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _encode(value: Any) -> bytes:
    return _json(value).encode("utf-8", "surrogatepass")


@dataclass(slots=True)
class Done:
    """Holds a record whose results are all there: the note of each item, and its results in order.

    A result is what the engine gives for a request (see `results_of`).
    """

    number: int
    meta: Any = None
    items: list[tuple[Any, list[Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Item:
    missing: int
    results: list[Any]
    note: Any = None


@dataclass(slots=True)
class _Gathering:
    """A _Gathering is a record some of whose results are still missing."""

    missing: int
    items: list[_Item | None]
    meta: Any = None


class Gather:
    """Collects results by record; `waiting` is how many records have some of their results and not all."""

    def __init__(self) -> None:
        self._records: dict[int, _Gathering] = {}

    @property
    def waiting(self) -> int:
        return len(self._records)

    def add(self, tag: bytes, result: Any) -> Done | None:
        """Takes one result. Returns its record when this was the last result missing, else None."""
        number, item, items, part, parts = _HEAD.unpack_from(tag)
        head = json.loads(tag[_HEAD.size :].decode("utf-8", "surrogatepass")) if part == 0 else None
        if items == 1 and parts == 1:
            note, meta = head
            return Done(number, meta, [(note, [result])])
        record = self._records.get(number)
        if record is None:
            record = self._records[number] = _Gathering(items, [None] * items)
        entry = record.items[item]
        if entry is None:
            entry = record.items[item] = _Item(parts, [None] * parts)
        if head is not None:
            entry.note = head[0]
            if item == 0:
                record.meta = head[1]
        entry.results[part] = result
        entry.missing -= 1
        record.missing -= entry.missing == 0
        if record.missing:
            return None
        del self._records[number]
        return Done(number, record.meta, [(entry.note, entry.results) for entry in record.items])  # type: ignore[union-attr, misc]
