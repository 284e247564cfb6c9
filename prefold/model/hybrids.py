"""Families of hybrids: functions from a Hugging Face config to a ModelConfig with states in some layers. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, TILED, Settings
from ..errors import UnsupportedModelError
from .builders import EXPERTS, MIXERS, NO_MLP
from .config import ATTENTION, STILL, ModelConfig, Plane
from .decoders import FULL, SLIDING, HFConfig, decoder, granite, llama, read_rope, windows_of
from .mixers import CONV, DELTA_NET, MAMBA
from .mixtures import GRANITE, STACKS, W1_TO_W3, experts_of, mixture, qwen_mixture
from .names import GRANITE4, Names


def hybrid(config: ModelConfig, mixers: Sequence[str], **values: Any) -> ModelConfig:
    """Return a hybrid with the sizes of another model.

    Raise UnsupportedModelError for an unknown mixer, and for a model without attention.

    Args:
        config: supplies the sizes.
        mixers: one entry per layer, see ModelConfig.
        values: further fields of ModelConfig.
    """
    if len(mixers) != config.layers:
        raise UnsupportedModelError(f"layer_types has {len(mixers)} entries; it must have {config.layers}")
    known = {ATTENTION, "none", *MIXERS}
    if unknown := {name for mixer in mixers for name in mixer.split("+")} - known:
        kinds = ", ".join(sorted(known))
        raise UnsupportedModelError(f"the mixer {sorted(unknown)[0]!r:.200} is unknown; known mixers: {kinds}")
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
    """Return the config of LFM2: gated short convolutions in most layers; attention with norms on q and k in the
    others.

    Source: modeling_lfm2.py of transformers, also for the rounding of the MLP's width.
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
            raise UnsupportedModelError(f"{key} is {hf[key]}; it must be hidden_size, {hidden}")
    for key in ("block_use_swiglu", "block_norm_eps", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc"):
        hf.get(key)  # from training; transformers does not read them
    return _lfm2(hf, width, _lfm2_types(hf))


def lfm2_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of LFM2 MoE: LFM2 with experts after the first layers; sigmoid scores. Source:
    modeling_lfm2_moe.py of transformers."""
    hf = Settings.of(hf)
    config = _lfm2(hf, hf.size("intermediate_size", 7168), _lfm2_types(hf))
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


LFM3 = replace(LFM2, parts={**LFM2.parts, "self_attn.gate_proj": ("self_attn.g_proj",)})
LFM3_SANDWICH = replace(
    LFM3,
    parts={
        **LFM3.parts,
        "post_operator_norm": ("post_attention_layernorm",),
        "ffn_norm": ("pre_feedforward_layernorm",),
        "post_ffn_norm": ("post_feedforward_layernorm",),
    },
)


def lfm3(hf: HFConfig) -> ModelConfig:
    """Return the config of LFM3: LFM2 with norms after each sublayer too; one gate per attention head; some layers
    with a sliding window and their own RoPE settings. Source: modeling_lfm3.py of transformers."""
    hf = {"sliding_window": 256, "head_dim": 128, "pad_token_id": 124893} | Settings.of(hf)
    types = hf.texts("layer_types", None) or [
        FULL if number % 4 == 2 else CONV if number % 4 or not number else SLIDING for number in range(_layers(hf))
    ]
    if not hf.settings("rope_parameters"):
        far = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        hf = hf | {"rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: far}}
    every, window = hf.settings("rope_parameters"), hf.size("sliding_window", None)
    if SLIDING in types and window is None:
        raise hf.wrong("sliding_window", "a number of positions, because layer_types has sliding attention")
    ropes = {kind: hf | {"rope_scaling": None, "rope_parameters": every.settings(kind)} for kind in (FULL, SLIDING)}
    near = Plane(window, read_rope({"rope_theta": 1e6} | ropes[SLIDING]))
    sandwich, bias = hf.flag("use_sandwich_norm", True), hf.flag("attention_bias")
    return replace(
        _lfm2(ropes[FULL], hf.size("intermediate_size"), types, taps=7),
        planes=tuple(near if kind == SLIDING else Plane() for kind in types if kind in (FULL, SLIDING)),
        out_norms=sandwich,
        head_gates=hf.flag("use_attention_gate", True),
        qkv_bias=bias,
        o_bias=bias,
        names=LFM3_SANDWICH if sandwich else LFM3,
    )


def _layers(hf: Settings) -> int:
    layers: int = hf.size("num_hidden_layers", most=MOST_LAYERS)
    return layers


def _lfm2_types(hf: Settings) -> list[str]:
    """Return the type of each layer of LFM2."""
    full = hf.get("full_attn_idxs")
    types = [FULL if full is None or number in full else CONV for number in range(_layers(hf))]
    return hf.texts("layer_types", None) or types


def _lfm2(hf: Settings, width: int, types: Sequence[str], taps: int = 3) -> ModelConfig:
    """Return the common part of LFM2 and LFM3.

    Args:
        width: inner width of the MLP.
        types: one type per layer.
        taps: default size of a convolution.
    """
    settings = {
        "rms_norm_eps": hf.number("norm_eps", 1e-5, zero=True),
        "intermediate_size": width,
        "tie_word_embeddings": hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
        "rope_theta": hf.number("rope_theta", 1e6),
        "hidden_act": "silu",
    }
    config = decoder({"pad_token_id": 0} | hf | settings, qk_norm=True, names=LFM2)
    mixers = [ATTENTION if kind in (FULL, SLIDING) else kind for kind in types]
    taps = hf.size("conv_L_cache", taps, least=2, most=64)
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
    """Return the config of Qwen3.5 (dense, text): gated delta nets; gated attention in every fourth layer, with RoPE
    on a quarter of each head; norm weights stored minus 1. `names` are the names of its tensors."""
    hf = Settings.of(hf)
    layers, interval = hf.size("num_hidden_layers"), hf.size("full_attention_interval", 4)
    types = hf.texts("layer_types", None) or [
        "full_attention" if (number + 1) % interval == 0 else DELTA_NET for number in range(layers)
    ]
    rope = hf.settings("rope_parameters") or hf.settings("rope_scaling")
    partial = rope.number("partial_rotary_factor", None) or hf.number("partial_rotary_factor", 0.25)
    # The three position axes of images are equal for text.
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
    config = replace(config, gated=True, rotated_dim=int(head_dim * partial))
    return _delta_hybrid(hf, config, types, (16, 32, 128, 128))


def _delta_hybrid(
    hf: Settings, config: ModelConfig, types: Sequence[str], defaults: tuple[int, int, int, int], **sizes: object
) -> ModelConfig:
    """Return a hybrid with gated delta nets.

    Args:
        types: one type per layer.
        defaults: default key heads, value heads, elements per key and elements per value; 0: three quarters of hidden /
            key heads for keys, twice the key's size for values.
        sizes: further sizes of the mixer.
    """
    key_heads = hf.size("linear_num_key_heads", defaults[0])
    value_heads = hf.size("linear_num_value_heads", defaults[1])
    key_dim = hf.size("linear_key_head_dim", defaults[2] or int(0.75 * config.hidden / key_heads))
    sizes |= {
        "taps": hf.size("linear_conv_kernel_dim", 4, least=2, most=64),
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": hf.size("linear_value_head_dim", defaults[3] or 2 * key_dim),
    }
    if hf.flag(TILED):
        sizes["tiled"] = True
    if value_heads % key_heads:
        raise hf.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    _check_silu(config)
    return hybrid(config, [ATTENTION if kind == FULL else kind for kind in types], sizes=sizes)


def _check_silu(config: ModelConfig) -> None:
    if config.activation != "silu":
        raise UnsupportedModelError("hidden_act must be silu, because the mixer's convolutions use it too")


LARA_MINI = Names(
    parts={
        "linear_attn.in_proj": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
        "linear_attn.out_norm": ("linear_attn.norm",),
    },
    stacks=STACKS,
)


def lara_mini(hf: HFConfig) -> ModelConfig:
    """Return the config of Lara Mini: gated delta nets, sliding-window attention, and full attention without RoPE;
    experts with a shared expert in every layer. Source: modeling_lara_mini.py of transformers."""
    hf = Settings.of(hf)
    period = (DELTA_NET, SLIDING, DELTA_NET, FULL, SLIDING)
    types = hf.texts("layer_types", None) or [period[number % 5] for number in range(_layers(hf))]
    defaults = {"sliding_window": 512, "head_dim": 128, "num_key_value_heads": 4, "tie_word_embeddings": True}
    width = {"intermediate_size": hf.size("moe_intermediate_size", 512)}
    windows = windows_of(defaults | hf, [SLIDING if kind == SLIDING else FULL for kind in types])
    config = llama(defaults | hf | width, qk_norm=True, windows=windows)
    planes = tuple(
        plane if kind == SLIDING else Plane(rope=STILL) for plane, kind in zip(config.planes, types, strict=True)
    )
    config = mixture(
        replace(config, planes=planes),
        count=experts_of(hf, 128),
        chosen=hf.size("num_experts_per_tok", 4),
        shared=hf.size("shared_expert_intermediate_size", 512),
        normalised=hf.flag("norm_topk_prob", True),
        names=LARA_MINI,
    )
    types = [FULL if kind == SLIDING else kind for kind in types]
    return _delta_hybrid(hf, config, types, (8, 16, 128, 128))


OLMO_HYBRID = Names(
    parts={
        "attention_layer_norm": ("input_layernorm",),
        "feedforward_layer_norm": ("post_attention_layernorm",),
        **{f"linear_attn.{part}_proj": (f"linear_attn.in_proj_{part}",) for part in "qkvba"},
        "linear_attn.g_proj": ("linear_attn.in_proj_z",),
        "linear_attn.o_norm": ("linear_attn.norm",),
        "linear_attn.o_proj": ("linear_attn.out_proj",),
    },
    joined={"linear_attn.conv1d.weight": tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")},
)


def olmo_hybrid(hf: HFConfig) -> ModelConfig:
    """Return the config of OLMo Hybrid: gated delta nets, whose states may have negative eigenvalues, with norms
    before each sublayer; OLMo 2's attention, without RoPE in the published models. Source: modeling_olmo_hybrid.py
    of transformers."""
    hf = Settings.of(hf)
    types = hf.texts("layer_types", None) or [FULL if n % 4 == 3 else DELTA_NET for n in range(_layers(hf))]
    types = types if FULL in types else [*types[:-1], FULL]
    rope = hf.settings("rope_parameters")
    is_still = any("rope_theta" in one and one["rope_theta"] is None for one in (hf, rope))
    attends = tuple(kind == FULL for kind in types)
    config = llama(
        {"pad_token_id": 100277} | hf,
        row_qk_norm=True,
        in_norms=tuple(not one for one in attends),
        out_norms=attends,
        names=OLMO_HYBRID,
    )
    config = replace(config, rope=STILL) if is_still else config
    heads, scale = config.heads, 2.0 if hf.flag("linear_allow_neg_eigval", True) else 1.0
    return _delta_hybrid(hf, config, types, (heads, heads, 0, 0), in_parts="qkvzba", eps=1e-5, beta_scale=scale)


def qwen3_5_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen3.5 MoE (35B-A3B, text): Qwen3.5 with experts and a gated shared expert."""
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
    """Return the config of Qwen3-Next: Qwen3.5 MoE with other fused tensors; some layers may have a dense MLP."""
    hf = Settings.of(hf)
    config = qwen3_5({"intermediate_size": 5632} | hf, names=QWEN_NEXT)
    config = replace(config, sizes={**config.sizes, "in_parts": "qkvzba"})
    shared = hf.size("shared_expert_intermediate_size", 512)
    hf = {"norm_topk_prob": True, "moe_intermediate_size": 512} | hf
    return qwen_mixture(hf, config, count=512, chosen=10, shared=shared, shared_gate=True, names=QWEN_NEXT)


def qwen3_5_with_tower(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen3.5 with an image tower; text only."""
    return _without_tower(hf, qwen3_5)


def qwen3_5_moe_with_tower(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen3.5 MoE with an image tower; text only."""
    return _without_tower(hf, qwen3_5_moe)


def _without_tower(hf: HFConfig, family: Callable[[HFConfig], ModelConfig]) -> ModelConfig:
    hf = Settings.of(hf)
    hf.get("vision_config")
    config = family(hf.settings("text_config"))
    names = replace(config.names, prefix="", before=r"model\.language_model\.")
    tied = hf.flag("tie_word_embeddings", config.tie_embeddings)
    return replace(config, names=names, tie_embeddings=tied)


def granite4(hf: HFConfig) -> ModelConfig:
    """Return the config of Granite 4: all attention, or mostly Mamba-2 with a few attention layers without RoPE (4
    H); with or without experts."""
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
        hf.get("num_experts_per_tok")  # no effect without experts
        config = replace(granite(hf | {"intermediate_size": shared}), names=GRANITE4)
    if hf.text("position_embedding_type", None) != "rope":
        config = replace(config, rope=STILL)
    if set(mixers) == {ATTENTION}:
        for key in [*(key for key in hf if key.startswith("mamba_")), "time_step_limit"]:
            hf.get(key)  # for recurrent layers, which this model lacks
        return config
    return hybrid(config, mixers, sizes=_mamba_sizes(hf, config, hf.size("mamba_expand", 2) * config.hidden))


def _mamba_sizes(hf: Settings, config: ModelConfig, inner: int) -> dict[str, object]:
    """Return the sizes of Mamba-2 from the keys of Granite 4, Bamba and Falcon-H1.

    `inner` is the width of all heads together.
    """
    hf.get("mamba_chunk_size")  # for transformers' kernels
    heads, groups = hf.size("mamba_n_heads", 128), hf.size("mamba_n_groups", 1)
    if hf.get("mamba_d_head", "auto") not in ("auto", inner / heads) or inner % heads or heads % groups:
        raise hf.wrong("mamba_n_heads", f"a multiple of mamba_n_groups, and a divisor of the inner width, {inner}")
    _check_silu(config)
    return {
        "heads": heads,
        "dim": inner // heads,
        "groups": groups,
        "state": hf.size("mamba_d_state", 256),
        "taps": hf.size("mamba_d_conv", 4, least=2, most=64),
        "conv_bias": hf.flag("mamba_conv_bias", True),
        "bias": hf.flag("mamba_proj_bias"),
        "limits": _limits(hf),
    }


def _limits(hf: Settings) -> tuple[float, ...]:
    """Return the smallest and the largest time step of Mamba-2."""
    limits = hf.get("time_step_limit", [0.0, math.inf])
    limits = limits if isinstance(limits, list | tuple) else ()
    if len(limits) != 2 or not all(isinstance(limit, int | float) for limit in limits):
        raise hf.wrong("time_step_limit", "two numbers")
    return tuple(map(float, limits))


BAMBA = Names(
    parts={"final_layernorm": ("norm",), "pre_ff_layernorm": ("post_attention_layernorm",)}
    | {f"feed_forward.{name}_proj": (f"mlp.{name}_proj",) for name in ("gate", "up", "down")}
)


def bamba(hf: HFConfig) -> ModelConfig:
    """Return the config of Bamba: Mamba-2; a few attention layers with RoPE on half of each head. Source:
    modeling_bamba.py of transformers."""
    hf = Settings.of(hf)
    full = hf.get("attn_layer_indices") or []
    if not isinstance(full, list) or not all(isinstance(number, int) for number in full):
        raise hf.wrong("attn_layer_indices", "a list of layer indices")
    hf.get("attn_rotary_emb")  # ignored: transformers rotates half of each head
    defaults = {"rms_norm_eps": 1e-5, "pad_token_id": 0, "num_key_value_heads": 8}
    config = llama(defaults | hf | {"partial_rotary_factor": 0.5}, names=BAMBA)
    inner = hf.size("mamba_expand", 2) * config.hidden
    mixers = [ATTENTION if number in full else MAMBA for number in range(config.layers)]
    return hybrid(config, mixers, sizes=_mamba_sizes(hf, config, inner))


def falcon_h1(hf: HFConfig) -> ModelConfig:
    """Return the config of Falcon-H1: Mamba-2 and attention side by side in every layer; factors on most linears.
    Source: modeling_falcon_h1.py of transformers."""
    hf = Settings.of(hf)
    defaults = {"rms_norm_eps": 1e-5, "pad_token_id": 0, "num_key_value_heads": 8}
    config = llama(defaults | hf, names=BAMBA)
    names = ("attention_in", "attention_out", "ssm_in", "ssm_out", "key", "embedding", "lm_head")
    scale = {name: float(hf.number(f"{name}_multiplier", 1.0)) for name in names}
    if not hf.flag("mamba_use_mlp", True):
        raise hf.wrong("mamba_use_mlp", "true; layers without an MLP are not supported")
    hf.get("time_step_floor")  # for random weights
    of_mlp, of_ssm = (_factors(hf, key, count) for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)))
    inner = hf.size("mamba_expand", 2) * config.hidden
    inner = hf.size(
        "mamba_d_ssm", inner if "mamba_d_ssm" in hf else 1024
    )  # a missing key has another default than null
    norm = "first" if hf.flag("mamba_norm_before_gate", True) else "last"
    sizes = _mamba_sizes(hf, config, inner) | {
        "norm": norm if hf.flag("mamba_rms_norm") else "",
        "out_bias": hf.flag("projectors_bias"),
        "scales": tuple(scale["ssm_in"] * factor for factor in of_ssm),
    }
    for name, biased in (("attention_in", config.qkv_bias), ("ssm_in", sizes["bias"])):
        if biased and scale[name] != 1:
            raise UnsupportedModelError(f"{name}_multiplier is {scale[name]}; it must be 1 if its linears have biases")
    # A factor of k, or of the input of q and k, scales attention scores. A factor of the input of v scales the result.
    of_keys = scale["attention_in"] ** 2 * scale["key"]
    parts = {MAMBA: scale["ssm_out"], ATTENTION: scale["attention_in"] * scale["attention_out"], "mlp": of_mlp[1]}
    return hybrid(
        config,
        [f"{ATTENTION}+{MAMBA}"] * config.layers,
        sizes=sizes,
        part_scales=parts,
        gate_scale=of_mlp[0],
        query_scalar=config.head_dim / of_keys**2,
        embedding_scale=scale["embedding"],
        logit_scale=scale["lm_head"],
    )


