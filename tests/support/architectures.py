"""Causal architectures of transformers, as tiny random checkpoints: those that run, and those that are refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tiny import SIZES, randomise, write_tokenizer

# Buffers of routers that are added to scores, and the last linears of layers with states.
CORRECTIONS = ("expert_bias", "e_score_correction_bias")
STATE_OUTPUTS = ("linear_attn.out_proj.weight", "mamba.out_proj.weight", "mixer.out_proj.weight")
# Products of experts in transformers want rows of whole 16 bytes.
TINY = SIZES | {"hidden_size": 48, "intermediate_size": 64, "sliding_window": 5, "moe_intermediate_size": 16}
OPTIONAL = ("sliding_window", "moe_intermediate_size")  # in few architectures
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATENT: dict[str, Any] = {"num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 16, "head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12}
GROUPS = {"n_group": 2, "topk_group": 1}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
MODERN = {"global_attn_every_n_layers": 2, "local_attention": 10}

LARGER_LAST = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 8}
LARGER_LAST |= {"per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}}}

# Gemma 4: heads of two sizes, an embedding for each layer, and layers with the keys and values of others.
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5,
    "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 307, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
}  # fmt: skip

# Gemma 3n: gates of two kinds, and embeddings of layers for a part of the vocabulary.
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5,
    "head_dim": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 150,
    "laurel_rank": 6, "activation_sparsity_pattern": [0.9, 0.3, 0.0, 0.6], "intermediate_size": [64, 50, 64, 64],
    "final_logit_softcapping": 5.0,
}  # fmt: skip

# The larger ones: experts beside the MLP, keys that values are made of, and no embeddings of layers.
GEMMA4_26B: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8,
    "global_head_dim": 16, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
    "enable_moe_block": True, "top_k_experts": 2, "final_logit_softcapping": 5.0,
}  # fmt: skip

# Queries that grow from the fifth position on.
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 5}
GROWING |= {"llama_4_scaling_beta": 0.3}

# Hybrids: layers with a state, and one with attention among them.
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 6, "mamba_n_groups": 2,
    "mamba_d_state": 10, "shared_intermediate_size": 26, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
}  # fmt: skip
LFM3: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "head_dim": 10,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "factor": 2.0},
    },
}  # fmt: skip
OLMO_HYBRID: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "rope_parameters": {"rope_theta": None},
}  # fmt: skip
OLMO_HYBRID |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 42, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_rms_norm": True,
    "mlp_multipliers": [1.7, 0.6], "ssm_multipliers": [0.9, 1.3, 0.7, 1.2, 1.5], "lm_head_multiplier": 0.4,
    "embedding_multiplier": 2.5, "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
    "time_step_limit": [0.05, 1.5],
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 7, "n_groups": 2, "ssm_state_size": 10,
    "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 26, "routed_scaling_factor": 1.5, "time_step_min": 0.3,
    "sliding_window": None,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "head_dim": 12,
    "num_key_value_heads": 2, "time_step_limit": [0.05, 1.0],
}  # fmt: skip

# Looped: two layers visited twice, a sliding window in three of four layers.
DORY: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 10, "n_input_layers": 1, "n_output_layers": 1, "attention_bias": True,
    "mlp_bias": True, "initializer_range": 0.3, "ngpt_alpha_init": 0.5,
}  # fmt: skip
# Mixtures of experts. Many experts, so that choices differ; factors that change what experts give.
MANY: dict[str, Any] = {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3}
LOCAL: dict[str, Any] = {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3}
GROUPED: dict[str, Any] = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
DEEP: dict[str, Any] = GROUPED | {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2}
DEEP |= {"head_dim": 8, "attention_bias": True}
PHIMOE: dict[str, Any] = {"attention_bias": True, "lm_head_bias": True, "sliding_window": None, "head_dim": 8}
PHIMOE |= {"num_local_experts": 6, "router_jitter_noise": 0.1}
SHORT = {**LONG, "short_mscale": 1.3, "long_mscale": 1.1, "original_max_position_embeddings": 512}

# By model_type, the settings of families of prefold's own without which the architecture would look like another; and
# variants, which have more words behind the model_type. tests/model/test_family_programs.py compares each with
# transformers.
PROGRAMS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT
    | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_v3": LATENT | GROUPS | {"first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT | {"rope_interleave": False},
    "afmoe": MANY | WINDOWS | {"mup_enabled": True, "route_scale": 1.7, "attention_bias": True},
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2, "mlp_bias": True},
    "bitnet": {},
    "codegen": {"num_attention_heads": 4, "rotary_dim": 4},
    "cohere2_moe": {
        **MANY,
        **WINDOWS,
        "num_shared_experts": 2,
        "prefix_dense_intermediate_size": 40,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "cohere2_moe by sigmoids": {
        **MANY,
        **WINDOWS,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "sigmoid",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    },
    "dots1": DEEP | {"first_k_dense_replace": 1, "norm_topk_prob": True, "max_window_layers": 2},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "use_bias": True, "moe_norm_min": 0.6, "moe_layer_interval": 2},
    "exaone_moe": MANY | GROUPED | WINDOWS | {"num_shared_experts": 2},
    "flex_olmo": MANY | {"attention_bias": True},
    "flint": MANY | WINDOWS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "glm4_moe": DEEP | {"use_qk_norm": True},
    "granitemoe_swa": {
        **LOCAL,
        **WINDOWS,
        "layer_rope_theta": [0, 1e4, 500],
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
        "shared_intermediate_size": 24,
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 6, "moe_topk": 3},
    "hy_v3": MANY | {"num_shared_experts": 2, "mlp_bias": True, "attention_bias": True},
    "kolibri1": LOCAL | WINDOWS | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "mellum": LOCAL | WINDOWS | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "minimax_m2": LOCAL | {"rotary_dim": 4},
    "phimoe": PHIMOE,
    "phimoe with a factor of positions": PHIMOE | {"rope_parameters": SHORT, "sliding_window": 5},
    "sarvam_mla": LATENT | GROUPS | {"first_k_dense_replace": 1, "q_lora_rank": None},
    "sarvam_moe": DEEP,
    "solar_open": DEEP,
    "cohere": {"use_qk_norm": True},
    "cwm": WINDOWS,
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "exaone": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon with one key head": {},
    "falcon with all key heads": {"multi_query": False, "parallel_attn": False, "bias": True},
    "falcon with one norm": {"num_kv_heads": 3, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    "gemma3n_text": GEMMA3N,
    "gemma3n_text with keys of its own": GEMMA3N
    | {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "altup_correct_scale": False},
    "gemma4_text": GEMMA4,
    "gemma4_text with experts": GEMMA4_26B,
    "gemma4_unified_text": LARGER_LAST,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt_bigcode": {},
    "gpt_bigcode with all key heads": {"multi_query": False},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 5},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox in turn": {"rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
    "gptj": {"rotary_dim": 4},
    "granite_swa": WINDOWS | {"layer_rope_theta": [0, 1e4, 500], "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "helium": {"head_dim": 8, "mlp_bias": True},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_dense with alpha": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "hyperclovax": {"residual_multiplier": 0.6, "attention_multiplier": 0.4, "logits_scaling": 0.5},
    "hyperclovax without norms": {"use_post_norm": False},
    "internlm3": {"head_dim": 8},
    "internlm3 with dynamic scaling": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
    },
    "iquestcoder": {"head_dim": 8},
    "jais2": {},
    "ministral": WINDOWS | {"head_dim": 8},
    "ministral3": {"head_dim": 8, "rope_parameters": GROWING},
    "nanochat": {},
    "nemotron": {"head_dim": 8},
    "olmo": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "opt without weights of norms": {
        "ffn_dim": 64,
        "word_embed_proj_dim": 48,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
    },
    "persimmon": {},
    "phi": {"qk_layernorm": True},
    "seed_oss": {"head_dim": 8},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm parallel": {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "vaultgemma": WINDOWS | {"head_dim": 8},
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "granitemoehybrid": MAMBA2,
    "lara_mini": DELTA | {"layer_types": ["linear_attention", "full_attention", "sliding_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "minicpm3": LATENT | {"q_lora_rank": None},
    "lfm3": LFM3,
    "mistral4": LATENT
    | GROUPS
    | {"qk_nope_head_dim": 8, "head_dim": 16, "rope_parameters": GROWING | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "nemotron_h": NEMOTRON_H,
    "olmo_hybrid": OLMO_HYBRID,
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": DELTA | {"mlp_only_layers": [2]},
    "youtu": LATENT,
    "dory": DORY,
    "dory without outer layers": DORY | {"n_input_layers": 0, "n_output_layers": 0, "n_recurrent_loops": 3},
}
# Those whose norms are stored less one.
CENTRED = {"nemotron", "qwen3_5_moe_text", "qwen3_next", "vaultgemma"}

# By model_type, the settings without which the architecture would look like another; none of prefold's own families.
TAKEN: dict[str, dict[str, Any]] = {
    "afmoe": WINDOWS,
    "aria_text": {"moe_num_experts": 4},
    "cohere2": WINDOWS,
    "ctrl": {},
    "diffllama": {},
    "ernie4_5_moe": {},
    "exaone4": WINDOWS,
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    "gemma2": WINDOWS,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": LARGER_LAST,
    "glm4_moe": {},
    "gpt_oss": WINDOWS,
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "jetmoe": {"kv_channels": 8},
    "laguna": {},
    "minimax_m2": {},
    "mixtral": {},
    "modernbert-decoder": MODERN,
    "olmo2": {},
    "olmo3": WINDOWS,
    "olmoe": {},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 64},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {},
}
# Families of prefold's own, where all run through transformers' modules.
FORCED: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOWS, "gpt2": {}, "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}
}  # fmt: skip
# By model_type: settings, and the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "its attention is in both directions"),
    "roberta": ({}, "its attention is in both directions"),
    "bloom": ({}, "its modules take no position_ids, so rows cannot have their own positions"),
    "mpt": ({}, "its modules take no position_ids, so rows cannot have their own positions"),
    "mamba": ({}, "its modules take no position_ids, so rows cannot have their own positions"),
    "openai-gpt": ({}, "its attention does not go through transformers' attention interface"),
    "xglm": ({}, "its attention does not go through transformers' attention interface"),
    "doge": ({}, "it makes its own attention masks"),
    "llama4_text": ({}, "its attention is weighed by a count of rows, not by position_ids (attn_temperature_tuning)"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv"]},
        "rows that prompts share have other hidden states than whole prompts",
    ),
    "recurrent_gemma": ({}, "rows that prompts share have other hidden states than whole prompts"),
}


def config_for(model_type: str, settings: dict[str, Any]) -> Any:
    """transformers' config of a tiny model."""
    import transformers

    kind, settings = transformers.CONFIG_MAPPING[model_type], deepcopy(settings)  # which the config may change
    if model_type == "mistral4":  # whose class the automatic ones lack
        transformers.AutoModelForCausalLM.register(kind, transformers.Mistral4ForCausalLM, exist_ok=True)
    try:
        keys = kind(**deepcopy(TINY | settings)).to_dict().keys()
    except Exception:
        keys = kind().to_dict().keys()
    more = {key: value for key, value in EXPERTS.items() if key in keys}
    own = kind().to_dict().keys()
    sizes = {key: value for key, value in TINY.items() if key in own or key not in OPTIONAL}
    return kind(**deepcopy(sizes | more | settings))


def checkpoint_of(folder: Path, model_type: str, settings: dict[str, Any], *, seed: int = 0) -> Path:
    """A folder with a random checkpoint, and the tokenizer of `tiny`. model_type: also with the words of a variant"""
    import transformers

    model_type = model_type.split()[0]

    model = transformers.AutoModelForCausalLM.from_config(config_for(model_type, settings), dtype=torch.float32)
    randomise(model, seed, norm=0 if model_type in CENTRED else 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTIONS):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if name.endswith(STATE_OUTPUTS):  # else each layer makes the differences of rounding much larger
                parameter.mul_(0.5)
            if name.endswith("modality_router.weight"):  # which reads norms divided by their width
                parameter.mul_(parameter.shape[1])
            if name.endswith("linear_attn.norm.weight"):  # which is not stored less one
                parameter.add_(model_type in CENTRED)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
