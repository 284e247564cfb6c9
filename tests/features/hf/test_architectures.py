"""Causal models of transformers, by their own modules over rows and slots: what they give is what transformers gives of
each prompt by itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import FORCED, REFUSED, TAKEN, checkpoint_of
from generating import ask, engine_of, generate
from running import as_request, prompts, run
from tiny import reference

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.errors import UnsupportedModelError
from prefold.spec.requests import SHARING_MODES, Readout

# What a quick run has: sliding windows, caps, sinks, heads of several sizes, keys of other layers, values of another
# size, experts.
QUICK = ("deepseek_v3", "gemma2", "gemma4_text", "gpt_oss")
ALL = TAKEN | FORCED
MAX_TOKENS = 24


def few(names, quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def test_there_are_many():
    assert len(TAKEN) >= 30


def test_the_page_lists_them():
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    taken, refused = (page.partition(f"<!-- {name} -->")[2].partition("<!--")[0] for name in ("taken", "refused"))
    assert re.findall("`(.+?)`", taken) == sorted(TAKEN)
    lines = [line.strip("| ").split("|") for line in refused.splitlines()[3:]]
    listed = {name: reason.strip() for names, reason in lines for name in re.findall("`(.+?)`", names)}
    assert listed == {name: reason for name, (_, reason) in REFUSED.items()}


@pytest.fixture(scope="module", params=few(ALL, QUICK))
def case(request, tmp_path_factory):
    """(LLM, prompts, transformers' model, what it gives of each prompt: hidden states and logits, the tolerance)"""
    name = request.param
    folder = checkpoint_of(tmp_path_factory.mktemp(name), name, ALL[name])
    asked = prompts(len(name), count=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFOLD_TRANSFORMERS", "all")  # also where prefold has a family of its own
        llm = LLM(str(folder), dtype="float32", device="cpu", cache=None)
    model = reference(folder)
    states, logits, difference = by_transformers(model, folder, asked)
    return llm, asked, model, states, logits, max(1e-4, 3 * difference)


@torch.inference_mode()
def by_transformers(model, folder, asked):
    """Hidden states and logits of each prompt, by eager attention, and how far transformers' other kind is from it."""
    found, difference = [], 0.0
    try:
        models = [model, reference(folder, attention="sdpa")]
    except ValueError:  # there are no others with sinks or caps
        models = [model]
    for tokens in asked:
        ids = torch.tensor([tokens])
        both = [(one.base_model(input_ids=ids)[0][0], one(input_ids=ids).logits[0]) for one in models]
        found.append(both[0])
        difference = max(difference, *((a - b).abs().max().item() for a, b in zip(both[0], both[-1], strict=True)))
    states, logits = zip(*found, strict=True)
    return [s.numpy() for s in states], [s.numpy() for s in logits], difference


def test_it_is_transformers_that_runs(case):
    llm = case[0]
    assert llm.passes == "forward passes run through transformers' modules"


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_every_readout_at_random_cuts(case, sharing):
    llm, asked, _, states, logits, tolerance = case
    ids, rng = (3, 200, 17), np.random.default_rng(len(states[0]))
    for kind in ("last", "mean", "logits"):
        readout = Readout(kind, ids if kind == "logits" else ())
        for rows in (int(rng.integers(1, 9)), 1000):
            results = run(llm, [as_request(t) for t in asked], readout, sharing=sharing, rows=rows)
            for result, hidden, scores in zip(results, states, logits, strict=True):
                each = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0), "logits": scores[-1, list(ids)]}
                np.testing.assert_allclose(result.values, each[kind], rtol=0, atol=tolerance)


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_scores_at_random_cuts(case, sharing):
    llm, asked, _, _, logits, tolerance = case
    rng = np.random.default_rng(len(asked[0]))
    requests, expected = [], []
    for tokens, scores in zip(asked, logits, strict=True):
        count = int(rng.integers(1, len(tokens) + 1))
        targets = np.array([*tokens[len(tokens) - count + 1 :], rng.integers(300)])
        logprobs = torch.from_numpy(scores[len(tokens) - count :]).double().log_softmax(-1).numpy()
        requests.append(as_request(tokens, targets.tolist()))
        expected.append(logprobs[np.arange(count), targets])
    for rows in (int(rng.integers(1, 9)), 1000):
        results = run(llm, requests, Readout("logprobs"), sharing=sharing, rows=rows)
        for result, logprobs in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.values, logprobs, rtol=0, atol=3 * tolerance)


@pytest.mark.parametrize("sharing", ["full", "off"])
def test_generation_with_preemption(case, sharing):
    llm, asked, model, _, _, tolerance = case
    options = {"slots": max(map(len, asked)) + MAX_TOKENS + 10, "max_running": 16, "reserve_output": False}
    engine = engine_of(llm, rows=16, sharing=sharing, **options)
    results = generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked])
    assert engine.stats.generation.preemptions > 0
    likeliest(model, asked, results, tolerance)


def test_generation_with_a_cache(case):
    llm, asked, model, _, _, tolerance = case
    engine = engine_of(llm, rows=32, slots=600, cache=CacheOptions(min_overlap=0))
    first = generate(engine, [ask(p, max_tokens=MAX_TOKENS, ignore_eos=True) for p in asked])
    likeliest(model, asked, first, tolerance)
    before = engine.stats.generation.prefill_rows
    turns = [[*p, *r[0].tokens, 5] for p, r in zip(asked, first, strict=True)]
    results = generate(engine, [ask(p, max_tokens=3, ignore_eos=True) for p in turns])
    # Of each turn the rows of its prompt, and of all but the last of the tokens that were generated, are there.
    assert engine.stats.generation.prefill_rows - before <= 2 * len(turns)
    likeliest(model, turns, results, tolerance)


@torch.inference_mode()
def likeliest(model, asked, results, tolerance):
    """Each token is the likeliest by transformers of what is before it, or as likely but for rounding."""
    for prompt, (sample,) in zip(asked, results, strict=True):
        tokens = list(sample.tokens)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.max(-1).values - chosen).max() <= 2 * tolerance


@pytest.mark.parametrize("name", few(REFUSED, ("bert", "bloom", "doge", "falcon", "lfm2")))
def test_what_breaks_the_rules_is_refused_with_the_reason(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PREFOLD_TRANSFORMERS", "all")
    settings, reason = REFUSED[name]
    folder = checkpoint_of(tmp_path, name, settings)
    with pytest.raises(UnsupportedModelError) as raised:
        LLM(str(folder), dtype="float32", device="cpu")
    assert f"cannot run through transformers' modules: {reason}" in str(raised.value)