def _factors(hf: Settings, key: str, count: int) -> Sequence[float]:
    """Return a list of `count` factors; all 1 if the config has none."""
    factors: list[float] = hf.numbers(key, [1.0] * count)
    if len(factors) != count:
        raise hf.wrong(key, f"a list of {count} numbers")
    return [float(factor) for factor in factors]


_OF_MAMBA = ("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias")
NEMOTRON_H = Names(
    parts={
        "embeddings": ("embed_tokens",),
        "norm_f": ("norm",),
        "norm": ("input_layernorm",),
        **{f"mixer.{name}": (f"mamba.{name}",) for name in _OF_MAMBA},
        **{f"mixer.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkvo"},
        **{f"mixer.{name}_proj": (f"mlp.{name}_proj",) for name in ("up", "down")},
        "mixer.gate": ("mlp.gate",),
        "mixer.gate.e_score_correction_bias": ("mlp.gate.correction",),
        **{f"mixer.experts.{{}}.{name}_proj": (f"mlp.experts.{{}}.{name}_proj",) for name in ("up", "down")},
        **{f"mixer.shared_experts.{name}_proj": (f"mlp.shared_expert.{name}_proj",) for name in ("up", "down")},
        "mixer.fc1_latent_proj": ("mlp.latent_in",),
        "mixer.fc2_latent_proj": ("mlp.latent_out",),
    },
    stacks={f"mixer.experts.{name}_proj": (f"mlp.experts.{{}}.{name}_proj.weight",) for name in ("up", "down")},
    before=r"backbone\.",
    other_names=r"mtp\.",
)
# Keys of Nemotron-H in early files.
_NEMOTRON_KEYS = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}
# Keys without effect: ignored by transformers, for random weights, or for multi-token prediction.
# The dtype of states has no effect because prefold's states are float32.
_NEMOTRON_UNREAD = (
    "time_step_limit",
    "mamba_dt_limit",
    "chunk_size",
    "mamba_chunk_size",
    "mamba_ssm_cache_dtype",
    "n_shared_experts",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "num_nextn_predict_layers",
    "rescale_prenorm_residual",
    "time_step_floor",
    "mamba_dt_init_floor",
    "mamba_dt_max",
    "mamba_expand",
    "norm_eps",  # layer_norm_epsilon decides
    "attention_head_dim",  # head_dim decides
)
_NEMOTRON_KINDS = {"M": DELTA_NET, "E": "moe", "*": FULL, "-": "mlp", "mamba": DELTA_NET, ATTENTION: FULL}
_NEMOTRON_LAYERS = {
    DELTA_NET: (MAMBA, NO_MLP),
    FULL: (ATTENTION, NO_MLP),
    "mlp": ("none", "plain"),
    "moe": ("none", EXPERTS),
}


