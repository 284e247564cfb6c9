"""Compare two runs of the same items: their values, arg-maxes and ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.job import JobSpec
from ..spec.requests import Readout, Result
from ..tasks.base import Inputs, Work
from ..tasks.kept import open_kept, read_answer, read_request
from ..tasks.kept_file import AnswersFile
from ..tasks.results import Answer, Classification, Decision, Embedding, EmbeddingList, Ranking, Relevance, Score
from ..tasks.run import run_works
from ..text import tokenizer_or_none
from . import models
from .models import find_model
from .record import Record, RecordAdapter

NEIGHBOURS = 64
_BLOCK = 8
_ROWS = 256


def sample_items(
    records: Iterable[Record], adapter: RecordAdapter, count: int, *, seed: int = 0
) -> tuple[list[tuple[str, Any]], int]:
    """Return ((name of the task, item) of about `count` records, the number of unusable records).

    Records are drawn evenly over the input, in blocks of neighbours, because neighbours are likely to share prefixes.
    """
    draw, records = random.Random(seed), iter(records)
    blocks = enumerate(iter(lambda: list(islice(records, _BLOCK)), []))
    sample = nlargest(max(1, -(-count // _BLOCK)), ((draw.random(), number, block) for number, block in blocks))
    items: list[tuple[str, Any]] = []
    bad = num_used = 0
    for record in [record for *_, block in sorted(sample, key=lambda entry: entry[1]) for record in block]:
        parsed = adapter.read(record)
        if parsed.error is not None:
            bad += 1
        elif num_used < count:
            num_used += 1
            items += [(parsed.task, item) for item in parsed.items]
    return items, bad


@dataclass(frozen=True)
class Run:
    """A run of works."""

    task: Any  # the task, possibly calibrated for this run
    results: Sequence[list[Any] | None]  # the results of each work


@dataclass(frozen=True)
class Difference:
    """The differences between two runs. A largest difference is NaN if one run has NaN.

    Attributes:
        items: number of items compared
        values: largest difference of the model's values (logits, hidden states, log-probabilities)
        results: largest difference of the task's results (scores, probabilities, cosines)
        groups: number of rankings compared: a query's documents, a text's labels, or an embedding's neighbours (at most
            NEIGHBOURS embeddings near it in the input)
        first: number of rankings whose first place changed
        orders: number of rankings whose order changed
        pairs: number of pairs in the rankings, of `all_pairs`, whose order changed
        greedy: number of tokens, of `all_tokens`, that became or ceased to be the model's first choice
    """

    items: int
    values: float
    results: float
    groups: int
    first: int
    orders: int
    pairs: int
    all_pairs: int
    greedy: int
    all_tokens: int


def compare(items: Sequence[Any], works: Sequence[Any], a: Run, b: Run) -> Difference:
    """Return the Difference of two runs of `works = task.prepare(items)`. Works that are errors are left out."""
    valid = [i for i, work in enumerate(works) if not isinstance(work, InputError)]
    pairs = [(ra, rb) for i in valid for ra, rb in zip(a.results[i] or [], b.results[i] or [], strict=True)]
    # The last value of a read-out with sums is a token id, so leave it out.
    end = -1 if a.task.readout.sums else None
    values = _largest((ra.values - rb.values)[..., :end] for ra, rb in pairs)
    flips = [(ra.greedy != rb.greedy) for ra, rb in pairs if ra.greedy is not None]
    first_scores, second_scores = (
        _rankings(items, valid, [run.task.finish(works[i].note, run.results[i]) for i in valid]) for run in (a, b)
    )
    results = _largest(x - second_scores[key] for key, x in first_scores.items())
    first, orders, num_swapped, all_pairs = 0, 0, 0, 0
    rankings = [(x, second_scores[key]) for key, x in first_scores.items() if len(x) > 1]
    for x, y in rankings:
        first += int(np.argmax(x) != np.argmax(y))
        discordant = _discordant(x, y)
        num_swapped, all_pairs, orders = num_swapped + discordant, all_pairs + _pairs(len(x)), orders + (discordant > 0)
    greedy, tokens = sum(int(f.sum()) for f in flips), sum(f.size for f in flips)
    return Difference(len(valid), values, results, len(rankings), first, orders, num_swapped, all_pairs, greedy, tokens)


@dataclass(frozen=True)
class TextDifference:
    """The differences between the texts of two runs."""

    texts: int  # number of texts compared
    first_changed: list[int]  # for each changed text, the number (from 1) of the first token that differs


def compare_texts(a: Run, b: Run) -> TextDifference:
    """Return the TextDifference of two runs that generated text."""
    first_run, second_run = (
        [text.tokens for work in run.results for texts in work or [] for text in texts] for run in (a, b)
    )
    pairs = [zip_longest(*pair) for pair in zip(first_run, second_run, strict=True)]
    first = [next((i for i, (x, y) in enumerate(pair, 1) if x != y), 0) for pair in pairs]
    return TextDifference(len(pairs), [number for number in first if number])


def _largest(differences: Iterable[np.ndarray]) -> float:
    """Return the largest absolute difference, or NaN if one is NaN. (Python's `max` would ignore NaN.)"""
    largest = np.float64(0)
    for difference in differences:
        largest = np.maximum(largest, np.abs(difference).max(initial=0))
    return float(largest)


def _pairs(count: int) -> int:
    return count * (count - 1) // 2


def _discordant(x: np.ndarray, y: np.ndarray) -> int:
    """Return how many pairs are ordered differently by x [n] and y [n]."""
    count = 0
    for start in range(0, len(x), _ROWS):  # in blocks, because all pairs of a long ranking need too much memory
        rows = slice(start, start + _ROWS)
        count += int(((x[rows, None] - x) * (y[rows, None] - y) < 0).sum())
    return count // 2  # each pair was counted twice


def _rankings(items: Sequence[Any], valid: Sequence[int], answers: Sequence[Answer]) -> dict[Any, np.ndarray]:
    """Return the values that are ranked against each other, by their query, text or group."""
    out: dict[Any, list[float]] = {}
    vectors: list[np.ndarray] = []
    for i, answer in zip(valid, answers, strict=True):
        item = items[i]
        if isinstance(answer, (Relevance, Ranking)):
            scores = answer.scores.tolist() if isinstance(answer, Ranking) else [answer.score]
            out.setdefault(_key(item, "query", i), []).extend(scores)
        elif isinstance(answer, Classification):
            out[i] = list(answer.probabilities.values())
        elif isinstance(answer, Decision):
            out |= {(i, name): list(one.probabilities.values()) for name, one in answer.answers.items()}
        elif isinstance(answer, Score):
            out.setdefault(_key(item, "prompt", i), []).append(answer.logprob)
        elif isinstance(answer, (Embedding, EmbeddingList)):
            vectors += [*answer.vectors]
    ranked = {key: np.array(values, np.float64) for key, values in out.items()}
    return ranked | (_neighbours(vectors) if vectors else {})


def _neighbours(vectors: Sequence[np.ndarray]) -> dict[Any, np.ndarray]:
    """Return the cosines of each vector with its neighbours in the same group.

    All cosines of a large sample would be too many.
    """
    matrix = np.stack(vectors).astype(np.float64)
    matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    out: dict[Any, np.ndarray] = {}
    for group in np.array_split(matrix, -(-len(matrix) // (NEIGHBOURS + 1))):
        for i, cosines in enumerate(group @ group.T):
            out["neighbours", len(out)] = np.delete(cosines, i)
    return out


def _key(item: Any, field: str, number: int) -> Any:
    value = item.get(field) if isinstance(item, dict) else None
    return (field, value) if isinstance(value, str) else number


@dataclass(frozen=True)
class Recomputed:
    """The result of `prefold answers --verify`."""

    wrong: list[str]  # one line for each fault of the file
    computed: int  # number of answers that were computed again
    difference: float  # largest difference of their values
    texts_changed: int  # number of texts that differ now


def recompute(file: AnswersFile, spec: JobSpec, count: int, notify: Callable[[str], None]) -> Recomputed:
    """Check a file of kept answers, and compute at most `count` of them again with the model of a spec.

    Raise InputError if the file has no answers of this model that were stored with their request.
    """
    from ..model.machine import choose_device, choose_dtype

    wrong = file.check()
    checkpoint = find_model(spec.model_name, spec.model, notify)
    device = choose_device(spec.model.device)
    dtype = choose_dtype(spec.model.dtype, checkpoint.config, device)
    drawn, model = [], spec.model
    for model in (spec.model.for_job(), spec.model):  # with the settings of a job, then of LLM
        kept = open_kept(replace(model, answers=str(file.path.parent)), checkpoint, dtype, device, notify)
        assert kept is not None
        kept.close()
        rows = file.with_requests(kept.model, count)
        drawn = [(*read_request(asked), read_answer(answer)) for _, asked, answer in rows]
        if drawn:
            break
    if not drawn and wrong:
        return Recomputed(wrong, 0, 0.0, 0)
    if not drawn:
        remedy = "`prefold answers DIR` shows the models and options that have some"
        raise InputError(f"no answer of {spec.model_name} with these options can be computed again", remedy=remedy)
    tokenizer = tokenizer_or_none(checkpoint)
    llm = models.load_llm(model, checkpoint, tokenizer, is_job=False)
    differences, changed = [], 0
    for readout in dict.fromkeys(readout for readout, *_ in drawn):
        pairs = [(request, answer) for asked, request, answer in drawn if asked == readout]
        works = [Work([request]) for request, _ in pairs]
        results = run_works(llm.engine, _Again(readout, Inputs(tokenizer)), works)
        for (_, before), of_work in zip(pairs, results, strict=True):
            (now,) = of_work or (None,)
            if isinstance(before, Result) and isinstance(now, Result):
                differences.append(before.values - now.values)
            else:
                changed += _texts(now) != _texts(before)
    llm.close()
    return Recomputed(wrong, len(drawn), _largest(differences), changed)


@dataclass(frozen=True)
class _Again:
    """The task of requests that are computed again. It has what `run_works` reads from a task."""

    readout: Readout
    inputs: Inputs


def _texts(answer: object) -> list[tuple[int, ...]] | None:
    return [one.tokens for one in answer] if isinstance(answer, list) else None
