"""Config keys of hybrid models, from GGUF metadata."""

from __future__ import annotations

from ..errors import UnsupportedModelError
from .gguf_config import ARCHITECTURES, MIXTURES, OF_ARCHITECTURE, Keys
from .gguf_mixtures import SIGMOID, SOFTMAX, counts
from .settings import TILED, Settings


def _layer_types(gguf: Settings, config: Keys, other: str) -> Keys:
    """Return the KV heads and the kind of each layer; a layer without KV heads is of kind `other`."""
    kv_heads = gguf.get("attention.head_count_kv")
    layers = config["num_hidden_layers"]
    is_list = isinstance(kv_heads, list) and all(isinstance(heads, int) for heads in kv_heads)
    if not is_list or len(kv_heads) != layers or len({*kv_heads} - {0}) != 1:
        raise gguf.wrong("attention.head_count_kv", f"a list of {layers} numbers, each 0 or the same number")
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else other for heads in kv_heads],
    }


def _lfm2(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to LFM2."""
    return _layer_types(gguf, config, "conv") | {
        "conv_L_cache": gguf.size("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # the file has the final width
    }


def _lfm2_moe(gguf: Settings, config: Keys) -> Keys:
    return _of_experts(gguf, SIGMOID) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": gguf.size("leading_dense_block_count", 0, least=0),
    }


def _of_experts(gguf: Settings, function: int = SOFTMAX) -> Keys:
    """Return the config keys of experts with weights that llama.cpp always normalizes. For `function`, see `counts`."""
    if not gguf.flag("expert_weights_norm", True):
        raise UnsupportedModelError(f"{gguf.file}: {gguf.prefix}expert_weights_norm is false, which is not supported")
    return counts(gguf, "num_experts", function) | {"moe_intermediate_size": gguf.size("expert_feed_forward_length")}


def _qwen35(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Qwen3.5. In its files, value head h uses key head h % num_keys."""
    keys, values = gguf.size("ssm.group_count"), gguf.size("ssm.time_step_rank")
    return _delta_net(gguf, keys, values) | {"model_type": "qwen3_5_text", TILED: keys != values}


def _delta_net(gguf: Settings, keys: int, values: int) -> Keys:
    """Return the config keys of gated delta nets; `keys` and `values` are the numbers of heads."""
    inner = gguf.size("ssm.inner_size")
    if values % keys or inner % values:
        raise gguf.wrong("ssm.time_step_rank", f"a multiple of {keys} (ssm.group_count) that divides {inner}")
    return {
        "full_attention_interval": gguf.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": gguf.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": gguf.size("ssm.state_size"),
        "linear_value_head_dim": inner // values,
    }


def _qwen35_moe(gguf: Settings, config: Keys) -> Keys:
    shared = gguf.size("expert_shared_feed_forward_length")
    return _of_experts(gguf) | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": shared}


def _qwen3_next(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Qwen3-Next. Its files have heads in the checkpoint's order."""
    keys, values = gguf.size("ssm.group_count"), gguf.size("ssm.time_step_rank")
    return _delta_net(gguf, keys, values) | {"model_type": "qwen3_next"}


def _granite(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Granite 4 H, which has no RoPE."""
    if gguf.flag("rope.scaling.finetuned"):
        raise UnsupportedModelError(
            f"{gguf.file} has RoPE ({gguf.prefix}rope.scaling.finetuned), like Bamba, which is not supported"
        )
    inner, heads, hidden = gguf.size("ssm.inner_size"), gguf.size("ssm.time_step_rank"), config["hidden_size"]
    if inner % hidden or inner % heads:
        raise gguf.wrong("ssm.inner_size", f"a multiple of embedding_length, {hidden}, and of {heads} heads")
    return (
        OF_ARCHITECTURE["granite"](gguf, config)
        | _layer_types(gguf, config, "linear_attention")
        | {
            "model_type": "granitemoehybrid",
            "shared_intermediate_size": config["intermediate_size"],
            "num_local_experts": 0,
            "mamba_expand": inner // hidden,
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_n_groups": gguf.size("ssm.group_count"),
            "mamba_d_state": gguf.size("ssm.state_size"),
            "mamba_d_conv": gguf.size("ssm.conv_kernel"),
        }
    )


def _granite_moe(gguf: Settings, config: Keys) -> Keys:
    shared = gguf.size("expert_shared_feed_forward_length", 0, least=0)
    return counts(gguf, "num_local_experts") | {"shared_intermediate_size": shared}


ARCHITECTURES |= {
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
}
OF_ARCHITECTURE |= {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3_next,
    "granitehybrid": _granite,
}
MIXTURES |= {
    "lfm2moe": _lfm2_moe,
    "qwen35moe": _qwen35_moe,
    "qwen3next": lambda gguf, config: (
        _of_experts(gguf) | {"shared_expert_intermediate_size": gguf.size("expert_shared_feed_forward_length")}
    ),
    "granitehybrid": _granite_moe,
}
