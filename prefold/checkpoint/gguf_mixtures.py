"""Config keys of mixtures of experts, from GGUF metadata."""

from __future__ import annotations

from ..errors import UnsupportedModelError
from .gguf_config import ARCHITECTURES, BY_TENSOR, LATENT, MIXTURES, OF_ARCHITECTURE, PARTLY_TURNED, Keys, windows_of
from .settings import Settings

# llama.cpp's numbers for the router's gating functions.
SOFTMAX, SIGMOID = 1, 2


def counts(gguf: Settings, key: str, function: int = SOFTMAX, scale_key: str = "") -> Keys:
    """Return the number of experts, under `key`, and the number of experts per token.

    `function` is the only gating function accepted. `scale_key` is the config key for a factor on the experts' output;
    with "", a factor is refused.
    """
    found = gguf.size("expert_gating_func", function)
    if found != function:
        raise UnsupportedModelError(
            f"{gguf.file}: the router has {gguf.prefix}expert_gating_func {found}; for this architecture only "
            f"{function} is supported"
        )
    scale = float(gguf.number("expert_weights_scale", 1.0, zero=True)) or 1.0
    if scale != 1 and not scale_key:
        raise UnsupportedModelError(
            f"{gguf.file}: {gguf.prefix}expert_weights_scale is {scale:g}; factors on experts are not supported"
        )
    found = {key: gguf.size("expert_count"), "num_experts_per_tok": gguf.size("expert_used_count")}
    return found | ({scale_key: scale} if scale_key else {})


def _qwen(gguf: Settings, normalised: bool) -> Keys:
    return counts(gguf, "num_experts") | {
        "norm_topk_prob": gguf.flag("expert_weights_norm", normalised),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
    }


def _qwen2(gguf: Settings, config: Keys) -> Keys:
    shared = gguf.size("expert_shared_feed_forward_length")
    return _qwen(gguf, False) | {"shared_expert_intermediate_size": shared}


def _granite(gguf: Settings, config: Keys) -> Keys:
    shared = gguf.size("expert_shared_feed_forward_length", 0, least=0)
    return (
        OF_ARCHITECTURE["granite"](gguf, config)
        | counts(gguf, "num_local_experts")
        | {
            "architectures": ["GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"],
            "shared_intermediate_size": shared,
        }
    )


def _by_sigmoids(
    gguf: Settings, count: str = "n_routed_experts", shared: str = "n_shared_experts", function: int = SIGMOID
) -> Keys:
    """Return the config keys of mixtures of experts in the form of DeepSeek-V3.

    Args:
        count: The key for the number of experts.
        shared: The key for the number of shared experts.
        function: The router's function, as llama.cpp numbers it.
    """
    return counts(gguf, count, function, "routed_scaling_factor") | {
        shared: gguf.size("expert_shared_count", 0, least=0),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
        "first_k_dense_replace": gguf.size("leading_dense_block_count", 0, least=0),
        "norm_topk_prob": gguf.flag("expert_weights_norm"),
        "n_group": gguf.size("expert_group_count", 1, least=0),
        "topk_group": gguf.size("expert_group_used_count", 1, least=0),
    }


