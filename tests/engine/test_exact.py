"""The promise of exactness: every sharing mode, every cut, against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running import as_request, prompts, run
from tiny import EVERY, FAMILIES, MORE, reference, tiny_checkpoint

from prefold import LLM
from prefold.spec.requests import Readout

BUDGETS = [1, 3, 8, 1000]


@torch.inference_mode()
def oracle(folder, token_lists: list[list[int]]):
    """Hidden states after the final norm and log-probabilities of each prompt, and the tolerance of the comparison:
    1e-4, or three times what transformers differs from itself between eager and sdpa attention."""
    hidden, logits, difference = [], [], 0.0
    eager = reference(folder)
    # Gemma 2 and gpt-oss have no other attention there, because of caps and sinks.
    sdpa = eager if eager.config.model_type in ("gemma2", "gpt_oss") else reference(folder, attention="sdpa")
    for tokens in token_lists:
        ids = torch.tensor([tokens])
        out = eager(input_ids=ids, output_hidden_states=True)
        state = out.hidden_states[-1][0]
        difference = max(difference, (state - sdpa.base_model(input_ids=ids).last_hidden_state[0]).abs().max().item())
        hidden.append(state.numpy())
        logits.append(out.logits[0].numpy())
    return hidden, logits, max(1e-4, 3 * difference)


VARIANTS = [(family, {}) for family in FAMILIES] + [
    *(pytest.param((family, {}), marks=pytest.mark.slow) for family in MORE),
    ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True, "num_hidden_layers": 1}),
    ("mistral", {"sliding_window": 4}),
    ("gpt2", {"hidden_size": 35, "num_attention_heads": 5}),
    ("qwen2", {"hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": True}),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"{v[0]}-{len(v[1])}")
def model(request, tmp_path_factory):
    family, overrides = request.param
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides)
    token_lists = prompts(len(family) + len(overrides), count=9)
    return LLM(str(folder), dtype="float32", device="cpu"), token_lists, oracle(folder, token_lists)


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", BUDGETS)
@pytest.mark.parametrize("kind", ["last", "mean", "logits"])
def test_every_readout_at_every_cut(model, sharing, rows, kind):
    llm, token_lists, (hidden, logits, tolerance) = model
    ids = (3, 200, 17)
    readout = Readout(kind, ids if kind == "logits" else ())
    results = run(llm, [as_request(t) for t in token_lists], readout, sharing=sharing, rows=rows)
    for result, states, scores in zip(results, hidden, logits, strict=True):
        expected = {
            "last": states[-1],
            "mean": states.mean(0),
            "logits": scores[-1, list(ids)],
        }[kind]
        np.testing.assert_allclose(result.values, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", BUDGETS)
def test_scores_at_every_cut(model, sharing, rows):
    llm, token_lists, (_, logits, tolerance) = model
    rng = np.random.default_rng(0)
    requests, expected = [], []
    for tokens, scores in zip(token_lists, logits, strict=True):
        for _ in range(2):
            count = int(rng.integers(1, len(tokens) + 1))
            targets = np.array([*tokens[len(tokens) - count + 1 :], rng.integers(300)])
            if rng.random() < 0.5:
                targets[-1] = scores[-1].argmax()
            read = scores[len(tokens) - count :].astype(np.float64)
            top = read.max(-1, keepdims=True)
            logprobs = read - top - np.log(np.exp(read - top).sum(-1, keepdims=True))
            requests.append(as_request(tokens, targets.tolist()))
            expected.append((logprobs[np.arange(count), targets], read.argmax(-1) == targets))
    assert any(greedy.any() for _, greedy in expected)
    results = run(llm, requests, Readout("logprobs"), sharing=sharing, rows=rows)
    for result, (logprobs, greedy) in zip(results, expected, strict=True):
        np.testing.assert_allclose(result.values, logprobs, rtol=0, atol=10 * tolerance)
        np.testing.assert_array_equal(result.greedy, greedy)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("family", EVERY)
def test_every_budget_there_is(tmp_path, family, sharing):
    folder = tiny_checkpoint(tmp_path, family, num_hidden_layers=2)
    llm, token_lists = LLM(str(folder), dtype="float32", device="cpu"), prompts(7, count=5)
    hidden, _, tolerance = oracle(folder, token_lists)
    for rows in range(1, sum(map(len, token_lists)) + 1):
        results = run(llm, [as_request(t) for t in token_lists], Readout("last"), sharing=sharing, rows=rows)
        for result, states in zip(results, hidden, strict=True):
            np.testing.assert_allclose(result.values, states[-1], rtol=0, atol=tolerance)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["last", "mean", "logprobs"])
@pytest.mark.parametrize("window", [1, 7, 30])
def test_windows_do_not_change_results(model, kind, window):
    llm, token_lists, _ = model
    requests = [as_request(t, t[len(t) // 2 :] if kind == "logprobs" else None) for t in token_lists]
    whole = run(llm, requests, Readout(kind), sharing="full", rows=1000)
    for rows in (3, 1000):
        for one, other in zip(
            run(llm, requests, Readout(kind), sharing="full", rows=rows, window=window), whole, strict=True
        ):
            np.testing.assert_allclose(one.values, other.values, rtol=0, atol=2e-4)


def test_a_row_that_ends_in_infinity_does_not_reach_other_prompts(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    llm = LLM(str(folder), dtype="float32", device="cpu", executor="torch")
    with torch.no_grad():
        llm.model.embedding[7] = float("inf")
    clean = [[1, 2, 3], [1, 2, 5, 6], [9]]
    poisoned = [*clean, [1, 2, 7, 4], [7]]
    for sharing in ("full", "mlp", "off"):
        alone = run(llm, [as_request(t) for t in clean], Readout("last"), sharing=sharing, rows=100)
        together = run(llm, [as_request(t) for t in poisoned], Readout("last"), sharing=sharing, rows=100)
        for one, other in zip(alone, together, strict=False):
            np.testing.assert_allclose(one.values, other.values, rtol=0, atol=1e-5)
        assert not np.isfinite(together[3].values).all()
