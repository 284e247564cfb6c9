"""Rotary frequencies and tables against transformers: frequencies to the last bit but one, since powers are rounded
otherwise by NumPy and by PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny import SIZES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prefold.model import RopeConfig, config_from
from prefold.model.rotary import AngleTables, frequencies
from prefold.worker.torch.rotary_tables import RotaryTable

LAST_BIT = 2.0**-22
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192, **LLAMA3},
    {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
]


@pytest.mark.parametrize("head_dim", [64, 10])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_frequencies_and_table(settings, head_dim):
    sizes = SIZES | {"head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": dict(settings)}
    theirs = transformers.LlamaConfig(**sizes)
    ours = config_from(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    assert ours.kind == settings["rope_type"]
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    found, scale = frequencies(ours, head_dim)
    assert found.dtype == np.float32
    inv = torch.from_numpy(found)
    if ours.kind != "default":
        expected, expected_scale = ROPE_INIT_FUNCTIONS[ours.kind](theirs, "cpu")
        torch.testing.assert_close(inv, expected, rtol=LAST_BIT, atol=0)
        assert scale == expected_scale
    torch.testing.assert_close(inv, embedding.inv_freq, rtol=LAST_BIT, atol=0)
    positions = torch.tensor([0, 1, 77, 8191, 30000])
    cos, sin = embedding(torch.zeros(1), positions[None])
    table = RotaryTable(ours, head_dim, torch.device("cpu"))(positions)
    half = head_dim // 2
    far = 1e-6 + LAST_BIT * positions[:, None] * inv  # an angle's last bits
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
    assert ((table - expected).abs() <= scale * torch.cat((far, far), -1)).all()
    arrays = AngleTables([ours], [head_dim]).covering(30001)[0][positions.numpy()]
    torch.testing.assert_close(torch.from_numpy(arrays), table, rtol=0, atol=2e-7 * scale)


def test_factors_divide():
    inv, scale = frequencies(RopeConfig("factors", 100.0, {"factors": [1.0, 2.0]}), 4)
    torch.testing.assert_close(torch.from_numpy(inv), torch.tensor([1.0, 0.05]))
    assert scale == 1.0


def test_the_table_grows_and_does_not_change():
    table = RotaryTable(RopeConfig(), 8, torch.device("cpu"))
    early = table(torch.tensor([3, 900]))
    assert len(table.table) == 1024
    late = table(torch.tensor([3, 5000, 900]))
    assert len(table.table) == 5001
    torch.testing.assert_close(late[[0, 2]], early, rtol=0, atol=0)
    table(torch.tensor([5001]))
    assert len(table.table) == 10002
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, 8)


def test_a_table_made_in_inference_mode_serves_gradients():
    table = RotaryTable(RopeConfig(), 4, torch.device("cpu"))
    with torch.inference_mode():
        table(torch.tensor([1]))
    x = torch.ones(1, 4, requires_grad=True)
    (x * table(torch.tensor([2]))).sum().backward()
    assert x.grad is not None
