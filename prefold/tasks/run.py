"""Runs a task's items through an engine, in memory: for the Python face, direct answers, samples and probes."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ..engine.protocol import Engine
from ..engine.requests import Answer as EngineAnswer
from ..errors import InputError
from ..spec.requests import Request, Result
from ..trie import LiveInput, Spool, Window, read_tags
from .base import attempt
from .kept import KEY_BYTES, KeptAnswers, KeptReads
from .results import Answer, all_finite
from .sampling import seed_at

_TAG = struct.Struct("<qq")  # number of the work, part of the work


def results_of(
    engine: Engine,
    task: Any,
    windows: Iterable[Window | None] | LiveInput,
    *,
    on_repeat: Callable[[int], object] | None = None,
    kept: KeptReads | None = None,
    **run: Any,
) -> Iterator[tuple[bytes, Any]]:
    """Yields (tag, result) of every request, as the results come. A result is a Result, a list of Generated where text
    is generated, or the InputError of a request that cannot be run. Equal requests are computed once.

    windows    of a spool with joins=True, or a LiveInput whose feed joins
    on_repeat  called with the tokens of each prompt that got the answer of an equal one
    kept       keeps the answers; each tag then begins with the key of its request's answer
    run        keywords of `Engine.run`
    """
    feed = windows.feed if isinstance(windows, LiveInput) else None
    skipped = 0 if kept is None else KEY_BYTES
    with closing(engine.run(windows, task.readout, task.inputs.tokenizer, **run)) as answers:  # type: ignore[type-var]
        for packed, answer in answers:
            num_tokens, ((tag, _), *repeats) = read_tags(packed)
            if kept is not None:
                kept.keep(tag[:KEY_BYTES], answer)
            yield tag[skipped:], answer
            for again, tokens in chain(repeats, () if feed is None else feed.answered(packed)):
                if tokens:
                    asked = tokens_of(answer, tokens)
                    engine.count(requests=1, tokens=asked, repeats=1)
                    if on_repeat is not None:
                        on_repeat(asked)
                yield again[skipped:], as_known(answer, num_tokens)


def as_known(answer: EngineAnswer, num_tokens: int) -> EngineAnswer:
    """Return an answer as the answer to an equal request, for which nothing was computed. num_tokens: of the prompt"""
    if isinstance(answer, Result):
        cached = answer.cached_tokens if answer.cached_tokens is None else num_tokens
        return replace(answer, values=answer.values.copy(), cached_tokens=cached)
    if isinstance(answer, list):
        return [
            sample if sample.cached_tokens is None else replace(sample, cached_tokens=num_tokens) for sample in answer
        ]
    return answer


def same_prompt(one: Request, other: Request) -> bool:
    """Returns whether two requests read one prompt."""
    return one.namespace == other.namespace and np.array_equal(one.tokens, other.tokens)


def tokens_of(answer: EngineAnswer, num_tokens: int) -> int:
    """Returns how many tokens a request counts in Stats. num_tokens: of its prompt"""
    samples = answer if isinstance(answer, list) else ()
    return sum(num_tokens + max(0, len(sample.tokens) - 1) for sample in samples) or num_tokens


def run_works(
    engine: Engine,
    task: Any,
    works: Sequence[Any],
    *,
    window: int = 1 << 20,
    seed: int | None = None,
    on_done: Callable[[], object] | None = None,
    kept: KeptAnswers | None = None,
    **run: Any,
) -> list[list[Any] | None]:
    """Returns the results of each Work's requests, in order; None where `works` holds an InputError.

    seed     the job's seed (see `with_seed`); None: the task's, or a new one
    on_done  called for each result as it comes
    kept     has answers of earlier calls, and keeps the answers of this call; None: nothing is kept
    run      as in `results_of`
    """
    out: list[list[Any] | None] = [None if isinstance(w, InputError) else [None] * len(w.requests) for w in works]
    has_seed = seed is not None or getattr(task, "seed", None) is not None
    seed = seed_of(task) if seed is None else seed
    reads = None if kept is None else kept.of(task.readout)
    with Spool() as spool:
        for number, work in enumerate(works):
            asked = [] if isinstance(work, InputError) else work.requests
            requests = [with_seed(request, seed, number, part) for part, request in enumerate(asked)]
            keyed = [] if reads is None else reads.find(requests, asked, has_seed)
            for part, request in enumerate(requests):
                tag = _TAG.pack(number, part)
                if keyed and (answer := keyed[part].answer) is not None:
                    if part == 0 or request.sampling is not None or not same_prompt(request, requests[part - 1]):
                        engine.count(requests=1, tokens=tokens_of(answer, request.tokens.size), kept=1)
                    out[number][part] = as_known(answer, request.tokens.size)  # type: ignore[index]
                    if on_done is not None:
                        on_done()
                    continue
                spool.add(request, (keyed[part].key if keyed else b"") + tag)
        share = run.get("sharing", engine.facts.sharing) == "full"
        windows = spool.windows(max_tokens=window, share=share, joins=True)
        with closing(results_of(engine, task, windows, kept=reads, **run)) as results:  # type: ignore[type-var]
            for tag, result in results:
                number, part = _TAG.unpack(tag)
                out[number][part] = result  # type: ignore[index]
                if on_done is not None:
                    on_done()
    if kept is not None:
        kept.file.commit()
    return out


def checked(results: list[list[Any] | None]) -> list[list[Any] | None]:
    """Returns the results of `run_works` unchanged. Raises the first InputError among them."""
    for of_work in results:
        for result in of_work or ():
            if isinstance(result, InputError):
                raise result
    return results


def finish(task: Any, note: Any, results: Sequence[Any]) -> Answer:
    """Returns the task's answer to an item. Raises an InputError that is among the results, and one of code
    "not_finite" for an answer that holds NaN or infinity."""
    for result in results:
        if isinstance(result, InputError):
            raise result
    answer: Answer = task.finish(note, results)
    if not all_finite(answer):
        raise not_finite()
    return answer


def not_finite() -> InputError:
    """Return the error of a result that holds NaN or infinity."""
    remedy = 'try dtype="float32" (--dtype float32); if it stays, the weights are damaged'
    return InputError("the result is not a finite number", remedy=remedy, code="not_finite")


def finish_items(task: Any, works: Sequence[Any], results: Sequence[list[Any] | None]) -> list[Any]:
    """Returns the task's answer to each item, or the item's InputError."""
    return [
        work if isinstance(work, InputError) else attempt(finish, task, work.note, result)
        for work, result in zip(works, results, strict=True)
    ]


def run_items(engine: Engine, task: Any, items: Sequence[Any], **run: Any) -> list[Any]:
    """Returns the task's answer to each item, or the item's InputError, in order. run: keywords of `run_works`"""
    works = task.prepare(items)
    return finish_items(task, works, run_works(engine, task, works, **run))


def calibrated(engine: Engine, task: Any, **run: Any) -> Any:
    """Returns the task, calibrated if it asks for calibration. run: keywords of `run_works`"""
    items = task.calibration_items()
    return calibrated_by(task, run_items(engine, task, items, **run)) if items else task


def calibrated_by(task: Any, outputs: Sequence[Any]) -> Any:
    """Returns a task calibrated by the answers to its `calibration_items`. Raises the first InputError among them."""
    for output in outputs:
        if isinstance(output, InputError):
            raise output
    return task.with_calibration(outputs)


# -------------------------------------------------------------------------------------------- seeds


def seed_of(task: Any) -> int:
    """Return the seed of the task's options, or a new one."""
    seed = getattr(task, "seed", None)
    return draw_seed() if seed is None else seed


def draw_seed() -> int:
    """Returns a new random seed that JSON can hold exactly."""
    return secrets.randbits(53)


def with_seed(request: Request, seed: int, *place: int) -> Request:
    """Return the request; if it samples without a seed of its own, its seed is `seed_at(seed, *place)`. Equal prompts
    of a list or job then get different outputs, and the same ones when it runs again."""
    sampling = request.sampling
    if sampling is None or sampling.seed is not None or not sampling.temperature:
        return request
    return replace(request, sampling=replace(sampling, seed=seed_at(seed, *place)))
