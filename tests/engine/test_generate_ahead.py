"""Steps of generation that are planned while the one before runs: what comes is what comes of one step at a time.

On a CPU; `test_on_gpu` goes through Triton."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from ahead import ASKED, generated, watch_steps
from books import check_books
from running import prompts
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.samples import TextPiece
from prefold.errors import OutOfMemoryError
from prefold.spec.requests import Readout, Request, Sampling
from prefold.worker.torch.worker import TorchWorker

# Outputs of three tokens only, so that they meet prompts: what is kept of them is then a prompt's.
BIAS = tuple((token, 60.0) for token in (1, 2, 3))
OUT_OF_MEMORY = 0.05


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(
        str(tiny_checkpoint(tmp_path_factory.mktemp("traces"), "qwen3")), dtype="float32", cache="off", executor="torch"
    )


def engine_of(llm: LLM, *, rows: int = 24, ahead: bool = False, **options) -> ModelEngine:
    generation = GenerateOptions(**{"kv_memory": 1 << 20} | options)
    worker = TorchWorker(llm.model, depth=2 if ahead else 1)
    return ModelEngine(worker, EngineOptions(max_batch_rows=rows, generation=generation))


def random_sampling(rng: random.Random) -> Sampling:
    options: dict = {"temperature": rng.choice([0.0, 1.0, 2.0]), "n": rng.choice([1, 1, 1, 2, 3])}
    options |= {"max_tokens": rng.randint(1, 14), "seed": rng.randint(0, 9999), "ignore_eos": True, "logit_bias": BIAS}
    if rng.random() < 0.6:
        options["stop_ids"] = (rng.choice([1, 2, 3]),)
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, options["max_tokens"])
    if rng.random() < 0.2:
        options["top_k"] = 2
    if rng.random() < 0.12:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.08:
        options["logprobs"] = 2
    return Sampling(**options)


def said(samples) -> list:
    return [(sample.tokens, sample.finish_reason, sample.stop) for sample in samples]


def alone(llm: LLM, prompt: np.ndarray, asked):
    """What a request gives when it runs by itself, one step after the other."""
    generator, answers = engine_of(llm).generator, []
    submit(generator, prompt, asked, answers.append)
    while generator.step():
        pass
    return answers[0]


def submit(generator, prompt: np.ndarray, asked, on_done) -> int:
    if asked is None:
        return generator.add(Request(prompt, None), None, on_done, readout=Readout("last"))
    return generator.add(Request(prompt, sampling=asked), None, on_done)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 60), marks=pytest.mark.slow)], ids=len)
def test_traces(llm, seeds, ahead):
    for seed in seeds:
        run_trace(llm, random.Random(seed), ahead)


def run_trace(llm: LLM, rng: random.Random, ahead: bool) -> None:
    """Little memory, a radix cache, probes, cancels from outside and from callbacks, steps that find no memory, and
    statistics that begin anew."""
    slot = llm.engine.worker.facts.slot_bytes
    cache = rng.choice([None, CacheOptions(min_overlap=0), CacheOptions(min_overlap=2, max_tokens=9)])
    engine = engine_of(
        llm, ahead=ahead, reserve_output=rng.random() < 0.5, cache=cache, kv_memory=rng.choice([60, 90, 400]) * slot,
        max_running=rng.choice([3, 6, 20]), rows=rng.choice([7, 24]),
    )  # fmt: skip
    generator = engine.generator
    todo = [
        (
            np.array(rng.choices([1, 2, 3], k=rng.randint(1, 9)), np.int32),
            random_sampling(rng) if rng.random() < 0.85 else None,
        )
        for _ in range(rng.randint(3, 12))
    ]
    answers: dict[int, object] = {}
    keys: dict[int, int] = {}
    cancelled: set[int] = set()
    short, start = rng.choice([0, 0, OUT_OF_MEMORY]), engine.worker.start

    def sometimes_too_large(step, prepared=None):
        if rng.random() < short:
            raise OutOfMemoryError("made up")
        return start(step, prepared)

    engine.worker.start = sometimes_too_large

    def cancel_one() -> None:
        number = rng.choice(list(keys))
        if number not in answers:
            cancelled.add(number)
            generator.cancel(keys[number])

    def told(number: int):
        def on_done(answer) -> None:
            assert number not in answers, "answered twice"
            answers[number] = answer
            if keys and rng.random() < 0.1:
                cancel_one()

        return on_done

    waiting = list(enumerate(todo))
    for _ in range(3000):
        for number, (prompt, asked) in waiting[: (arriving := rng.randint(0, 3))]:
            keys[number] = submit(generator, prompt, asked, told(number))
        waiting = waiting[arriving:]
        if keys and rng.random() < 0.04:
            cancel_one()
        if rng.random() < 0.05:
            engine.reset_stats()
        with suppress(OutOfMemoryError):  # in a step of one row
            generator.step()
        check_books(generator.scheduler)
        assert len(generator.in_flight) <= 1
        if not waiting and not generator.has_work:
            break
    else:
        raise AssertionError("the work does not end")
    kept = generator.scheduler.cache.rows if cache else 0
    assert generator.scheduler.pool.used_slots == kept
    for number, (prompt, asked) in enumerate(todo):
        if number in cancelled:
            continue
        wanted = alone(llm, prompt, asked)
        if asked is None:
            np.testing.assert_allclose(answers[number].values, wanted.values, atol=1e-4)
        else:
            assert said(answers[number]) == said(wanted)


@pytest.mark.parametrize("which", [*range(6), "all"])
def test_a_step_is_planned_while_the_one_before_runs(llm, which, monkeypatch):
    some = ASKED[::-1] if which == "all" else [ASKED[which]] * 2
    wanted, engine = generated(llm, some, ahead=False)
    assert engine.stats.generation.discarded_rows == 0
    begun = watch_steps(monkeypatch)
    found, engine = generated(llm, some, ahead=True)
    assert found == wanted
    assert any(begun) or which == 5, "no step was begun before the one before was over"
    stats = engine.stats
    assert stats.generation.generated_tokens == sum(len(tokens) for answer in found for tokens, _, _ in answer)
    in_vain = stats.generation.discarded_rows + stats.generation.recomputed_rows
    assert stats.rows_computed == stats.unique_tokens + in_vain
    if which == 3:
        assert stats.generation.discarded_rows > 0


def test_looking_ahead_with_little_memory(llm):
    """Where outputs grow until there is no room, what runs is waited for before anybody makes room."""
    some = [Sampling(max_tokens=22, ignore_eos=True)] * 2
    slot = llm.engine.worker.facts.slot_bytes
    options = {"reserve_output": False, "kv_memory": 50 * slot}
    wanted, engine = generated(llm, some, ahead=False, **options)
    found, other = generated(llm, some, ahead=True, **options)
    assert found == wanted
    assert engine.stats.generation.preemptions and other.stats.generation.preemptions


def test_a_request_that_is_cancelled_while_its_step_runs(llm):
    engine = engine_of(llm, ahead=True)
    generator = engine.generator
    answers: dict[int, list] = {}
    keys = [
        generator.add(
            Request(np.array(prompt, np.int32), sampling=Sampling(max_tokens=8, ignore_eos=True)),
            None,
            lambda answer, number=number: answers.update({number: answer}),
        )
        for number, prompt in enumerate(prompts(4, count=3)[:3])
    ]
    for _ in range(6):
        generator.step()
    assert generator.in_flight
    generator.cancel(keys[1])
    while generator.step():
        check_books(generator.scheduler)
    assert answers[1][0].finish_reason == "cancelled"
    assert [len(answers[number][0].tokens) for number in (0, 2)] == [8, 8]
    assert generator.scheduler.pool.used_slots == 0


def test_a_sample_whose_text_cancels_its_own_request(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path)), dtype="float32", cache="off", executor="torch")
    generator, answers, keys = llm.engine.generator, [], []
    request = Request(np.array([5, 6, 7], np.int32), sampling=Sampling(max_tokens=20, n=2, ignore_eos=True))
    told = []
    listen = lambda piece: told.append(piece.text) or generator.cancel(keys[0])  # noqa: E731
    keys.append(generator.add(request, llm.tokenizer, answers.append, listen))
    while generator.step():
        check_books(generator.scheduler)
    assert [sample.finish_reason for sample in answers[0]] == ["cancelled", "cancelled"]
    first, second = (len(sample.tokens) for sample in answers[0])
    assert first == second, "the step in which it was cancelled gives each of them its token, and none follows"
    assert told and llm.engine.stats.generation.generated_tokens == first + second


@pytest.mark.parametrize("ahead", [True, False])
def test_a_text_whose_function_fails_ends_alone(tmp_path, ahead):
    """It is answered with the error; the others in its step get their answers."""
    llm = LLM(str(tiny_checkpoint(tmp_path)), dtype="float32", cache="off", executor="torch")
    generator = engine_of(llm, ahead=ahead).generator

    def fail(piece: TextPiece) -> None:
        raise RuntimeError("no longer there")

    request = Request(np.array([5, 6, 7], np.int32), sampling=Sampling(max_tokens=6, ignore_eos=True))
    answers: dict[str, list] = {}
    for name, told in (("before", None), ("failing", fail), ("after", None)):
        generator.add(request, llm.tokenizer, lambda answer, name=name: answers.update({name: answer}), told)
    while generator.step():
        check_books(generator.scheduler)
    assert isinstance(answers["failing"], RuntimeError)
    assert len(answers["before"][0].tokens) == len(answers["after"][0].tokens) == 6
    assert generator.scheduler.pool.used_slots == 0 and not generator.has_work


def test_a_call_leaves_no_step_behind(llm):
    """What a call began is counted there, though its last answers come before its last step is over."""
    engine = engine_of(llm, ahead=True)
    for _ in range(2):
        engine.reset_stats()
        answers: list = []
        sampling = ASKED[3]
        for prompt in prompts(4)[:3]:
            engine.generator.add(Request(np.array(prompt, np.int32), sampling=sampling), None, answers.append)
        while len(answers) < 3:
            engine.generator.step()
        stats, generation = engine.stats, engine.stats.generation
        assert not engine.generator.has_work
        assert stats.steps == generation.steps
        assert stats.rows_computed == generation.prefill_rows + generation.decode_rows
        assert stats.unique_tokens == stats.rows_computed - generation.discarded_rows - generation.recomputed_rows
