"""Measures how far two runs of the same items are apart: differences of values, changed arg-maxes, changed ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..records.adapter import RecordAdapter
from ..records.record import Record
from ..types import Result

__all__ = ["Difference", "compare", "sample_items"]

_BLOCK = 8


def sample_items(
    records: Iterable[Record], adapter: RecordAdapter, count: int, *, seed: int = 0
) -> tuple[list[tuple[str, Any]], int]:
    """Returns pairs (name of the task, item) of about `count` records, and how many records were unusable.

    Records are drawn evenly over the input, in blocks of neighbours, as neighbours are likely to share prefixes.
    """
    draw = random.Random(seed)
    wanted = max(1, -(-count // _BLOCK))
    kept: list[tuple[int, list[Record]]] = []
    block: list[Record] = []
    number = 0

    def take() -> None:  # reservoir sampling (Vitter 1985, algorithm R)
        nonlocal number
        place = number if number < wanted else draw.randrange(number + 1)
        if place < wanted:
            if place < len(kept):
                kept[place] = (number, block)
            else:
                kept.append((number, block))
        number += 1

    for record in records:
        block.append(record)
        if len(block) == _BLOCK:
            take()
            block = []
    if block:
        take()
    items: list[tuple[str, Any]] = []
    bad = taken = 0
    for record in [record for _, block in sorted(kept, key=lambda entry: entry[0]) for record in block]:
        parsed = adapter.read(record)
        if parsed.error is not None:
            bad += 1
        elif taken < count:
            taken += 1
            items += [(parsed.task, item) for item in parsed.items]
    return items, bad


@dataclass(frozen=True)
class Difference:
    """Says how far two runs are apart.

    values     largest difference of the model's values (logits, hidden values, log-probabilities)
    results    largest difference of the task's results (scores, probabilities, cosines)
    groups     how many rankings were compared: a query's documents, a text's labels, an embedding's neighbours
    first      how many rankings changed their first place
    orders     how many rankings changed their order
    pairs      how many pairs of the rankings changed their order, of `all_pairs`
    greedy     how many tokens stopped or began to be the model's first choice, of `all_tokens`
    """

    values: float
    results: float
    groups: int
    first: int
    orders: int
    pairs: int
    all_pairs: int
    greedy: int
    all_tokens: int


def compare(
    task: Any,
    items: Sequence[Any],
    works: Sequence[Any],
    a: Sequence[list[Result] | None],
    b: Sequence[list[Result] | None],
) -> Difference:
    """Returns the Difference of two runs of `works = task.prepare(items)`. Works that are errors are left out."""
    kept = [i for i, work in enumerate(works) if not isinstance(work, InputError)]
    pairs = [(ra, rb) for i in kept for ra, rb in zip(a[i] or [], b[i] or [], strict=True)]
    values = max((float(np.abs(ra.values - rb.values).max(initial=0)) for ra, rb in pairs), default=0.0)
    flips = [(ra.greedy != rb.greedy) for ra, rb in pairs if ra.greedy is not None]
    one = _rankings(items, kept, [task.finish(works[i].note, a[i]) for i in kept])
    two = _rankings(items, kept, [task.finish(works[i].note, b[i]) for i in kept])
    results, first, orders, swapped, all_pairs = 0.0, 0, 0, 0, 0
    rankings = 0
    for key, x in one.items():
        y = two[key]
        results = max(results, float(np.abs(x - y).max(initial=0)))
        if len(x) < 2:
            continue
        rankings += 1
        first += int(np.argmax(x) != np.argmax(y))
        upper = np.triu_indices(len(x), 1)
        discordant = int((((x[:, None] - x)[upper] * (y[:, None] - y)[upper]) < 0).sum())
        swapped, all_pairs, orders = swapped + discordant, all_pairs + len(upper[0]), orders + (discordant > 0)
    greedy, tokens = sum(int(f.sum()) for f in flips), sum(f.size for f in flips)
    return Difference(values, results, rankings, first, orders, swapped, all_pairs, greedy, tokens)


def _rankings(items: Sequence[Any], kept: Sequence[int], outputs: Sequence[dict[str, Any]]) -> dict[Any, np.ndarray]:
    """Returns the numbers that are ranked against each other, by what they belong to."""
    out: dict[Any, list[float]] = {}
    vectors: list[np.ndarray] = []
    for i, output in zip(kept, outputs, strict=True):
        item = items[i]
        if "scores" in output or "score" in output:
            out.setdefault(_key(item, "query", i), []).extend(output.get("scores", [output.get("score")]))
        elif "probabilities" in output:
            out[i] = list(output["probabilities"].values())
        elif "logprob" in output:
            out.setdefault(_key(item, "prompt", i), []).append(output["logprob"])
        elif "embeddings" in output or "embedding" in output:
            vectors += list(output.get("embeddings", [output.get("embedding")]))
    if vectors:
        matrix = np.stack(vectors).astype(np.float64)
        matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        cosines = matrix @ matrix.T
        for i in range(len(matrix)):
            out["neighbours", i] = np.delete(cosines[i], i).tolist()
    return {key: np.array(values, np.float64) for key, values in out.items()}


def _key(item: Any, field: str, number: int) -> Any:
    value = item.get(field) if isinstance(item, dict) else None
    return (field, value) if isinstance(value, str) else number
