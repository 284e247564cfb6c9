"""Tiny random hybrids, written by transformers, and what transformers makes of prompts."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from tiny import SIZES, randomise, write_tokenizer

from prefold import LLM
from prefold.features.hybrid.steps import StateFacts

# The last layer has a state in the one, and attention in the other.
LFM2 = {
    "num_hidden_layers": 5,
    "block_multiple_of": 8,
    "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
}
QWEN3_5 = {
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
GRANITE4_H = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 50,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
HYBRIDS = {
    "lfm2": ("Lfm2", "Lfm2", LFM2),
    "qwen3_5": ("Qwen3_5Text", "Qwen3_5", QWEN3_5),
    "granite4_h": ("GraniteMoeHybrid", "GraniteMoeHybrid", GRANITE4_H),
}


def hybrid_checkpoint(folder: Path, family: str, **overrides) -> Path:
    """A folder with a random checkpoint of a family."""
    import transformers

    config, name, own = HYBRIDS[family]
    config = getattr(transformers, config + "Config")(**SIZES | own | overrides)
    model = getattr(transformers, name + "ForCausalLM")(config)
    randomise(model, 0, norm=0 if family == "qwen3_5" else 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("linear_attn.norm.weight"):  # which is not stored less one
                parameter.add_(1)
            if parameter_name.endswith("linear_attn.out_proj.weight"):  # else each layer makes rounding much larger
                parameter.mul_(0.5)
    folder = folder / family
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def state_bytes(llm: LLM) -> int:
    """The bytes of one state."""
    return llm.engine.worker.facts.of(StateFacts).state_bytes


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, prompts: list[list[int]]) -> list[np.ndarray]:
    """What transformers gives for every row of each prompt, [tokens, hidden]; of a prompt it is asked once."""
    return [_states_of(model, tuple(tokens)) for tokens in prompts]


@functools.cache
def _states_of(model: torch.nn.Module, tokens: tuple[int, ...]) -> np.ndarray:
    return model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
