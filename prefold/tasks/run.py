"""Run a task's items through an engine, in memory: for the methods of LLM, direct answers, samples and probes."""

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

_TAG = struct.Struct("<qq")  # index of the work, index of the request in the work


def results_of(
    engine: Engine,
    task: Any,
    windows: Iterable[Window | None] | LiveInput,
    *,
    on_repeat: Callable[[int], object] | None = None,
    kept: KeptReads | None = None,
    **run: Any,
) -> Iterator[tuple[bytes, Any]]:
    """Yield (tag, result) of every request as soon as the result exists. Equal requests are computed once.

    A result is a Result, a list of Generated for generated text, or the InputError of a request that cannot run.

    Args:
        engine: The engine.
        task: The task of the requests.
        windows: Windows of a spool with joins=True, or a LiveInput whose feed joins.
        on_repeat: Called with the number of prompt tokens for each request that gets the answer of an equal request.
        kept: Keeps the answers. Each tag then starts with the key of the answer.
        run: Keywords of `Engine.run`.
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
    """Return a known answer as the answer to an equal request that needed no computation.

    Args:
        num_tokens: The number of tokens of the prompt. All of them count as cached.
    """
    if isinstance(answer, Result):
        cached = answer.cached_tokens if answer.cached_tokens is None else num_tokens
        return replace(answer, values=answer.values.copy(), cached_tokens=cached)
    if isinstance(answer, list):
        return [
            sample if sample.cached_tokens is None else replace(sample, cached_tokens=num_tokens) for sample in answer
        ]
    return answer


def same_prompt(one: Request, other: Request) -> bool:
    """Return whether two requests read the same prompt."""
    return one.namespace == other.namespace and np.array_equal(one.tokens, other.tokens)


def tokens_of(answer: EngineAnswer, num_tokens: int) -> int:
    """Return how many tokens a request adds to Stats.

    Args:
        num_tokens: The number of tokens of the request's prompt.
    """
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
    """Return the results of each Work's requests, in order. The entry of an InputError among `works` is None.

    Args:
        engine: The engine.
        task: The task that made the works.
        works: Works, or InputErrors.
        window: Maximum tokens of a window.
        seed: The job's seed (see `with_seed`); None: the task's, or a new one.
        on_done: Called for each result.
        kept: Has the answers of earlier calls, and keeps the new ones; None: nothing is kept.
        run: As in `results_of`.
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
    """Return the results of `run_works` unchanged. Raise the first InputError among them."""
    for of_work in results:
        for result in of_work or ():
            if isinstance(result, InputError):
                raise result
    return results


def finish(task: Any, note: Any, results: Sequence[Any]) -> Answer:
    """Return the task's answer to an item.

    Raise the first InputError among the results, and an InputError of code "not_finite" for an answer with NaN or
    infinity.
    """
    for result in results:
        if isinstance(result, InputError):
            raise result
    answer: Answer = task.finish(note, results)
    if not all_finite(answer):
        raise not_finite()
    return answer


def not_finite() -> InputError:
    """Return the error of a result that has NaN or infinity."""
    remedy = 'try dtype="float32" (--dtype float32); if the error stays, the weights are damaged'
    return InputError("the result is not a finite number", remedy=remedy, code="not_finite")


def finish_items(task: Any, works: Sequence[Any], results: Sequence[list[Any] | None]) -> list[Any]:
    """Return the task's answer to each item, or the item's InputError."""
    return [
        work if isinstance(work, InputError) else attempt(finish, task, work.note, result)
        for work, result in zip(works, results, strict=True)
    ]


def run_items(engine: Engine, task: Any, items: Sequence[Any], **run: Any) -> list[Any]:
    """Return the task's answer to each item, or the item's InputError, in order.

    Args:
        run: Keywords of `run_works`.
    """
    works = task.prepare(items)
    return finish_items(task, works, run_works(engine, task, works, **run))


def calibrated(engine: Engine, task: Any, **run: Any) -> Any:
    """Return the task, calibrated if it asks for calibration.

    Args:
        run: Keywords of `run_works`.
    """
    items = task.calibration_items()
    return calibrated_by(task, run_items(engine, task, items, **run)) if items else task


def calibrated_by(task: Any, outputs: Sequence[Any]) -> Any:
    """Return a task calibrated by the answers to its `calibration_items`. Raise the first InputError among them."""
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
    """Return a new random seed of 53 bits, which JSON can hold exactly."""
    return secrets.randbits(53)


def with_seed(request: Request, seed: int, *place: int) -> Request:
    """Return the request with the seed `seed_at(seed, *place)`, if it samples and has no seed of its own.

    So equal prompts of a list or job get different outputs, and the same outputs if the list or job runs again.
    """
    sampling = request.sampling
    if sampling is None or sampling.seed is not None or not sampling.temperature:
        return request
    return replace(request, sampling=replace(sampling, seed=seed_at(seed, *place)))