def _afmoe(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys of Trinity.

    Every fourth layer has no window, and embeddings are scaled. Files contain neither fact, so llama.cpp fixes both.
    """
    found = _by_sigmoids(gguf, "num_experts", "num_shared_experts")
    return windows_of(gguf, 4) | {
        **{key: found[key] for key in ("num_experts", "num_experts_per_tok", "num_shared_experts", "n_group")},
        "topk_group": found["topk_group"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "num_dense_layers": found["first_k_dense_replace"],
        "route_scale": found["routed_scaling_factor"],
        "route_norm": found["norm_topk_prob"],
        "mup_enabled": True,
    }


def _ernie(gguf: Settings, config: Keys) -> Keys:
    found, width = counts(gguf, "moe_num_experts"), gguf.size("expert_feed_forward_length")
    shared = gguf.size("expert_shared_count", 0, least=0)
    if gguf.size("expert_shared_feed_forward_length", shared * width, least=0) != shared * width:
        raise gguf.wrong("expert_shared_feed_forward_length", f"{shared} times the width of an expert, {width}")
    return {
        "moe_num_experts": found["moe_num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": gguf.size("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": gguf.size("interleave_moe_layer_step", 1),
    }


def _hunyuan(gguf: Settings, config: Keys) -> Keys:
    found = counts(gguf, "num_experts")
    return {
        "num_experts": found["num_experts"],
        "moe_topk": found["num_experts_per_tok"],
        "intermediate_size": gguf.size("expert_shared_feed_forward_length", config["intermediate_size"]),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
        "num_shared_expert": gguf.size("expert_shared_count", 1, least=0),
    }


def _gpt_oss(gguf: Settings, config: Keys) -> Keys:
    rope = config["rope_parameters"] | {"truncate": False}  # files do not have this key
    return windows_of(gguf, 2) | {"rope_parameters": rope}


def _deepseek(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys of models with latent attention: DeepSeek V2 and V3, GLM-4.7-Flash and Youtu.

    Newer files describe heads that attend to latents, and have the model's own head sizes under `..._mla`.
    """
    tail = gguf.size("rope.dimension_count")
    gguf.get("attention.head_count_kv")  # 1 in newer files
    key, value = (gguf.size(f"attention.{part}_length") for part in ("key", "value"))
    return {
        "architectures": ["YoutuForCausalLM"],  # MIXTURES has the others
        "kv_lora_rank": gguf.size("attention.kv_lora_rank"),
        "q_lora_rank": gguf.size("attention.q_lora_rank", None, least=0) or None,
        "qk_rope_head_dim": tail,
        "qk_nope_head_dim": gguf.size("attention.key_length_mla", key) - tail,
        "v_head_dim": gguf.size("attention.value_length_mla", value),
    }


def _deepseek_experts(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys of the mixtures of DeepSeek V2 and V3 and GLM-4.7-Flash.

    Older files do not name the router's function. As in llama.cpp, such a file is GLM-4.7-Flash (sigmoid) if it has
    this model's number of layers and vocabulary. Otherwise the function is the softmax.
    """
    is_glm = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == GLM_FLASH_VOCABULARY
    function = gguf.size("expert_gating_func", SIGMOID if is_glm else SOFTMAX)
    found = _by_sigmoids(gguf, function=function)
    if function == SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"]}
    if found["norm_topk_prob"]:
        raise gguf.wrong("expert_weights_norm", "false: routers with softmax do not norm their scores")
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


GLM_FLASH_VOCABULARY = 154_880
LATENT.add("deepseek2")
ARCHITECTURES |= {
    "deepseek2": "DeepseekV3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
}
PARTLY_TURNED |= {"glm4moe", "minimax-m2"}
BY_TENSOR |= {
    "glm4moe": {"use_qk_norm": "attn_q_norm.weight"},
    "ernie4_5-moe": {"use_bias": "attn_q.bias"},
}
OF_ARCHITECTURE["deepseek2"] = _deepseek
OF_ARCHITECTURE["afmoe"] = lambda gguf, config: {}
OF_ARCHITECTURE["exaone-moe"] = lambda gguf, config: windows_of(gguf, 4)
OF_ARCHITECTURE["gpt-oss"] = _gpt_oss
MIXTURES |= {
    "llama": lambda gguf, config: counts(gguf, "num_local_experts") | {"architectures": ["MixtralForCausalLM"]},
    "gpt-oss": lambda gguf, config: counts(gguf, "num_local_experts"),
    "qwen2moe": _qwen2,
    "qwen3moe": lambda gguf, config: _qwen(gguf, True),
    "olmoe": lambda gguf, config: counts(gguf, "num_experts"),
    "granitemoe": _granite,
    "glm4moe": lambda gguf, config: _by_sigmoids(gguf),
    "dots1": lambda gguf, config: _by_sigmoids(gguf),
    "minimax-m2": lambda gguf, config: (
        counts(gguf, "num_local_experts", SIGMOID) | {"intermediate_size": gguf.size("expert_feed_forward_length")}
    ),
    "ernie4_5-moe": _ernie,
    "hunyuan-moe": _hunyuan,
    "afmoe": _afmoe,
    "deepseek2": _deepseek_experts,
    "exaone-moe": lambda gguf, config: _by_sigmoids(gguf, "num_experts", "num_shared_experts"),
}