def nemotron_h(hf: HFConfig) -> ModelConfig:
    """Return the config of Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without RoPE, an MLP
    without a gate, or experts. Source: modeling_nemotron_h.py of transformers."""
    hf = Settings.of(hf)
    hf = hf | {key: hf[old] for key, old in _NEMOTRON_KEYS.items() if old in hf}
    layers = [_NEMOTRON_LAYERS[kind] for kind in _nemotron_kinds(hf)]
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "pad_token_id": 0}
    defaults |= {"max_position_embeddings": 4096, "num_attention_heads": 32}
    settings = {
        "num_hidden_layers": len(layers),
        "rms_norm_eps": hf.number("layer_norm_epsilon", 1e-5, zero=True),
        "hidden_act": hf.text("mlp_hidden_act", "relu2"),
    }
    config = decoder(defaults | hf | settings, rotary=False, mlp_bias=hf.flag("mlp_bias"), names=NEMOTRON_H)
    config = replace(config, rope=STILL)
    if hf.text("mamba_hidden_act", "silu") != "silu":
        raise hf.wrong("mamba_hidden_act", "silu, the only supported value")
    for key in _NEMOTRON_UNREAD:
        hf.get(key)
    sizes = {
        "heads": hf.size("mamba_num_heads", 128),
        "dim": hf.size("mamba_head_dim", 64),
        "groups": hf.size("n_groups", 8),
        "state": hf.size("ssm_state_size", 128),
        "taps": hf.size("conv_kernel", 4, least=2, most=64),
        "conv_bias": hf.flag("use_conv_bias", True),
        "bias": hf.flag("use_bias"),
        "limits": (float(hf.number("time_step_min", 0.001, zero=True)), math.inf),
    }
    if sizes["heads"] % sizes["groups"]:
        raise hf.wrong("mamba_num_heads", f"a multiple of n_groups, {sizes['groups']}")
    mlps = tuple(mlp for _, mlp in layers)
    config = _nemotron_mixture(hf, config, mlps)
    return hybrid(config, [mixer for mixer, _ in layers], sizes=sizes, mlp=mlps)


