"""The families of hybrids: functions from a Hugging Face config (a dict) to a ModelConfig some of whose layers have a
mixer with a state. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import TILED, Settings
from ..errors import UnsupportedModelError
from .builders import EXPERTS, MIXERS
from .config import ATTENTION, STILL, ModelConfig
from .decoders import HFConfig, decoder, granite
from .mixers import CONV, DELTA_NET, MAMBA
from .mixtures import GRANITE, STACKS, W1_TO_W3, experts_of, mixture, qwen_mixture
from .names import GRANITE4, Names


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


LFM2_MOE = replace(
    LFM2,
    parts={
        **LFM2.parts,
        **{f"feed_forward.{name}": parts for name, parts in W1_TO_W3.items()},
        "feed_forward.gate": ("mlp.gate",),
        "feed_forward.expert_bias": ("mlp.gate.correction",),
    },
)


def lfm2(hf: HFConfig) -> ModelConfig:
    """Returns the config of LFM2: layers of gated short convolutions, and a few of attention with norms on q and k.

    Source: modeling_lfm2.py of transformers, for the rounding of the MLP's width too.
    """
    hf = Settings.of(hf)
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
    return _lfm2(hf, width)


def lfm2_moe(hf: HFConfig) -> ModelConfig:
    """Returns the config of LFM2 with experts: LFM2, whose layers but the first ones have mixtures; their routers score
    by sigmoids. Source: modeling_lfm2_moe.py of transformers."""
    hf = Settings.of(hf)
    config = _lfm2(hf, hf.size("intermediate_size", 7168))
    dense = hf.size("num_dense_layers", 2, least=0)
    return mixture(
        config,
        count=experts_of(hf, 32),
        chosen=hf.size("num_experts_per_tok", 4),
        width=hf.size("moe_intermediate_size", 1792),
        score="sigmoid",
        normalised=hf.flag("norm_topk_prob", True),
        scale=float(hf.number("routed_scaling_factor", 1.0)),
        corrected=hf.flag("use_expert_bias", True),
        mlp=("gated",) * dense + (EXPERTS,) * (config.layers - dense),
        names=LFM2_MOE,
    )


def _lfm2(hf: Settings, width: int) -> ModelConfig:
    """Returns what the models of LFM2 have in common. width: of a gated MLP"""
    layers = hf.size("num_hidden_layers")
    full = hf.get("full_attn_idxs")
    types = hf.texts("layer_types", None) or [
        "full_attention" if full is None or number in full else CONV for number in range(layers)
    ]
    settings = {
        "rms_norm_eps": hf.number("norm_eps", 1e-5, zero=True),
        "intermediate_size": width,
        "tie_word_embeddings": hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
        "rope_theta": hf.number("rope_theta", 1e6),
        "hidden_act": "silu",
    }
    config = decoder({"pad_token_id": 0} | hf | settings, qk_norm=True, names=LFM2)
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    taps = hf.size("conv_L_cache", 3, least=2, most=64)
    return hybrid(config, mixers, sizes={"taps": taps, "bias": hf.flag("conv_bias")})


QWEN = Names(other_names=r"mtp\.|model\.visual\.")
QWEN_MOE = replace(QWEN, stacks=STACKS)
QWEN_NEXT = replace(
    QWEN_MOE,
    parts={
        "linear_attn.in_proj_qkvz": tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"),
        "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    },
    grouped={"linear_attn.in_proj_qkvz": "key_heads", "linear_attn.in_proj_ba": "key_heads"},
)


def qwen3_5(hf: HFConfig, names: Names = QWEN) -> ModelConfig:
    """Returns the config of Qwen3.5's dense text models: gated delta nets, and every fourth layer gated attention, of
    whose heads a quarter is rotated; norms whose weights are stored less one. names: of its tensors"""
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
        names=names,
    )
    sizes = {
        "taps": hf.size("linear_conv_kernel_dim", 4, least=2, most=64),
        "key_heads": hf.size("linear_num_key_heads", 16),
        "value_heads": hf.size("linear_num_value_heads", 32),
        "key_dim": hf.size("linear_key_head_dim", 128),
        "value_dim": hf.size("linear_value_head_dim", 128),
    }
    if hf.flag(TILED):
        sizes["tiled"] = True
    if sizes["value_heads"] % sizes["key_heads"]:
        raise hf.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {sizes['key_heads']}")
    if config.activation != "silu":
        raise UnsupportedModelError("the short convolution of Qwen3.5 is followed by silu; hidden_act is not")
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    config = replace(config, gated=True, rotated_dim=int(head_dim * partial))
    return hybrid(config, mixers, sizes=sizes)


def qwen3_5_moe(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen3.5's text models with experts (35B-A3B): Qwen3.5, whose MLPs are mixtures beside an
    MLP for all rows, with a gate."""
    hf = Settings.of(hf)
    width = hf.size("moe_intermediate_size", 512)
    config = qwen3_5(hf | {"intermediate_size": width}, names=QWEN_MOE)
    return mixture(
        config,
        count=experts_of(hf, 256),
        chosen=hf.size("num_experts_per_tok", 8),
        shared=hf.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def qwen3_next(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen3-Next: Qwen3.5 with experts, where the linears before a delta net are two, and some
    layers may have a dense MLP."""
    hf = Settings.of(hf)
    config = qwen3_5({"intermediate_size": 5632} | hf, names=QWEN_NEXT)
    config = replace(config, sizes={**config.sizes, "in_parts": "qkvzba"})
    shared = hf.size("shared_expert_intermediate_size", 512)
    hf = {"norm_topk_prob": True, "moe_intermediate_size": 512} | hf
    return qwen_mixture(hf, config, count=512, chosen=10, shared=shared, shared_gate=True, names=QWEN_NEXT)


def qwen3_5_with_tower(hf: HFConfig) -> ModelConfig:
    """Returns the config of a checkpoint of Qwen3.5 that has a tower for images, of which text alone is read."""
    return _without_tower(hf, qwen3_5)


def qwen3_5_moe_with_tower(hf: HFConfig) -> ModelConfig:
    """Returns the config of a checkpoint of Qwen3.5 with experts and a tower for images, of which text alone is
    read."""
    return _without_tower(hf, qwen3_5_moe)


def _without_tower(hf: HFConfig, family: Callable[[HFConfig], ModelConfig]) -> ModelConfig:
    hf = Settings.of(hf)
    hf.get("vision_config")
    config = family(hf.settings("text_config"))
    names = replace(config.names, prefix="", before=r"model\.language_model\.")
    tied = hf.flag("tie_word_embeddings", config.tie_embeddings)
    return replace(config, names=names, tie_embeddings=tied)


def granite4(hf: HFConfig) -> ModelConfig:
    """Returns the config of Granite 4: layers of attention alone; or most of Mamba-2, and a few of attention, which
    rotate nothing (4 H), with or without experts."""
    hf = Settings.of(hf)
    norm = hf.text("normalization_function", "rmsnorm")
    if norm != "rmsnorm":
        raise UnsupportedModelError(f"normalization_function is {norm}; Granite 4 works with rmsnorm")
    types = hf.texts("layer_types", None) or hf.texts("layers_block_type", None) or [MAMBA]
    kinds = {"full_attention": ATTENTION, "linear_attention": MAMBA}
    mixers = [kinds.get(kind, kind) for kind in types]
    shared, count = hf.size("shared_intermediate_size", 1024), hf.size("num_local_experts", 8, least=0)
    if count:
        chosen = hf.size("num_experts_per_tok", 8)
        config = mixture(granite(hf), count=count, chosen=chosen, shared=shared, names=GRANITE)
    else:
        hf.get("num_experts_per_tok")  # of no experts
        config = replace(granite(hf | {"intermediate_size": shared}), names=GRANITE4)
    if hf.text("position_embedding_type", None) != "rope":
        config = replace(config, rope=STILL)
    hf.get("mamba_chunk_size")  # of transformers' kernels
    if set(mixers) == {ATTENTION}:
        for key in [*(key for key in hf if key.startswith("mamba_")), "time_step_limit"]:
            hf.get(key)  # of recurrent layers, of which there are none
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
    return hybrid(config, mixers, sizes=sizes)


def _limits(hf: Settings) -> tuple[float, ...]:
    """Returns the least and the largest time step of Mamba-2."""
    limits = hf.get("time_step_limit", [0.0, math.inf])
    limits = limits if isinstance(limits, list | tuple) else ()
    # transformers writes infinity as an object.
    numbers = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if len(numbers) != 2 or not all(isinstance(limit, int | float) for limit in numbers):
        raise hf.wrong("time_step_limit", "two numbers")
    return tuple(map(float, numbers))
