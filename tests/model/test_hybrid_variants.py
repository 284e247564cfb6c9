"""Settings of hybrids that the tiny models of `architectures.PROGRAMS` do not have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import PROGRAMS, checkpoint_of
from running import as_request, prompts, run
from tiny import reference

from prefold import LLM, UnsupportedModelError
from prefold.model import config_from
from prefold.model.program import Attend, Mamba2, Pick
from prefold.spec.requests import Readout

TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}
BIASED = {"mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True, "attention_bias": True}
VARIANTS = {
    "LFM3 without its norms and gates": (
        "lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "attention_bias": True},
    ),
    "OLMo Hybrid that rotates, without negative eigenvalues": (
        "olmo_hybrid", TURNED | {"linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    "Falcon-H1 without a norm in Mamba-2": ("falcon_h1", {"mamba_rms_norm": False, "mamba_conv_bias": False}),
    "Falcon-H1 with the gate first, and biases": (
        "falcon_h1",
        BIASED | {"mamba_norm_before_gate": False, "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0},
    ),
    "Nemotron-H with latent experts": ("nemotron_h", {"moe_latent_size": 32, "mlp_bias": True, "use_bias": True}),
    "Nemotron-H without experts": ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    "Nemotron-H that ends with attention": (
        "nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention"], "mlp_hidden_act": "silu"},
    ),
    "Bamba that ends with attention": ("bamba", {"attn_layer_indices": [0, 2], "mamba_n_groups": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name):
    model_type, settings = VARIANTS[name]
    folder = checkpoint_of(tmp_path, model_type, PROGRAMS[model_type] | settings)
    model, asked = reference(folder), prompts(len(name), count=4)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([tokens])).logits[0, -1].numpy() for tokens in asked]
    for executor in ("native", "torch"):
        with LLM(str(folder), dtype="float32", cache=None, executor=executor) as llm:
            found = run(llm, list(map(as_request, asked)), Readout("logits", tuple(range(307))), sharing="full", rows=5)
        for result, expected in zip(found, logits, strict=True):
            np.testing.assert_allclose(result.values, expected, rtol=0, atol=1e-4)


SIZES = {
    "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (
            "NemotronH",
            {"layers_block_type": ["linear_attention", "rwkv"]},
            "type 'rwkv' is not supported for Nemotron-H",
        ),
        ("NemotronH", {"hybrid_override_pattern": "MM-"}, "no layer has attention"),
        (
            "NemotronH",
            {"mamba_num_heads": 6, "n_groups": 4},
            "mamba_num_heads is 6; it must be a multiple of n_groups, 4",
        ),
        ("NemotronH", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; it must be silu"),
        ("FalconH1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers is .*it must be a list of 5 numbers"),
        (
            "FalconH1",
            {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0},
            "ssm_in_multiplier is 2.0; .* have biases",
        ),
        (
            "FalconH1",
            {"mamba_d_ssm": 50, "mamba_n_heads": 6},
            "mamba_n_heads is 6; it must be .*divisor of the inner width, 50",
        ),
        ("Bamba", {"attn_layer_indices": 1}, "attn_layer_indices is 1; it must be a list of layer indices"),
        (
            "Bamba",
            {"time_step_limit": 0.5, "attn_layer_indices": [1], "mamba_n_heads": 6},
            "time_step_limit is 0.5; it must be two numbers",
        ),
        ("Lfm3", {"sliding_window": None, "layer_types": ["sliding_attention", "conv"]}, "sliding_window is None"),
        (
            "OlmoHybrid",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "a multiple of linear_num_key_heads, 3",
        ),
    ],
)
def test_what_cannot_be_is_refused(architecture, settings, message):
    with pytest.raises(Exception, match=message) as raised:
        config_from(SIZES | {"architectures": [f"{architecture}ForCausalLM"]} | settings)
    assert isinstance(raised.value, UnsupportedModelError.__base__)


def test_early_names_of_the_keys_of_nemotron_h():
    early = {"hybrid_override_pattern": "M-*E", "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_dt_min": 0.5}
    late = {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "n_groups": 2, "conv_kernel": 3}
    late |= {"time_step_min": 0.5}
    one, other = (config_from(SIZES | {"architectures": ["NemotronHForCausalLM"]} | keys) for keys in (early, late))
    assert one == other
    assert (one.mixers, one.mlp) == (("mamba", "none", "attention", "none"), ("none", "plain", "none", "experts"))


# What config.json of published models has: Falcon-H1 0.5B, a Nemotron-H and Bamba 9B, some keys of which transformers
# does not read.
PUBLISHED = {
    "FalconH1": {
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "head_dim": 64,
        "embedding_multiplier": 5.656854249492381, "hidden_size": 1024, "intermediate_size": 2048,
        "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
        "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
        "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8,
        "num_hidden_layers": 36, "projectors_bias": False, "rope_scaling": None, "rope_theta": 1e11,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587, "time_step_floor": 0.0001,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    },
    "NemotronH": {
        "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}, "attention_head_dim": 128,
        "chunk_size": 128, "conv_kernel": 4, "expand": 2, "hidden_size": 4096, "intermediate_size": 21504,
        "hybrid_override_pattern": "M-M-M-M*-M-", "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "rms_norm_eps": 1e-5,
        "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 11,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None, "ssm_state_size": 128,
        "time_step_limit": [0.0, float("inf")], "time_step_floor": 0.0001, "time_step_max": 0.1, "use_bias": False,
        "time_step_min": 0.001, "time_step_rank": 256, "use_conv_bias": True, "use_mamba_kernels": True,
    },
    "Bamba": {
        "attn_layer_indices": [1], "attn_rotary_emb": 64, "hidden_size": 4096, "num_attention_heads": 32,
        "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_expand": 2, "mamba_chunk_size": 256,
        "rope_theta": 1e4, "use_mamba_kernels": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_keys_are_read(architecture):
    config = config_from(SIZES | {"architectures": [f"{architecture}ForCausalLM"]} | PUBLISHED[architecture])
    assert config.has_states and config.head_dim in (64, 128) and config.unsplit


def test_a_layer_has_one_mixer_with_a_state_at_most():
    config = config_from(SIZES | {"architectures": ["FalconH1ForCausalLM"]} | PUBLISHED["FalconH1"])
    with pytest.raises(UnsupportedModelError, match="one mixer with a state, and attention beside it"):
        replace(config, mixers=("attention+mamba+conv",) * config.layers)


def test_the_last_layer_leaves_out_rows_of_both_mixers():
    """A mixer with a state reads all rows, whichever mixer the config names first."""
    config = config_from(SIZES | {"architectures": ["FalconH1ForCausalLM"]} | PUBLISHED["FalconH1"])
    last = config.program().layers[-1]
    assert [type(one).__name__ for one in last if isinstance(one, Mamba2 | Pick | Attend)] == [
        "Mamba2",
        "Pick",
        "Attend",
    ]
    assert next(one for one in last if isinstance(one, Pick)).sources == ("x", "delta", "h")
    swapped = replace(config, mixers=("mamba+attention",) * config.layers)
    assert swapped.program().layers == config.program().layers
