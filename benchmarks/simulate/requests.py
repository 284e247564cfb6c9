"""Requests of the simulator, whose prompts are paths of numbered parts in place of tokens.

A *part* is a number and its rows; two prompts share their leading parts of equal numbers. A prompt of
`prefix_repetition` has two parts: its prefix and its own rows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prefold.errors import InputError


@dataclass(eq=False, slots=True)
class SimRequest:
    """A SimRequest is a request, which is never changed. (A frozen dataclass would take three times as long to make.)

    path    ((number, rows), ...), no part empty
    output  tokens of its output, at most `limit`
    rows    of its prompt
    """

    key: int
    path: tuple[tuple[int, int], ...]
    output: int
    limit: int
    arrival: float = 0.0
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        rows = 0
        for _, size in self.path:
            rows += size
        self.rows = rows

    def tokens(self) -> np.ndarray:
        """Returns tokens, int32 [rows], each its part's number, so that prompts share the tokens of equal parts."""
        numbers, rows = zip(*self.path, strict=True)
        return np.repeat(np.array(numbers, np.int32), rows)

    def drawn_tokens(self, vocab: int) -> np.ndarray:
        """Returns tokens, int32 [rows], from 0 to `vocab` - 1: those of a part are drawn with its number as seed, so
        that prompts share the tokens of equal parts, and a model finds no repetition."""
        parts = [np.random.default_rng(number).integers(0, vocab, rows) for number, rows in self.path]
        return np.concatenate(parts).astype(np.int32)


def prefix_repetition(
    count: int, *, prefixes: int, prefix: int, suffix: int, output: int, seed: int = 0, skew: float = 0.0
) -> list[SimRequest]:
    """Returns `count` requests in random order, with each of `prefixes` prefixes equally often, like vLLM's
    PrefixRepetitionRandomDataset. skew: prefix i comes in proportion to 1 / (i + 1) ** skew"""
    rng = np.random.default_rng(seed)
    if skew:
        weights = 1 / np.arange(1, prefixes + 1) ** skew
        numbers = rng.choice(prefixes, count, p=weights / weights.sum())
    else:
        numbers = rng.permutation(np.arange(count) % prefixes)
    return [
        SimRequest(key, ((number, prefix), (prefixes + key, suffix)), output, output)
        for key, number in enumerate(numbers.tolist())
    ]


def read_trace(path: str | Path, *, limit: int | None = None) -> list[SimRequest]:
    """Returns the requests of a trace in JSON lines, by arrival; the file may be compressed (.gz).

    Mooncake's traces have `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, each of which stands for
    512 tokens and all before them; Azure's have `timestamp_ms` and the two lengths, and their requests share nothing.
    Raises InputError for other lines.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    requests: list[SimRequest] = []
    with opened(path, "rt") as file:
        for number, line in enumerate(file):
            if limit is not None and number >= limit:
                break
            try:
                requests.append(_request(number, json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                message = f"line {number + 1} of {path} is no request of a trace: {error!r}"
                raise InputError(message, field="trace", remedy="give Mooncake's or Azure's fields") from None
    return sorted(requests, key=lambda request: request.arrival)


_HASHED = 512  # tokens of one of Mooncake's hash ids
_OWN = 1 << 30  # numbers of parts that are not shared begin here


def _request(number: int, line: dict[str, Any]) -> SimRequest:
    rows, output = int(line["input_length"]), max(1, int(line["output_length"]))
    if rows < 1:
        raise ValueError("input_length is below 1")
    path = list(_parts(line.get("hash_ids", []), rows))
    unnamed = rows - sum(size for _, size in path)
    if unnamed:
        path.append((_OWN + number, unnamed))
    arrival = line["timestamp"] if "timestamp" in line else line["timestamp_ms"]
    return SimRequest(number, tuple(path), output, output, arrival / 1000)


def _parts(ids: list[int], rows: int) -> Iterator[tuple[int, int]]:
    for i, number in enumerate(ids):
        size = min(_HASHED, rows - i * _HASHED)
        if size > 0:
            yield number, size


def shared_rows(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """Returns how many leading rows two paths share."""
    shared = 0
    for (number, rows), (twin, _) in zip(first, second, strict=False):
        if number != twin:
            break
        shared += rows
    return shared
