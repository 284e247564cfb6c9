"""Greedy generation is transformers' generate, however it is cut, shared, squeezed or kept."""

from __future__ import annotations

import pytest
from books import check_books
from generating import ask, before_passes, engine_of, generate, reference_tokens, tokens_of, until_idle
from running import prompts
from tiny import EVERY, FAMILIES, MORE, reference, tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.engine.calls import stream
from prefold.errors import InputError, PrefoldError

MAX_TOKENS = 24
# What a family changes are its layers. That which schedules them knows of windows alone.
SCHEDULED = pytest.mark.parametrize(
    "case",
    [pytest.param(f, marks=() if f in ("llama", "gemma3") else pytest.mark.slow) for f in (*FAMILIES, *MORE)],
    indirect=True,
)


@pytest.fixture(scope="module", params=EVERY)
def case(request, tmp_path_factory):
    """(LLM, prompts, what transformers makes of them)"""
    options = {"sliding_window": 6} if request.param == "mistral" else {}
    folder = tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **options)
    llm = LLM(str(folder), dtype="float32")
    asked = prompts(5)
    return llm, asked, reference_tokens(reference(folder), asked, MAX_TOKENS)


def requests_of(asked):
    return [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked]


def test_alone(case):
    llm, asked, expected = case
    engine = engine_of(llm, kv_memory=1 << 20)
    for prompt, tokens in list(zip(asked, expected, strict=True))[::7]:
        assert tokens_of(generate(engine, requests_of([prompt]))) == [tokens]


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow), 7, 64, 4096])
@pytest.mark.parametrize("sharing", ["full", "off"])
def test_all_together(case, rows, sharing):
    llm, asked, expected = case
    engine = engine_of(llm, rows=rows, sharing=sharing, kv_memory=1 << 22)
    assert tokens_of(generate(engine, requests_of(asked))) == expected
    stats = engine.stats
    assert stats.generation.recomputed_rows <= len(asked)
    if sharing == "full" and rows == 4096:
        unique = {tuple(p[: i + 1]) for p in asked for i in range(len(p))}
        assert stats.generation.prefill_rows == len(unique)
    assert stats.generation.generated_tokens == len(asked) * MAX_TOKENS


@SCHEDULED
@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize("reserve", [True, False])
def test_little_memory(case, running, reserve):
    llm, asked, expected = case
    longest = max(map(len, asked)) + MAX_TOKENS
    engine = engine_of(llm, rows=16, slots=longest + 10, max_running=running * 4, reserve_output=reserve)
    assert tokens_of(generate(engine, requests_of(asked))) == expected
    if not reserve and running > 1:
        assert engine.stats.generation.preemptions > 0


@SCHEDULED
def test_warm_cache_and_small_windows(case):
    llm, asked, expected = case
    engine = engine_of(llm, rows=32, slots=400, cache=CacheOptions(min_overlap=0))
    assert tokens_of(generate(engine, requests_of(asked), window=20)) == expected
    before = engine.stats.generation.prefill_rows
    assert tokens_of(generate(engine, requests_of(asked))) == expected
    assert engine.stats.generation.prefill_rows - before <= len({tuple(p) for p in asked})
    turns = [[*p, *t] for p, t in zip(asked, expected, strict=True)]
    engine.generator.scheduler.cache.evict(100)
    generate(engine, requests_of([t[:-1] for t in turns]))


@SCHEDULED
def test_samples_of_one_prompt(case):
    llm, asked, _ = case
    engine = engine_of(llm, kv_memory=1 << 22)
    request = ask(asked[0], max_tokens=6, n=3, temperature=1.0, seed=7, ignore_eos=True)
    together = generate(engine, [request])[0]
    assert len({sample.tokens for sample in together}) > 1
    assert engine.stats.generation.prefill_rows == len(asked[0])
    beside = generate(engine_of(llm, rows=3, kv_memory=1 << 22), [*requests_of(asked), request])[-1]
    assert [s.tokens for s in beside] == [s.tokens for s in together]


@SCHEDULED
def test_a_request_that_cannot_run_is_an_answer(case):
    llm, asked, expected = case
    engine = engine_of(llm, slots=30)
    results = generate(engine, [*requests_of(asked[:3]), ask([5] * 40, max_tokens=4), ask([5] * 600)])
    assert tokens_of(results[:3]) == expected[:3]
    assert isinstance(results[3], InputError) and results[3].code == "kv_memory"
    assert isinstance(results[4], InputError) and results[4].code == "too_long"


@SCHEDULED
def test_stops(case):
    llm, asked, expected = case
    engine = engine_of(llm, kv_memory=1 << 22)
    stop = expected[0][3]
    at = expected[0].index(stop)
    found = generate(engine, [ask(asked[0], max_tokens=9, stop_ids=(stop,))])[0][0]
    assert list(found.tokens) == expected[0][:at]
    assert (found.finish_reason, found.stop) == ("stop", stop)


@SCHEDULED
def test_mlp_is_refused(case):
    llm, asked, _ = case
    engine = engine_of(llm, sharing="mlp")
    with pytest.raises(InputError, match="full or off"):
        generate(engine, requests_of(asked))
    ((_, answer),) = stream(engine, requests_of(asked[:1]), None)
    assert isinstance(answer, InputError) and "full or off" in str(answer)


@SCHEDULED
def test_stopping_gives_what_is_done_and_frees_the_rest(case):
    llm, asked, expected = case
    engine = engine_of(llm, rows=16, kv_memory=1 << 22, max_running=3)
    found = generate(engine, requests_of(asked), stopping=lambda: engine.stats.steps >= MAX_TOKENS + 10)
    assert 0 < sum(one is not None for one in found) < len(asked)
    assert all([list(one[0].tokens)] == [tokens] for one, tokens in zip(found, expected, strict=True) if one)
    assert tokens_of(generate(engine, requests_of(asked))) == expected
    assert engine.generator.scheduler.pool.used_slots == 0


@SCHEDULED
def test_a_step_that_fails_leaves_nothing_behind(case):
    llm, asked, expected = case
    engine = engine_of(llm, rows=16, kv_memory=1 << 22, cache=CacheOptions(min_overlap=0))
    calls = []

    def failing(tokens):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    end = before_passes(engine.worker, failing)
    with pytest.raises(PrefoldError, match="a step raised KeyboardInterrupt"):
        generate(engine, requests_of(asked))
    end()
    assert len(calls) >= 5
    until_idle(engine)
    check_books(engine.generator.scheduler)
    assert tokens_of(generate(engine, requests_of(asked))) == expected


@SCHEDULED
def test_only_tokens_of_outputs_are_counted_as_generated(case):
    llm, asked, expected = case
    engine = engine_of(llm, kv_memory=1 << 22)
    stop = expected[0][3]
    found = generate(engine, [ask(p, max_tokens=9, stop_ids=(stop,)) for p in asked])
    assert engine.stats.generation.generated_tokens == sum(len(one[0].tokens) for one in found)


@SCHEDULED
def test_requests_of_others_that_wait_hold_up_nobody(case):
    llm, asked, expected = case
    engine = engine_of(llm, kv_memory=1 << 22, max_running=2)
    others: list = []
    for request in requests_of(asked[:5]):
        engine.generator.add(request, None, others.append)
    assert tokens_of(generate(engine, requests_of(asked[5:]))) == expected[5:]
    assert tokens_of(others) == expected[:5]
