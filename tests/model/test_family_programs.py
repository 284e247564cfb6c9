"""Families of prefold's own, one tiny random checkpoint each: what the native executor gives at any cut is what
transformers gives of each prompt by itself, PyTorch's executor gives the same, and no company changes a bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from generating import ask, engine_of, generate
from invariance import bits
from running import as_request, prompts, run
from tiny import reference

from prefold import LLM, InputError
from prefold.engine.cache import CacheOptions
from prefold.features.hybrid.steps import StateFacts
from prefold.spec.requests import Readout

TOLERANCE = 1e-4
MAX_TOKENS = 24
IDS = (3, 200, 17)


@pytest.fixture(scope="module", params=PROGRAMS)
def case(request, tmp_path_factory):
    """(LLM, prompts, transformers' model, its hidden states and logits of each prompt)"""
    name = request.param
    folder = checkpoint_of(tmp_path_factory.mktemp(name), name, PROGRAMS[name])
    asked, model = prompts(len(name), count=9), reference(folder)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([tokens])).logits[0].numpy() for tokens in asked]
        found = [model.base_model(input_ids=torch.tensor([tokens])) for tokens in asked]
    states = [one.last_hidden_state[0].numpy() for one in found]
    with LLM(str(folder), dtype="float32", cache=None) as llm:
        yield llm, asked, model, states, logits


def check_readouts(llm: LLM, asked: list[list[int]], states, logits, sharing: str, rows: int) -> None:
    requests = [as_request(tokens) for tokens in asked]
    for kind in ("last", "mean", "logits"):
        readout = Readout(kind, IDS if kind == "logits" else ())
        for result, hidden, scores in zip(
            run(llm, requests, readout, sharing=sharing, rows=rows), states, logits, strict=True
        ):
            each = {"last": hidden[-1], "mean": hidden.mean(0), "logits": scores[-1, list(IDS)]}
            np.testing.assert_allclose(result.values, each[kind], rtol=0, atol=TOLERANCE)


def test_it_is_a_program(case):
    llm = case[0]
    assert llm.executor == "native"
    assert "transformers" not in (llm.passes or "")


@pytest.mark.parametrize("sharing", ["full", "off"])
def test_readouts_at_random_cuts(case, sharing):
    llm, asked, _, states, logits = case
    for rows in (int(np.random.default_rng(len(states[0])).integers(1, 9)), 1000):
        check_readouts(llm, asked, states, logits, sharing, rows)


def test_rows_computed_are_the_unique_tokens(case):
    llm, asked, _, _, _ = case
    before = llm.stats.rows_computed
    run(llm, [as_request(tokens) for tokens in asked], Readout("last"), sharing="full", rows=7)
    assert llm.stats.rows_computed - before == len(
        {tuple(tokens[: end + 1]) for tokens in asked for end in range(len(tokens))}
    )


def test_states_of_one_path_are_held(case):
    """Those of its branch points, the one at the cut, and the one at the end of the window before."""
    llm, asked, *_ = case
    if not llm.config.has_states:
        return
    size = llm.engine.worker.facts.of(StateFacts).state_bytes
    shapes = [part.shape for number in range(llm.config.layers) for part in llm.config.states(number)]
    assert size == 4 * sum(map(math.prod, shapes))
    llm.engine.reset_stats()
    run(llm, [as_request(tokens) for tokens in asked], Readout("last"), sharing="full", rows=7)
    assert 0 < llm.engine.stats.state_bytes_peak <= (most_branches(asked) + 2) * size


def most_branches(asked: list[list[int]]) -> int:
    """The most places on the path of a prompt where prompts part, or where one ends."""
    after = dict[tuple[int, ...], set[int]]()
    for tokens in asked:
        for end in range(len(tokens) + 1):
            after.setdefault(tuple(tokens[:end]), set()).add(tokens[end] if end < len(tokens) else -1)
    return max(sum(len(after[tuple(tokens[:end])]) > 1 for end in range(len(tokens))) for tokens in asked)


def test_generation_with_preemption_and_a_cache(case):
    llm, asked, model, _, _ = case
    options = {"slots": max(map(len, asked)) + MAX_TOKENS + 10, "max_running": 16, "reserve_output": False}
    engine = engine_of(llm, rows=16, **options)
    likeliest(model, asked, generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked]))
    assert engine.stats.generation.preemptions > 0
    engine = engine_of(llm, rows=32, slots=600, cache=CacheOptions(min_overlap=0))
    first = generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked])
    likeliest(model, asked, first)
    turns = [[*p, *r[0].tokens, 5] for p, r in zip(asked, first, strict=True)]
    likeliest(model, turns, generate(engine, [ask(p, max_tokens=3, ignore_eos=True) for p in turns]))


@torch.inference_mode()
def likeliest(model, asked, results):
    """Each token is the likeliest by transformers of what is before it, or as likely but for rounding."""
    for prompt, (sample,) in zip(asked, results, strict=True):
        tokens = list(sample.tokens)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.max(-1).values - chosen).max() <= 2 * TOLERANCE


def test_the_executor_of_pytorch(case):
    llm, asked, _, states, logits = case
    with LLM(str(llm.checkpoint.path), dtype="float32", cache=None, executor="torch") as other:
        check_readouts(other, asked, states, logits, "full", 5)


def test_no_company_changes_a_bit(case):
    llm, asked, *_ = case
    try:
        other = LLM(str(llm.checkpoint.path), dtype="float32", invariant=True)
    except InputError as error:
        assert "Mamba" in str(error)
        return

    def answers(of: list[list[int]]) -> list:
        generated = other.generate(of, max_tokens=3, temperature=0, logprobs=1, ignore_eos=True)
        return [bits(one) for one in zip(generated, other.embed(of), strict=True)]

    with other:
        found = answers(asked)
        assert all(answers([asked[number]]) == [found[number]] for number in (0, 3, 8))
