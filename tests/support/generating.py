"""Generating with an engine, and with transformers, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import torch
from books import check_books

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.features.images.scheduler import ImageScheduler
from prefold.spec.requests import Generated, Readout, Request, Sampling
from prefold.trie import Spool
from prefold.worker.native.worker import NativeWorker
from prefold.worker.parts import native_parts, parts_of
from prefold.worker.torch.worker import TorchWorker


def image_scheduler(engine: ModelEngine) -> ImageScheduler:
    """Returns what sees to it that an engine's worker has the rows of images."""
    return engine.part(ImageScheduler)


def bytes_held(scheduler: ImageScheduler) -> int:
    """The bytes of the rows that are kept."""
    return sum(rows.size for rows in scheduler._encoded.values())


def engine_of(
    llm: LLM,
    *,
    rows: int = 4096,
    sharing: str = "full",
    slots: int | None = None,
    media=None,
    cache_prefill: bool = False,
    **options,
) -> ModelEngine:
    """An engine over the model and adapters of `llm`, with a KV store of its own. media: its table of images."""
    if slots is not None:
        options["kv_memory"] = (slots + 1) * llm.engine.worker.facts.slot_bytes
    generation, eos_ids = GenerateOptions(**options), llm.engine.options.eos_ids
    return ModelEngine(
        worker_of(llm),
        EngineOptions(
            sharing=sharing, max_batch_rows=rows, generation=generation, eos_ids=eos_ids, cache_prefill=cache_prefill
        ),
        resources=[] if media is None else [media],
    )


def worker_of(llm: LLM) -> NativeWorker | TorchWorker:
    """Another worker of the model and the adapters of `llm`."""
    adapters = llm.engine.worker.adapters
    if isinstance(llm.engine.worker, NativeWorker):
        return NativeWorker(llm.model, adapters, parts=native_parts(llm.model, llm.checkpoint))
    return TorchWorker(llm.model, adapters, parts=parts_of(llm.model, llm.checkpoint))


def before_passes(worker: NativeWorker | TorchWorker, act: Callable[[np.ndarray], object]) -> Callable[[], None]:
    """Lets `act` see the tokens of each forward pass of a worker before it; it may raise. Returns what ends that."""
    if isinstance(worker, TorchWorker):
        hook = worker.model.register_forward_pre_hook(lambda model, given: act(given[0].numpy()) and None)
        return hook.remove
    program = worker.program
    call = program._call

    def watched(step) -> None:
        act(step.batch.tokens)
        call(step)

    program._call = watched
    return lambda: program.__dict__.pop("_call")


@contextmanager
def slowed(worker: NativeWorker | TorchWorker, seconds: float = 0.002) -> Iterator[None]:
    """Lets each step of a worker take so much longer: models of tests are through before anybody can stop them."""
    start = worker.start

    def later(*given, **named):
        time.sleep(seconds)
        return start(*given, **named)

    worker.start = later
    try:
        yield
    finally:
        del worker.start


def generate(engine: ModelEngine, requests: list[Request], tokenizer=None, window: int = 1 << 20, **options) -> list:
    """What each request gave, in order."""
    results: list = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, str(number).encode())
        windows = spool.windows(max_tokens=window, share=engine.facts.sharing == "full")
        for tag, result in engine.run(windows, Readout("tokens"), tokenizer, **options):
            assert results[int(tag)] is None
            results[int(tag)] = result
    engine.call(lambda: check_books(engine.generator.scheduler))
    return results


def until_idle(engine: ModelEngine) -> None:
    """Waits until the engine's thread has ended all that was cancelled."""
    while engine.generator.has_work:
        time.sleep(0.001)


class AtOnce:
    """In place of a pool of threads: what it is given is done when `submit` returns."""

    def submit(self, function) -> Future:
        future: Future = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


def ask(tokens, **sampling) -> Request:
    return Request(np.array(tokens, np.int32), sampling=Sampling(**sampling))


def tokens_of(results: list[list[Generated]]) -> list[list[int]]:
    return [list(samples[0].tokens) for samples in results]


@torch.inference_mode()
def reference_tokens(model, prompts: list[list[int]], max_tokens: int, eos_ids=()) -> list[list[int]]:
    """Greedy output of transformers' generate, one prompt at a time."""
    out = []
    for prompt in prompts:
        config = model.generation_config
        config.do_sample, config.eos_token_id = False, list(eos_ids) or None
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        out.append([i for i in ids if i not in eos_ids])
    return out
