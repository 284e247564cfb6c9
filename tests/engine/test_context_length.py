"""context_length: the longest sequence that there may be, and with LongRoPE the rotary factors of all sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from generating import ask, engine_of, generate, reference_tokens, tokens_of
from running import as_request, run
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.errors import CheckpointError, InputError
from prefold.spec.requests import Readout

TRAINED = 16
STEM = list(range(10, 10 + TRAINED - 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rope = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0]}
    rope |= {"long_factor": [1.0, 2.5, 6.0], "attention_factor": None}
    folder = tmp_path_factory.mktemp("model")
    trained = {"original_max_position_embeddings": TRAINED}
    return tiny_checkpoint(folder, "phi3-long", sliding_window=None, rope_parameters=rope, **trained)


@pytest.mark.parametrize(("context", "endings"), [(TRAINED, (1, 2, 4)), (TRAINED + 1, (5,)), (None, (5, 6, 40))])
def test_sequences_of_one_kind_are_those_of_transformers(folder, context, endings):
    """Those that transformers computes with the same factors share their prefix, whose keys then are the same."""
    llm, oracle = LLM(str(folder), dtype="float32", device="cpu", context_length=context), reference(folder)
    prompts = [STEM + [50 + n] * n for n in endings]
    results = run(llm, [as_request(tokens) for tokens in prompts], Readout("last"), sharing="full", rows=7)
    for tokens, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            expected = oracle.base_model(torch.tensor([tokens])).last_hidden_state[0, -1]
        np.testing.assert_allclose(result.values, expected, atol=1e-4)
    assert llm.stats.rows_computed == len(STEM) + sum(endings)
    which = "up to" if context == TRAINED else "more than"
    assert f"LongRoPE's factors for {which} 16 tokens, because context_length is {context or 512}" in llm.passes


def test_generation_within_the_context(folder):
    llm = LLM(str(folder), dtype="float32", device="cpu", context_length=TRAINED)
    engine = engine_of(llm, kv_memory=1 << 20)
    expected = reference_tokens(reference(folder), [STEM], 4)
    assert tokens_of(generate(engine, [ask(STEM, max_tokens=4, ignore_eos=True)])) == expected
    (answer,) = generate(engine, [ask(STEM * 2, max_tokens=4)])
    assert isinstance(answer, InputError) and answer.code == "too_long"


@pytest.mark.parametrize("options", [{}, {"max_length": 100}])
def test_what_is_longer_is_refused(folder, options):
    llm = LLM(str(folder), dtype="float32", device="cpu", context_length=TRAINED)
    with pytest.raises(InputError, match="17 tokens; the model's limit is 16"):
        llm.embed([[*STEM, 1, 2, 3, 4, 5]], **options)
    assert np.isfinite(llm.embed([[*STEM, 1, 2, 3, 4]], **options)).all()


def test_a_context_that_the_model_was_not_made_for(folder):
    with pytest.raises(CheckpointError, match="context_length is 513; the model supports at most 512 tokens"):
        LLM(str(folder), context_length=513)


def test_it_is_part_of_what_results_depend_on(folder):
    whole, short = LLM(str(folder), device="cpu"), LLM(str(folder), device="cpu", context_length=TRAINED)
    assert short.identity != whole.identity
