"""Requests of the simulator. Their prompts are paths of numbered parts instead of tokens.

A *part* is a pair (number, rows). Two prompts share their leading parts with equal numbers. A prompt of
`prefix_repetition` has two parts: a prefix, and its own rows.
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
    """A request. It never changes; a frozen dataclass would take three times as long to make."""

    key: int
    path: tuple[tuple[int, int], ...]  # ((number, rows), ...), without empty parts
    output: int  # output tokens, at most `limit`
    limit: int
    arrival: float = 0.0  # seconds
    rows: int = field(init=False)  # prompt rows

    def __post_init__(self) -> None:
        rows = 0
        for _, size in self.path:
            rows += size
        self.rows = rows

    def tokens(self) -> np.ndarray:
        """Return the prompt as int32 [rows]. Each token is the number of its part, so equal parts have equal tokens."""
        numbers, rows = zip(*self.path, strict=True)
        return np.repeat(np.array(numbers, np.int32), rows)

    def drawn_tokens(self, vocab: int) -> np.ndarray:
        """Return the prompt as random token ids below `vocab`, int32 [rows].

        The number of a part is the seed of its tokens, so equal parts have equal tokens. A model finds no repetition in
        them.
        """
        parts = [np.random.default_rng(number).integers(0, vocab, rows) for number, rows in self.path]
        return np.concatenate(parts).astype(np.int32)


def prefix_repetition(
    count: int, *, prefixes: int, prefix: int, suffix: int, output: int, seed: int = 0, skew: float = 0.0
) -> list[SimRequest]:
    """Return `count` requests in random order, like vLLM's PrefixRepetitionRandomDataset.

    All prefixes are equally frequent. With a skew, the frequency of prefix i is proportional to 1 / (i + 1) ** skew.
    """
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
    """Return the requests of a trace in JSON lines (also .gz), by arrival.

    Mooncake's traces have `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. A hash id stands for 512
    tokens and all tokens before them. Azure's traces have `timestamp_ms` and the two lengths; their requests share
    nothing. Raise InputError for other lines.
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
                message = f"line {number + 1} of {path} is not a request of a trace: {error!r}"
                raise InputError(message, field="trace", remedy="give Mooncake's or Azure's fields") from None
    return sorted(requests, key=lambda request: request.arrival)


_HASHED = 512  # tokens of a hash id in Mooncake's traces
_OWN = 1 << 30  # first number of parts that are not shared


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
    """Return the number of leading rows that two paths share."""
    shared = 0
    for (number, rows), (twin, _) in zip(first, second, strict=False):
        if number != twin:
            break
        shared += rows
    return shared