def _nemotron_kinds(hf: Settings) -> list[str]:
    """Return the type of each layer, from any of the keys that state it."""
    kinds = hf.texts("layers_block_type", None) or hf.texts("layer_types", None)
    pattern = hf.text("hybrid_override_pattern", None)
    kinds = kinds or list(pattern or ()) or [DELTA_NET, "moe", FULL, "mlp"]
    named = [_NEMOTRON_KINDS.get(kind, kind) for kind in kinds]
    if unknown := {*named} - _NEMOTRON_LAYERS.keys():
        raise UnsupportedModelError(f"the layer type {min(unknown)!r:.200} is not supported for Nemotron-H")
    return named


def _nemotron_mixture(hf: Settings, config: ModelConfig, mlps: Sequence[str]) -> ModelConfig:
    """Return the config with the experts that Nemotron-H's keys describe, or unchanged if no layer has experts."""
    with_experts = mixture(
        config,
        count=hf.size("n_routed_experts", 8),
        chosen=hf.size("num_experts_per_tok", 2),
        width=hf.size("moe_intermediate_size", 7688),
        shared=hf.size("moe_shared_expert_intermediate_size", 7688),
        latent=hf.size("moe_latent_size", 0),
        gated=False,
        score="sigmoid",
        corrected=True,
        normalised=hf.flag("norm_topk_prob", True),
        scale=float(hf.number("routed_scaling_factor", 1.0)),
        groups=hf.size("n_group", 1),
        chosen_groups=hf.size("topk_group", 1),
        group_best=2,
        mlp_bias=config.mlp_bias,
    )
    return with_experts if EXPERTS in mlps else config
