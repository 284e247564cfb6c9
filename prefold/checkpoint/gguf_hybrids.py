"""The config keys of hybrids, of the metadata of GGUF files."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError
from .gguf_config import ARCHITECTURES, OF_ARCHITECTURE
from .settings import Settings


def _lfm2(gguf: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config keys that LFM2 alone has. Layers without KV heads have a convolution."""
    kv_heads = gguf.get("attention.head_count_kv")
    layers = config["num_hidden_layers"]
    is_list = isinstance(kv_heads, list) and all(isinstance(heads, int) for heads in kv_heads)
    if not is_list or len(kv_heads) != layers or len({*kv_heads} - {0}) != 1:
        raise gguf.wrong("attention.head_count_kv", f"a list of {layers} numbers, each 0 or the same one")
    return {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": gguf.size("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # files have the width itself
    }


def _qwen35(gguf: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config keys that Qwen3.5 alone has."""
    if gguf.size("nextn_predict_layers", 0, least=0):
        raise UnsupportedModelError(
            f"{gguf.file} has layers that predict further tokens ({gguf.prefix}nextn_predict_layers), which are not "
            "supported; convert the checkpoint without them (--no-mtp)"
        )
    keys, values = gguf.size("ssm.group_count"), gguf.size("ssm.time_step_rank")
    if keys != values:
        raise UnsupportedModelError(
            f"{gguf.file} has {values} heads of values and {keys} of keys ({gguf.prefix}ssm.group_count), which GGUF "
            "files have in another order; use the folder with safetensors"
        )
    return {
        "model_type": "qwen3_5_text",
        "full_attention_interval": gguf.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": gguf.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": gguf.size("ssm.state_size"),
        "linear_value_head_dim": gguf.size("ssm.inner_size") // values,
    }


ARCHITECTURES |= {"lfm2": "Lfm2ForCausalLM", "qwen35": "Qwen3_5ForCausalLM"}
OF_ARCHITECTURE |= {"lfm2": _lfm2, "qwen35": _qwen35}
