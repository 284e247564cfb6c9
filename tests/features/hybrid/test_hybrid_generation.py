"""Generation by hybrids: tokens against transformers, with preemption and a cache; rows and states are counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as once
from functools import partial

import numpy as np
import pytest
from ahead import ASKED, generated
from books import check_books
from generating import ask, before_passes, engine_of, generate, reference_tokens, tokens_of, until_idle
from hybrids import HYBRIDS, hidden_states, hybrid_checkpoint, state_bytes
from running import as_request, prompts
from tiny import reference

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.spec.requests import Namespace, Owner, Readout
from prefold.trie import Spool

CACHE = CacheOptions(min_overlap=1)


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request, tmp_path_factory):
    folder = hybrid_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return LLM(str(folder), dtype="float32", cache=CACHE), reference(folder)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(hybrid_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2")), dtype="float32", cache=CACHE)


@once
def greedy(model, seed: int) -> list[list[int]]:
    """What transformers continues `prompts` of a seed with."""
    return reference_tokens(model, prompts(seed), 6)


def few_states(llm: LLM, states: int | None) -> dict:
    return {} if states is None else {"state_memory": (states + 1) * state_bytes(llm)}


@pytest.mark.parametrize(
    ("rows", "cache", "slots", "states", "running"),
    [(4096, None, None, None, 256), (5, None, None, None, 256), (3, CACHE, None, None, 256), (4096, CACHE, None, 9, 4),
     (7, CACHE, 60, 4, 3), (16, None, 40, 3, 3), (2, CACHE, 80, 5, 2)],
)  # fmt: skip
def test_tokens_are_those_of_transformers(pair, rows, cache, slots, states, running):
    llm, model = pair
    options = {"max_running": running, "reserve_output": False, "cache": cache} | few_states(llm, states)
    engine = engine_of(llm, rows=rows, slots=slots, **options)
    texts = prompts(5)
    expected = greedy(model, 5)
    for _ in range(2):  # with a cache the second time meets the rows of the first
        asked = [ask(text, max_tokens=6, temperature=0, ignore_eos=True) for text in texts]
        assert tokens_of(generate(engine, asked)) == expected
    if states is not None:
        assert 0 < engine.stats.state_bytes_peak <= states * state_bytes(llm)


def test_preempted_sequences_go_on(pair):
    llm, model = pair
    texts = [text[:9] for text in prompts(6, count=8)]
    engine = engine_of(llm, rows=16, slots=60, reserve_output=False, **few_states(llm, 12))
    asked = [ask(text, max_tokens=20, temperature=0, ignore_eos=True) for text in texts]
    assert tokens_of(generate(engine, asked)) == reference_tokens(model, texts, 20)
    assert engine.stats.generation.preemptions > 0


def test_a_prefix_is_shared_from_the_third_request_on(llm):
    """The first request leaves no state where the second one branches off; the second one does, at any depth."""
    engine = engine_of(llm, cache=CACHE)
    shared = np.random.default_rng(2).integers(3, 300, 40).tolist()
    rows, cached = [], []
    for own in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [7, 8, 9], [7, 8, 9, 10]):
        before = engine.stats.rows_computed
        [[answer]] = generate(engine, [ask([*shared, *own], max_tokens=1, temperature=0)])
        rows.append(engine.stats.rows_computed - before)
        cached.append(answer.cached_tokens)
    # The same prompt once more computes its last row again; a prompt that goes on goes on from the row above that.
    assert rows == [43, 43, 3, 1, 2]
    assert cached == [0, 0, 40, 42, 42]


def test_a_conversation_goes_on_from_the_state_of_its_answer(llm):
    engine = engine_of(llm, cache=CACHE)
    prompt = np.random.default_rng(3).integers(3, 300, 30).tolist()
    [[first]] = generate(engine, [ask(prompt, max_tokens=8, temperature=0, ignore_eos=True)])
    before = engine.stats.rows_computed
    generate(engine, [ask([*prompt, *first.tokens, 5, 6], max_tokens=1, temperature=0)])
    assert engine.stats.rows_computed - before == 3  # the answer's last token, and the new ones


def test_samples_of_one_prompt_start_from_its_state(llm):
    engine = engine_of(llm, max_running=2)
    prompt = np.random.default_rng(4).integers(3, 300, 50).tolist()
    [samples] = generate(engine, [ask(prompt, max_tokens=4, temperature=1.0, seed=1, n=5, ignore_eos=True)])
    assert len({tuple(sample.tokens) for sample in samples}) > 1
    # Samples that are admitted later compute the prompt's last row again.
    assert engine.stats.rows_computed <= 50 + 5 * 3 + 3


def test_steps_planned_ahead_give_the_same(llm):
    llm = LLM(llm.checkpoint, dtype="float32", executor="torch")  # the native executor's steps are over at once
    assert generated(llm, ASKED, ahead=True)[0] == generated(llm, ASKED, ahead=False)[0]


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_numbers_are_read_in_slots(pair, kind):
    llm, model = pair
    texts = prompts(7)
    engine = engine_of(llm, rows=9, cache=CACHE)
    results = [None] * len(texts)
    with Spool() as spool:
        for number, text in enumerate(texts):
            spool.add(as_request(text), str(number).encode())
        windows = spool.windows(max_tokens=1 << 20, share=True)
        for tag, result in engine.run(windows, Readout(kind), owner=Owner()):
            results[int(tag)] = result
    for result, states in zip(results, hidden_states(model, texts), strict=True):
        expected = states[-1] if kind == "last" else states.mean(0)
        assert np.abs(result.values - expected).max() < 1e-4


def test_salts_share_nothing(llm):
    engine = engine_of(llm, cache=CACHE)
    asked = ask(list(range(3, 33)), max_tokens=1, temperature=0)
    for salt in ("a", "b"):
        before = engine.stats.rows_computed
        generate(engine, [replace(asked, namespace=Namespace(salt=salt))])
        assert engine.stats.rows_computed - before == 30


def test_too_little_memory_for_states_is_refused(llm):
    engine = engine_of(llm, state_memory=state_bytes(llm))
    with pytest.raises(InputError, match="state_memory"):
        generate(engine, [ask([3, 4], max_tokens=2)])


def test_a_step_that_fails_changes_no_state(pair):
    """The requests beside the one that a step fails for go on with the states that they had before the step."""
    llm, model = pair
    texts = [text for text in prompts(9) if 299 not in text]
    bad = [*texts[0], 299, 5]
    engine = engine_of(llm, rows=24, cache=CACHE, **few_states(llm, 30))

    def failing(tokens):
        if (tokens == 299).any():
            raise ValueError("token 299")

    end = before_passes(engine.worker, failing)
    asked = [ask(text, max_tokens=8, temperature=0, ignore_eos=True) for text in texts]
    answers: dict[int, object] = {}
    for number, request in enumerate([*asked[:4], ask(bad, max_tokens=3), *asked[4:]]):
        engine.call(partial(engine.generator.add, request, None, partial(answers.__setitem__, number)))
    until_idle(engine)
    end()
    assert isinstance(answers.pop(4), ValueError)
    expected = reference_tokens(model, texts, 8)
    assert sum(299 in tokens for tokens in expected) < 3
    for (_, answer), tokens in zip(sorted(answers.items()), expected, strict=True):
        if 299 in tokens[:-1]:  # it makes the token itself
            assert isinstance(answer, ValueError)
        else:
            assert list(answer[0].tokens) == tokens
    engine.call(lambda: check_books(engine.generator.scheduler))
