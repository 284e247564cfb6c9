"""A key that config.json leaves out has the value that transformers' class gives it, or its absence is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from prefold.errors import CheckpointError
from prefold.model import config_from
from prefold.model.families import supported_architectures

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES: dict[str, Any] = {
    "vocab_size": 307, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 48,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu")
OWN: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "layer_types": ["full_attention"] * 4},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "OPTForCausalLM": {"ffn_dim": 48},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4ForCausalLM": {"vocab_size_per_layer_input": 307},
    "DoryForCausalLM": {"n_input_layers": 1, "n_output_layers": 1},
    # Their defaults do not go with these sizes, or with any.
    **{f"{name}ForCausalLM": {"rotary_dim": 4} for name in ("GPTJ", "CodeGen")},
    **{f"{name}ForCausalLM": {"head_dim": 8} for name in ("Helium", "HunYuanDenseV1", "HunYuanMoEV1", "Ministral")},
    **{f"{name}ForCausalLM": {"num_key_value_heads": 8} for name in LATENT},
}
# Those that have buffers among their weights, or sizes that transformers computes.
OTHER_SIZES = ("Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "NemotronHForCausalLM")
CAUSAL = [
    name
    for name in supported_architectures()
    if name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(transformers, name)
]
# Not settings: what the config is of, and by what it is written.
ABOUT = {"architectures", "model_type", "transformers_version", "_name_or_path", "id2label", "label2id"}


def keys_of(config: Any, architecture: str) -> dict[str, Any]:
    """All keys of a transformers config, with the defaults written out."""
    return config.to_dict() | {"architectures": [architecture]}


@pytest.mark.parametrize("architecture", CAUSAL)
def test_missing_keys_have_the_values_of_transformers(architecture):
    kind = getattr(transformers, architecture).config_class
    full = keys_of(kind(**SIZES | OWN.get(architecture, {})), architecture)
    config_from(full)
    wrong, num_compared = {}, 0
    for key in full.keys() - ABOUT:
        less = {name: value for name, value in full.items() if name != key}
        try:
            mine, theirs = config_from(less), config_from(keys_of(kind.from_dict(dict(less)), architecture))
        except (CheckpointError, ValueError, TypeError):
            continue  # refused, here or there
        num_compared += 1
        names = [field.name for field in fields(mine) if field.name != "settings"]
        found = {name: (getattr(mine, name), getattr(theirs, name)) for name in names}
        if differing := {name: pair for name, pair in found.items() if pair[0] != pair[1]}:
            wrong[key] = differing
    assert not wrong and num_compared > 10


@pytest.mark.parametrize("architecture", [name for name in CAUSAL if name not in OTHER_SIZES])
def test_sizes_that_are_left_out(architecture):
    """Of the head and of biases: the model of transformers has as many weights."""
    kind = getattr(transformers, architecture)
    keys = {key: value for key, value in SIZES.items() if key != "head_dim"} | OWN.get(architecture, {})
    keys = {kind.config_class.attribute_map.get(key, key): value for key, value in keys.items()}
    with torch.device("meta"):
        theirs = kind(kind.config_class(**keys))
    saved = theirs.state_dict().keys()
    buffers = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name in saved)
    mine = config_from(keys | {"architectures": [architecture], "model_type": theirs.config.model_type})
    assert mine.num_parameters == buffers + sum(parameter.numel() for parameter in theirs.parameters())
