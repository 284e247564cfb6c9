"""Ctrl-C at any moment of a call: the next call works, and the books balance."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from books import check_books
from generating import until_idle
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.tasks.run import run_items

TEXTS = [f"Question {i}: what is {i} and {i * i}? Answer:" for i in range(12)]
SMALL = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def generate(llm: LLM) -> list[list[int]]:
    return [list(one.tokens) for one in llm.generate(TEXTS, max_tokens=12, ignore_eos=True)]


def stream(llm: LLM) -> str:
    return "".join(piece.text for piece in llm.stream(TEXTS[0], max_tokens=30, ignore_eos=True))


def embed(llm: LLM) -> list[list[float]]:
    return np.round(llm.embed(TEXTS), 4).tolist()


CALLS = (generate, stream, embed)


@pytest.mark.parametrize("interrupts", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_the_next_call_works(tmp_path, interrupts):
    """Embeddings are read in the slots of generation, so that all three share its books."""
    llm = LLM(
        str(tiny_checkpoint(tmp_path, "llama", intermediate_size=8, **SMALL)), dtype="float32", device="cpu",
        kv_memory=1 << 18, cache_prefill=True, max_batch_rows=64,
    )  # fmt: skip
    wanted, seconds = {}, {}
    for call in CALLS * 2:
        started = time.perf_counter()
        wanted[call] = call(llm)
        seconds[call] = time.perf_counter() - started
    rng, met = random.Random(0), 0

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while met < interrupts:
            call = rng.choice(CALLS)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.01, 0.95) * seconds[call])
                try:
                    call(llm)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                continue
            except KeyboardInterrupt:
                met += 1
            other = rng.choice(CALLS)
            assert other(llm) == wanted[other], f"interrupt {met}, {call.__name__} and then {other.__name__}"
            llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))
    finally:
        signal.signal(signal.SIGALRM, before)
    until_idle(llm.engine)
    llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_caller_whose_own_function_fails_after_a_step_harms_no_other(tmp_path, steps):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama", **SMALL)), dtype="float32", device="cpu", kv_memory=1 << 18)
    wanted, told = generate(llm), []

    def listen(step) -> None:
        told.append(step)
        if len(told) == steps:
            raise RuntimeError("the listener's own")

    task = llm.task("generate", max_tokens=12, ignore_eos=True)
    with pytest.raises(RuntimeError, match="own"):
        run_items(llm.engine, task, [{"prompt": text} for text in TEXTS], on_step=listen)
    assert generate(llm) == wanted
    until_idle(llm.engine)
    llm.engine.call(lambda: check_books(llm.engine.generator.scheduler))


@pytest.mark.parametrize("close", [True, False])
def test_what_agenerate_used_is_freed(tmp_path, close):
    folder = str(tiny_checkpoint(tmp_path, "llama", **SMALL))
    threads = threading.active_count()
    llm = LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 18)
    asyncio.run(llm.agenerate("some text", max_tokens=2))
    model = weakref.ref(llm.model)
    if close:
        llm.close()
    del llm
    for _ in range(400):
        gc.collect()
        if model() is None and threading.active_count() <= threads:
            break
        time.sleep(0.05)
    assert model() is None and threading.active_count() <= threads


def test_a_call_that_nobody_has_any_more_is_ended(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama", **SMALL)), dtype="float32", device="cpu", kv_memory=1 << 18)
    pieces = llm.stream(TEXTS[0], max_tokens=200, ignore_eos=True)
    next(pieces)
    assert llm.engine.generator.has_work
    del pieces
    gc.collect()
    until_idle(llm.engine)
