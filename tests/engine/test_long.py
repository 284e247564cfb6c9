"""A prompt far longer than a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running import as_request, run
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.spec.requests import Readout


def long_model(tmp_path, **overrides):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    folder = tiny_checkpoint(tmp_path, "mistral", **sizes, max_position_embeddings=40_000, **overrides)
    return folder, LLM(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_agree_with_transformers(tmp_path, window):
    folder, llm = long_model(tmp_path, sliding_window=window)
    tokens = np.random.default_rng(0).integers(0, 300, 3000)
    with torch.inference_mode():
        states = reference(folder).model(input_ids=torch.from_numpy(tokens)[None]).last_hidden_state[0, -1]
    for sharing in ("full", "mlp", "off"):
        found = run(llm, [as_request(tokens.tolist())], Readout("last"), sharing=sharing, rows=512)[0]
        np.testing.assert_allclose(found.values, states.numpy(), atol=1e-4)


@pytest.mark.slow
def test_32000_tokens_in_steps_of_512(tmp_path):
    _, llm = long_model(tmp_path, sliding_window=None)
    tokens = np.random.default_rng(0).integers(0, 300, 32_000).tolist()
    requests = [as_request(tokens), as_request([*tokens[:20_000], 7, 8])]
    whole = run(llm, requests, Readout("last"), sharing="full", rows=40_000)
    steps = run(llm, requests, Readout("last"), sharing="full", rows=512)
    assert llm.stats.path_rows_peak <= 32_000
    for one, other in zip(steps, whole, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-4)
