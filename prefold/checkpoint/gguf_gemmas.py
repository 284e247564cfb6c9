"""Config keys of Gemma 3n and 4, from GGUF metadata."""

from __future__ import annotations

from statistics import NormalDist

from ..errors import UnsupportedModelError
from .gguf_config import (
    ARCHITECTURES,
    BY_LAYER,
    FULL,
    MIXTURES,
    OF_ARCHITECTURE,
    ROWS,
    SLIDING,
    TIED_VALUES,
    Keys,
    windows_of,
)
from .settings import Settings

HEADS, WIDTH = "attention.head_count_kv", "feed_forward_length"
DEVIATIONS = "activation_sparsity_scale"


def _gemma3n(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Gemma 3n. A missing logit cap has llama.cpp's default."""
    layers = config["num_hidden_layers"]
    gguf.size("attention.sliding_window")
    gguf.get("altup.lr_multiplier")  # only used in training
    deviations = gguf.get(f"{DEVIATIONS}.layers")  # -inf for layers without a cutoff
    if not isinstance(deviations, list) or not all(isinstance(one, float) for one in deviations):
        raise gguf.wrong(DEVIATIONS, f"a list of {layers} numbers, one per layer")
    return windows_of(gguf, 5) | {
        "model_type": "gemma3n_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": gguf.get(f"{WIDTH}.layers") or config["intermediate_size"],
        "activation_sparsity_pattern": [NormalDist().cdf(one) for one in deviations],
        "altup_active_idx": gguf.size("altup.active_idx", least=0),
        "altup_num_inputs": gguf.size("altup.num_inputs"),
        "altup_correct_scale": gguf.flag("altup.correct_scale", True),
        "num_kv_shared_layers": gguf.size("attention.shared_kv_layers", least=0, most=layers),
        "hidden_size_per_layer_input": gguf.size("embedding_length_per_layer_input"),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
        "rope_parameters": _ropes(gguf, config),
    }


def _ropes(gguf: Settings, config: Keys) -> Keys:
    """Return the RoPE settings of each kind of layer."""
    near = {"rope_type": "default", "rope_theta": gguf.number("rope.freq_base_swa", 1e4)}
    return {FULL: config["rope_parameters"], SLIDING: near}


def _gemma4(gguf: Settings, config: Keys) -> Keys:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    shared = gguf.size("attention.shared_kv_layers", 0, least=0, most=layers)
    near = gguf.size("attention.key_length_swa", head_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if gguf.size(key, near) != near:
            raise UnsupportedModelError(f"{gguf.file}: {key} must equal attention.key_length_swa, {near}")
    windows = windows_of(gguf, 6)
    types = windows.get("layer_types", [FULL] * layers)
    widths = _of_each(gguf, WIDTH, ["shared" if number >= layers - shared else "own" for number in range(layers)])
    if widths and widths.get("shared", 0) not in (0, widths["own"], 2 * widths["own"]):
        raise UnsupportedModelError(
            f"{gguf.file}: the MLPs of the last {shared} layers have the width {widths['shared']}; it must be"
            f" {widths['own']} or {2 * widths['own']}"
        )
    heads = _of_each(gguf, HEADS, types)
    return windows | {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": near,
        "global_head_dim": head_dim,
        "num_key_value_heads": heads.get(SLIDING, config["num_key_value_heads"]),
        "num_global_key_value_heads": heads.get(FULL),
        "attention_k_eq_v": config.pop("has_tied_values"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths.get("shared") == 2 * widths.get("own", 0),
        "hidden_size_per_layer_input": gguf.size("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
        "rope_parameters": _ropes(gguf, config),
    }


def _of_each(gguf: Settings, key: str, kinds: list[str]) -> dict[str, int]:
    """Return the value of a setting for each kind of layer (`kinds`: one per layer); {} if all layers share it."""
    values = gguf.get(f"{key}.layers")
    if values is None:
        return {}
    found = dict(zip(kinds, values, strict=False))
    if len(values) != len(kinds) or any(found[kind] != value for kind, value in zip(kinds, values, strict=True)):
        raise gguf.wrong(key, "one number, or one per layer, equal for layers of the same kind")
    return found


def _experts(gguf: Settings, config: Keys) -> Keys:
    return {
        "enable_moe_block": True,
        "num_experts": gguf.size("expert_count"),
        "top_k_experts": gguf.size("expert_used_count"),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
    }


ARCHITECTURES |= {"gemma3n": "Gemma3nForCausalLM", "gemma4": "Gemma4ForCausalLM"}
OF_ARCHITECTURE |= {"gemma3n": _gemma3n, "gemma4": _gemma4}
ROWS["gemma3n"] = {
    "vocab_size_per_layer_input": "per_layer_token_embd.weight",
    "laurel_rank": "blk.0.laurel_l.weight",
}
MIXTURES["gemma4"] = _experts
TIED_VALUES.add("gemma4")
BY_LAYER |= {f"gemma4.{HEADS}", f"gemma4.{WIDTH}", f"gemma3n.{WIDTH}", f"gemma3n.{DEVIATIONS}"}
