"""The config keys of mixtures of experts, of the metadata of GGUF files."""

from __future__ import annotations

from ..errors import UnsupportedModelError
from .gguf_config import ARCHITECTURES, MIXTURES, OF_ARCHITECTURE, Keys, windows_of
from .settings import Settings

# llama.cpp's functions of the router's logits.
SOFTMAX, SIGMOID = 1, 2


def counts(gguf: Settings, key: str, function: int = SOFTMAX) -> Keys:
    """Returns how many experts there are, under this key, and how many of them a row goes through. function: of the
    router's logits"""
    found = gguf.size("expert_gating_func", function)
    if found != function:
        raise UnsupportedModelError(
            f"{gguf.file}: the router has {gguf.prefix}expert_gating_func {found}; only {function} is supported for "
            "this architecture"
        )
    if (scale := gguf.number("expert_weights_scale", 1.0, zero=True)) not in (0.0, 1.0):
        raise UnsupportedModelError(
            f"{gguf.file}: {gguf.prefix}expert_weights_scale is {scale:g}; factors of experts are not supported"
        )
    return {key: gguf.size("expert_count"), "num_experts_per_tok": gguf.size("expert_used_count")}


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


def _gpt_oss(gguf: Settings, config: Keys) -> Keys:
    rope = config["rope_parameters"] | {"truncate": False}  # which files do not say
    return windows_of(gguf, 2) | {"rope_parameters": rope}


ARCHITECTURES |= {
    "gpt-oss": "GptOssForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
}
OF_ARCHITECTURE["gpt-oss"] = _gpt_oss
MIXTURES |= {
    "llama": lambda gguf, config: counts(gguf, "num_local_experts") | {"architectures": ["MixtralForCausalLM"]},
    "gpt-oss": lambda gguf, config: counts(gguf, "num_local_experts"),
    "qwen2moe": _qwen2,
    "qwen3moe": lambda gguf, config: _qwen(gguf, True),
    "olmoe": lambda gguf, config: counts(gguf, "num_experts"),
    "granitemoe": _granite,
}
