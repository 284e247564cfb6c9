"""The families of hybrids: functions from a Hugging Face config (a dict) to a ModelConfig some of whose layers have a
mixer with a state. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError
from .builders import MIXERS
from .config import ATTENTION, ModelConfig
from .decoders import HFConfig, decoder
from .decoders import granite4 as dense_granite4
from .mixers import CONV, DELTA_NET, MAMBA
from .names import Names


def hybrid(config: ModelConfig, mixers: Sequence[str], **values: Any) -> ModelConfig:
    """Return a hybrid with the sizes of another model. mixers: of each layer; values: further fields of ModelConfig.

    Raise UnsupportedModelError for a kind of mixer that is not known, and for a model without attention.
    """
    if len(mixers) != config.layers:
        raise UnsupportedModelError(f"layer_types has {len(mixers)} entries; it must have {config.layers}")
    known = {ATTENTION, "none", *MIXERS}
    if unknown := {name for mixer in mixers for name in mixer.split("+")} - known:
        kinds = ", ".join(sorted(known))
        raise UnsupportedModelError(f"layers of the kind {sorted(unknown)[0]!r} are not known; these are: {kinds}")
    planes = tuple(plane for plane, mixer in zip(config.planes, mixers, strict=True) if ATTENTION in mixer.split("+"))
    return replace(config, planes=planes, mixers=tuple(mixers), **values)


LFM2 = Names(
    parts={
        "embedding_norm": ("norm",),
        "operator_norm": ("input_layernorm",),
        "ffn_norm": ("post_attention_layernorm",),
        "self_attn.out_proj": ("self_attn.o_proj",),
        "self_attn.q_layernorm": ("self_attn.q_norm",),
        "self_attn.k_layernorm": ("self_attn.k_norm",),
        "feed_forward.w1": ("mlp.gate_proj",),
        "feed_forward.w3": ("mlp.up_proj",),
        "feed_forward.w2": ("mlp.down_proj",),
    }
)


def lfm2(hf: HFConfig) -> ModelConfig:
    """Returns the config of LFM2: layers of gated short convolutions, and a few of attention with norms on q and k.

    Source: modeling_lfm2.py of transformers, for the rounding of the MLP's width too.
    """
    hf = Settings.of(hf)
    layers = hf.size("num_hidden_layers")
    full = hf.get("full_attn_idxs")
    types = hf.texts("layer_types", None) or [
        "full_attention" if full is None or number in full else CONV for number in range(layers)
    ]
    hidden, width = hf.size("hidden_size"), hf.size("block_ff_dim", None) or hf.size("intermediate_size")
    unit = hf.size("block_multiple_of", 256)
    factor = hf.number("block_ffn_dim_multiplier", 1.0)
    if hf.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        width = -(-int(factor * width) // unit) * unit
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        if hf.size(key, hidden) != hidden:
            raise UnsupportedModelError(f"{key} is {hf[key]}, and hidden_size {hidden}; both must be equal")
    for key in ("block_use_swiglu", "block_norm_eps", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc"):
        hf.get(key)  # of the model that was trained; transformers does not read them
    tied = hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True))
    settings = {
        "rms_norm_eps": hf.number("norm_eps", 1e-5, zero=True),
        "intermediate_size": width,
        "tie_word_embeddings": tied,
        "rope_theta": hf.number("rope_theta", 1e6),
        "hidden_act": "silu",
    }
    config = decoder({"pad_token_id": 0} | hf | settings, qk_norm=True, names=LFM2)
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    taps = hf.size("conv_L_cache", 3, least=2, most=64)
    return hybrid(config, mixers, sizes={"taps": taps, "bias": hf.flag("conv_bias")})


def qwen3_5(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen3.5's dense text models: gated delta nets, and every fourth layer gated attention, of
    whose heads a quarter is rotated; norms whose weights are stored less one."""
    hf = Settings.of(hf)
    layers, interval = hf.size("num_hidden_layers"), hf.size("full_attention_interval", 4)
    types = hf.texts("layer_types", None) or [
        "full_attention" if (number + 1) % interval == 0 else DELTA_NET for number in range(layers)
    ]
    rope = hf.settings("rope_parameters") or hf.settings("rope_scaling")
    partial = rope.number("partial_rotary_factor", None) or hf.number("partial_rotary_factor", 0.25)
    # The three axes of an image's positions are one and the same for text.
    for key in ("mrope_section", "mrope_interleaved"):
        rope.get(key)
    head_dim = hf.size("head_dim", 256)
    bias = hf.flag("attention_bias")
    plain = {key: value for key, value in rope.items() if key not in ("partial_rotary_factor", "mrope_section")}
    settings = {"rope_parameters": plain, "rope_scaling": None, "partial_rotary_factor": None}
    config = decoder(
        {"hidden_act": "silu"} | hf | settings,
        head_dim=head_dim,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        names=Names(other_names=r"mtp\.|model\.visual\."),
    )
    sizes = {
        "taps": hf.size("linear_conv_kernel_dim", 4, least=2, most=64),
        "key_heads": hf.size("linear_num_key_heads", 16),
        "value_heads": hf.size("linear_num_value_heads", 32),
        "key_dim": hf.size("linear_key_head_dim", 128),
        "value_dim": hf.size("linear_value_head_dim", 128),
    }
    if sizes["value_heads"] % sizes["key_heads"]:
        raise hf.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {sizes['key_heads']}")
    if config.activation != "silu":
        raise UnsupportedModelError("the short convolution of Qwen3.5 is followed by silu; hidden_act is not")
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    config = replace(config, gated=True, rotated_dim=int(head_dim * partial))
    return hybrid(config, mixers, sizes=sizes)


