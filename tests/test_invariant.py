"""Batch-invariant models (`LLM(invariant=True)`): a result is the same, bit for bit, whatever else is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import checkpoint_of
from invariance import check_invariant, prompts_of
from running import as_request, run
from tiny import tiny_checkpoint
from tiny_vision import tiny_vision

from prefold import LLM, InputError
from prefold.spec.requests import Readout
from prefold.worker.pool import means_in_order
from prefold.worker.torch.arrays import TorchArrays

# Sizes with which a forward pass is one compiled call.
EVEN = {"hidden_size": 96, "intermediate_size": 96}
FAMILIES = {"llama": EVEN, "gemma3": EVEN, "gemma2": {}, "gpt2": {}, "qwen2-moe": {}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_answers_alike_in_any_company(tmp_path, family, dtype):
    check_invariant(tiny_checkpoint(tmp_path, family, **FAMILIES[family]), dtype=dtype)


def test_a_classification_head_answers_alike_in_any_company(tmp_path):
    with LLM(str(tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=3)), invariant=True) as llm:
        requests = [as_request(prompt) for prompt in prompts_of(llm.config.vocab_size)]
        found = run(llm, requests, Readout("head"), sharing=None, rows=None)
        for request, of in zip(requests, found, strict=True):
            (alone,) = run(llm, [request], Readout("head"), sharing=None, rows=None)
            assert (alone.values == of.values).all()


@pytest.mark.parametrize("weights", ["file", "auto"])
def test_the_built_in_model_answers_alike_however_its_weights_lie(weights):
    options: dict[str, Any] = {"dtype": "float32", "invariant": True, "weights": weights}
    with LLM("smollm2-135m", **options) as llm:
        assert ("as stored" in llm.passes) == (weights == "file")
        prompts = prompts_of(3000, 12)
        found = llm.embed(prompts)
        for number in (0, 5):
            assert (llm.embed([prompts[number]])[0] == found[number]).all()
        values = [one.logprobs for one in llm.generate(prompts, max_tokens=3, temperature=0, logprobs=1)]
        assert llm.generate(prompts[2], max_tokens=3, temperature=0, logprobs=1).logprobs == values[2]


def test_models_that_cannot_be_are_refused_by_name(tmp_path):
    seeing = tiny_vision(tmp_path, "gemma3")
    with pytest.raises(InputError, match="rows of images") as caught:
        LLM(str(seeing), invariant=True)
    assert caught.value.field == "invariant"
    with LLM(str(seeing), invariant=True, images=False) as llm:
        assert llm.embed(["text alone"]).shape[0] == 1
    with pytest.raises(InputError, match="modules of transformers"):
        LLM(str(checkpoint_of(tmp_path / "diffllama", "diffllama", {})), invariant=True)
    with pytest.raises(InputError, match=r"products of PyTorch.*leave --invariant out"):
        LLM(str(tiny_checkpoint(tmp_path)), executor="torch", invariant=True)


def test_a_mean_is_added_up_along_its_path():
    hidden = torch.randn(300, 5)
    paths = [np.arange(300), np.arange(0, 300, 7)]
    found = means_in_order(TorchArrays(hidden.device), hidden, paths)
    torch.testing.assert_close(found, torch.stack([hidden[path].mean(0) for path in paths]))
    total = np.zeros(5)
    for row in paths[1]:
        total = total + hidden[row].double().numpy()
    assert torch.equal(found[1], torch.from_numpy(total / len(paths[1])).float())
    assert means_in_order(TorchArrays(hidden.device), hidden, []).shape == (0, 5)