def qwen3_5_with_tower(hf: HFConfig) -> ModelConfig:
    """Returns the config of a checkpoint of Qwen3.5 that has a tower for images, of which text alone is read."""
    hf = Settings.of(hf)
    hf.get("vision_config")
    config = qwen3_5(hf.settings("text_config"))
    names = Names(prefix="", before=r"model\.language_model\.", other_names=r"mtp\.|model\.visual\.")
    tied = hf.flag("tie_word_embeddings", config.tie_embeddings)
    return replace(config, names=names, tie_embeddings=tied)


def granite4(hf: HFConfig) -> ModelConfig:
    """Returns the config of Granite 4 where it has no experts: layers of Mamba-2, and a few of attention, which rotate
    nothing (4 H); or attention alone."""
    hf = Settings.of(hf)
    types = hf.texts("layer_types", None) or hf.texts("layers_block_type", None) or [MAMBA]
    mixers = [ATTENTION if kind in (ATTENTION, "full_attention") else kind for kind in types]
    config = dense_granite4(hf | {"layer_types": [ATTENTION] * len(mixers)})
    if set(mixers) == {ATTENTION}:
        return config
    heads, inner = hf.size("mamba_n_heads", 128), hf.size("mamba_expand", 2) * config.hidden
    groups = hf.size("mamba_n_groups", 1)
    if hf.get("mamba_d_head", "auto") not in ("auto", inner / heads) or inner % heads or heads % groups:
        raise hf.wrong("mamba_n_heads", f"a multiple of mamba_n_groups that divides the width, {inner}")
    if config.activation != "silu":
        raise UnsupportedModelError("the short convolution of Granite 4 is followed by silu; hidden_act is not")
    sizes = {
        "heads": heads,
        "dim": inner // heads,
        "groups": groups,
        "state": hf.size("mamba_d_state", 256),
        "taps": hf.size("mamba_d_conv", 4, least=2, most=64),
        "conv_bias": hf.flag("mamba_conv_bias", True),
        "bias": hf.flag("mamba_proj_bias"),
        "limits": _limits(hf),
    }
    kinds = {"linear_attention": MAMBA}
    return hybrid(config, [kinds.get(kind, kind) for kind in mixers], sizes=sizes)


def _limits(hf: Settings) -> tuple[float, ...]:
    """Returns the least and the largest time step of Mamba-2."""
    limits = hf.get("time_step_limit", [0.0, math.inf])
    limits = limits if isinstance(limits, list | tuple) else ()
    # transformers writes infinity as an object.
    numbers = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if len(numbers) != 2 or not all(isinstance(limit, int | float) for limit in numbers):
        raise hf.wrong("time_step_limit", "two numbers")
    return tuple(map(float, numbers))
