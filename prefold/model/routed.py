"""More families with mixtures of experts: functions from a Hugging Face config to a ModelConfig. No torch.

They have their own router rules, or attention that families in `mixtures` lack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_POSITIONS, Settings
from .builders import EXPERTS
from .config import ModelConfig
from .decoders import (  # fmt: skip
    FULL,
    SLIDING,
    HFConfig,
    decoder,
    exaone4,
    full_every,
    llama,
    num_layers,
    olmo2,
    qwen3,
    rope_of,
    turning,
    window_of,
    windows_of,
    with_local_rope,
    works_with,
)
from .llamas import HUNYUAN, granite_swa, hunyuan
from .mixtures import (  # fmt: skip
    BY_SIGMOIDS,
    CORRECTION,
    DEEPSEEK,
    DOWN,
    GATE_UP,
    GRANITE,
    MIXTRAL,
    MOST_EXPERTS,
    SHARED_EXPERTS,
    STACKS,
    deepseek_mixture,
    dense_or_sparse,
    experts_of,
    first_dense,
    mixture,
    qwen_mixture,
    without_further,
)
from .names import Names

# Tencent's names of the shared expert.
SHARED_MLP = {f"mlp.shared_mlp.{name}_proj": (f"mlp.shared_expert.{name}_proj",) for name in ("gate", "up", "down")}
MINIMAX_M2 = replace(MIXTRAL, parts={**MIXTRAL.parts, "block_sparse_moe.e_score_correction_bias": CORRECTION})
ERNIE = replace(
    DEEPSEEK,
    interleaved=True,
    parts={"mlp.moe_statics.e_score_correction_bias": CORRECTION, **SHARED_EXPERTS},
    other_names=r"model\.mtp_",
    single_rows=CORRECTION,
)
HUNYUAN_MOE = replace(HUNYUAN, parts={**HUNYUAN.parts, **SHARED_MLP, "mlp.gate.wg": ("mlp.gate",)}, stacks=STACKS)
HY_V3 = Names(parts={"mlp.router.gate": ("mlp.gate",), "mlp.expert_bias": CORRECTION, **SHARED_MLP}, stacks=STACKS)
AFMOE = Names(
    parts={
        "mlp.router.gate": ("mlp.gate",),
        "mlp.expert_bias": CORRECTION,
        **SHARED_EXPERTS,
        "self_attn.gate_proj": ("self_attn.g_proj",),
        "pre_mlp_layernorm": ("pre_feedforward_layernorm",),
        "post_mlp_layernorm": ("post_feedforward_layernorm",),
    },
    stacks=STACKS,
)
EXAONE_MOE = replace(
    DEEPSEEK, parts={**DEEPSEEK.parts, "mlp.e_score_correction_bias": CORRECTION}, other_names=r"(model\.)?mtp\."
)
ARIA = Names(
    parts={"mlp.router": ("mlp.gate",), **SHARED_EXPERTS},
    stacks={"mlp.experts.fc1.weight": GATE_UP, "mlp.experts.fc2.weight": DOWN},
    writes_stacks=True,
    turned=True,
)
GRANITE_SWA = replace(
    GRANITE,
    parts={**GRANITE.parts, "block_sparse_moe.router": ("mlp.gate",)},
    stacks={"block_sparse_moe.experts.gate_up_proj": GATE_UP, "block_sparse_moe.experts.down_proj": DOWN}
    | dict(GRANITE.stacks),
)
MELLUM = Names(stacks=STACKS, other_names=r"mtp\.")
COHERE2_MOE = Names(interleaved=True, parts=SHARED_EXPERTS, stacks=STACKS)
SARVAM = Names(
    parts={
        "word_embeddings": ("embed_tokens",),
        "attention.query_key_value": tuple(f"self_attn.{name}_proj" for name in "qkv"),
        "attention.dense": ("self_attn.o_proj",),
        "attention.query_layernorm": ("self_attn.q_norm",),
        "attention.key_layernorm": ("self_attn.k_norm",),
        "mlp.gate.expert_bias": CORRECTION,
        **SHARED_EXPERTS,
    },
    stacks=STACKS,
)
FLINT = Names(parts={"self_attn.softmax_offset": ("self_attn.sinks",)}, stacks=STACKS)
KOLIBRI = Names(
    parts={
        "moe.router.expert_bias": CORRECTION,
        **SHARED_EXPERTS,
        "post_attn_norm": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "post_ffn_norm": ("post_feedforward_layernorm",),
    },
    stacks=STACKS,
)


def glm4_moe(hf: HFConfig, names: Names = DEEPSEEK) -> ModelConfig:
    """Return the config of GLM 4.5 to 4.7: DeepSeek-V3's mixtures after the first dense layers; RoPE on half of each
    head; some have norms on q and k. `names` are the names of its tensors."""
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_routed_experts": 128, "moe_intermediate_size": 1408}
    hf = defaults | {"partial_rotary_factor": 0.5} | Settings.of(hf)
    bias, qk_norm = hf.flag("attention_bias"), hf.flag("use_qk_norm")
    config = decoder(hf, qkv_bias=bias, qk_norm=qk_norm, names=without_further(hf, names))
    return deepseek_mixture(hf, config, first_dense(hf, config.layers, 1), **BY_SIGMOIDS)


def solar_open(hf: HFConfig) -> ModelConfig:
    """Return the config of Solar Open: GLM 4.5 with experts in all layers, and RoPE on whole heads."""
    hf = Settings.of(hf)
    works_with(hf, "Solar Open", {"first_k_dense_replace": 0, "use_qk_norm": False})
    width = hf.size("moe_intermediate_size", 1280)
    defaults = {"head_dim": 128, "rope_theta": 1e6, "partial_rotary_factor": 1.0, "intermediate_size": width}
    own = {"moe_intermediate_size": width, "first_k_dense_replace": 0}
    return glm4_moe(defaults | hf | own)


def sarvam_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Sarvam (30B): GLM 4.5 with norms on q and k, RoPE on whole heads, and fused q, k and v."""
    hf = Settings.of(hf)
    renamed = {
        "n_routed_experts": hf.get("num_experts"),
        "n_shared_experts": hf.get("num_shared_experts"),
        "attention_bias": hf.get("use_qkv_bias"),
    }
    defaults = {"num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6, "use_qk_norm": True, "pad_token_id": 0}
    defaults |= {"moe_intermediate_size": 1024, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
    defaults |= {"partial_rotary_factor": 1.0, "rope_theta": 8e6}
    return glm4_moe(defaults | {key: value for key, value in renamed.items() if value is not None} | hf, SARVAM)


def dots1(hf: HFConfig) -> ModelConfig:
    """Return the config of dots.llm1: Qwen 3 with DeepSeek-V3's mixtures."""
    hf = Settings.of(hf)
    layers = num_layers(hf)
    first = min(hf.size("max_window_layers", 62, least=0), layers) if window_of(hf) is not None else layers
    types = hf.texts("layer_types", None) or [FULL] * first + [SLIDING] * (layers - first)
    bias, windows = hf.flag("attention_bias"), windows_of(hf, types)
    config = llama({"mlp_bias": False} | hf, qk_norm=True, windows=windows, names=DEEPSEEK)
    config = replace(config, qkv_bias=bias, o_bias=bias)
    required: dict[str, Any] = {
        key: hf.size(key) for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    }
    if hf.get("scoring_func") == "noaux_tc":  # the name of sigmoid scores with a bias in its files
        required["scoring_func"] = "sigmoid"
    hf = {"moe_intermediate_size": 1408, "norm_topk_prob": False} | hf | required
    return deepseek_mixture(hf, config, first_dense(hf, layers, 0), **BY_SIGMOIDS)


def exaone_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of K-EXAONE: EXAONE 4 with norms before each sublayer, and DeepSeek-V3's mixtures."""
    hf = Settings.of(hf)
    config = exaone4({"pad_token_id": 0} | hf, in_norms=True, out_norms=False, names=EXAONE_MOE)
    own = {"n_routed_experts": hf.size("num_experts", 64), "n_shared_experts": hf.size("num_shared_experts", 1)}
    hf.get("num_nextn_predict_layers")  # layers for multi-token prediction are not loaded
    hf = {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.5} | hf | own
    kinds = dense_or_sparse(hf, config.layers, first_dense(hf, config.layers, 1))
    if hf.get("is_moe_layer") not in (None, [kind == EXPERTS for kind in kinds]):  # a key of LG's own code
        raise hf.wrong("is_moe_layer", "consistent with first_k_dense_replace")
    return deepseek_mixture(hf, config, kinds, **BY_SIGMOIDS)


def minimax_m2(hf: HFConfig) -> ModelConfig:
    """Return the config of MiniMax M2: experts with sigmoid scores and a bias for the choice; norms over all heads
    of q and of k; RoPE on part of each head."""
    hf = Settings.of(hf)
    rules = {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    works_with(hf, "MiniMax M2", rules | {"use_qk_norm": True, "qk_norm_type": "per_layer"})
    if {*(hf.get("attn_type_list") or [])} - {1}:
        raise hf.wrong("attn_type_list", "a list of ones; linear attention is not supported")
    # Keys for linear attention, multi-token prediction and shared experts, which these models do not have.
    unread = [f"layernorm_{part}_attention_beta" for part in ("full", "linear")]
    for key in (*unread, "layernorm_mlp_beta", "shared_moe_mode"):
        hf.get(key)
    dim = hf.size("head_dim", 128)
    turned = hf.size("rotary_dim", dim)
    if turned > dim:
        raise hf.wrong("rotary_dim", f"at most {dim}, the size of a head")
    defaults = {"num_key_value_heads": 8, "head_dim": dim, "rope_theta": 5e6, "partial_rotary_factor": turned / dim}
    config = decoder(defaults | hf, row_qk_norm=True)
    chosen = hf.size("num_experts_per_tok", 8)
    return mixture(config, count=experts_of(hf, 256), chosen=chosen, names=MINIMAX_M2, **BY_SIGMOIDS)


def hy_v3(hf: HFConfig) -> ModelConfig:
    """Return the config of Hunyuan 3: Qwen 3 with experts after the first layer; sigmoid scores and a bias for the
    choice."""
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0}
    hf = defaults | Settings.of(hf)
    config = llama(hf, qk_norm=True, names=without_further(hf, HY_V3))
    width = hf.size("moe_intermediate_size", 1536)
    return mixture(
        config,
        count=experts_of(hf, 192),
        chosen=hf.size("num_experts_per_tok", 8),
        width=width,
        shared=width * hf.size("num_shared_experts", 1),
        scale=float(hf.number("router_scaling_factor", 2.826)),
        mlp=dense_or_sparse(hf, config.layers),
        mlp_bias=config.mlp_bias,
        **BY_SIGMOIDS,
    )


def ernie4_5_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of ERNIE 4.5 MoE: experts with a bias for the choice; interleaved RoPE."""
    defaults = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "pad_token_id": 0}
    hf = defaults | {"tie_word_embeddings": True} | Settings.of(hf)
    works_with(hf, "ERNIE 4.5 with experts", {"moe_gate": "topk", "moe_use_aux_free": True})
    hf.get("moe_capacity")  # for training
    bias = hf.flag("use_bias")
    config = decoder(hf, qkv_bias=bias, o_bias=bias, lm_head_bias=bias, names=ERNIE)
    first, last = hf.size("moe_layer_start_index", 1, least=0), hf.size("moe_layer_end_index", -1, least=-1)
    every, layers = hf.size("moe_layer_interval", 1), config.layers
    sparse = {number for number in range(first, layers if last < 0 else last + 1) if (number + 1) % every == 0}
    width = hf.size("moe_intermediate_size", 1536)
    return mixture(
        config,
        count=hf.size("moe_num_experts", 64, most=MOST_EXPERTS),
        chosen=hf.size("moe_k", 6),
        width=width,
        shared=width * hf.size("moe_num_shared_experts", 2, least=0),
        corrected=True,
        least_sum=float(hf.number("moe_norm_min", 1e-12, zero=True)),
        mlp=tuple(EXPERTS if number in sparse else "gated" for number in range(layers)),
        mlp_bias=bias,
    )


def hunyuan_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Hunyuan MoE (A13B): dense Hunyuan with experts and a shared expert."""
    hf = Settings.of(hf)
    # Keys of Tencent's own code. Lists per layer must have equal values.
    rules = {"use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "norm_topk_prob": True}
    unsaid = ("group_limited_greedy", "moe_drop_tokens", "moe_random_routing_dropped_token", "routed_scaling_factor")
    rules |= dict.fromkeys((*unsaid, "topk_group"), False)
    width = hf.size("intermediate_size")
    same = {"moe_intermediate_size": width, "num_shared_expert": 1}
    works_with(hf | {key: _of_all_layers(hf, key) for key in same}, "Hunyuan", rules | same)
    config = hunyuan(hf)
    count, chosen = (hf | {key: _of_all_layers(hf, key)} for key in ("num_experts", "moe_topk"))
    return mixture(
        config,
        count=count.size("num_experts", 1, most=MOST_EXPERTS),
        chosen=chosen.size("moe_topk", 1),
        shared=width,
        names=HUNYUAN_MOE,
    )


def _of_all_layers(hf: Settings, key: str) -> Any:
    """Return the value of a key that may also be a list with one equal value per layer."""
    value = hf.get(key)
    if isinstance(value, list) and value:
        if any(one != value[0] for one in value):
            raise hf.wrong(key, "the same in all layers")
        return value[0]
    return value


def afmoe(hf: HFConfig) -> ModelConfig:
    """Return the config of Trinity (AFMoE): norms before and after each sublayer; gated attention; experts with
    sigmoid scores; full-attention layers have no RoPE."""
    hf = {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024} | Settings.of(hf)
    rules = {"route_norm": True, "score_func": "sigmoid"}
    rules |= dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1)
    works_with(hf, "AFMoE", rules)
    every = full_every(hf.size("global_attn_every_n_layers", 4), num_layers(hf))
    types = hf.texts("layer_types", None) or every
    scale = hf.size("hidden_size") ** 0.5 if hf.flag("mup_enabled") else 1.0
    options: dict[str, Any] = {"qk_norm": True, "out_norms": True, "head_gates": "each", "embedding_scale": scale}
    config = llama(hf | {"mlp_bias": False}, windows=windows_of(hf, types), **options)
    width = hf.size("moe_intermediate_size", 1408)
    return mixture(
        turning(config, [kind == SLIDING for kind in types]),
        count=experts_of(hf, 64),
        chosen=hf.size("num_experts_per_tok", 6),
        width=width,
        shared=width * hf.size("num_shared_experts", 2),
        scale=float(hf.number("route_scale", 1.0)),
        mlp=first_dense(hf, config.layers, 1, "num_dense_layers"),
        names=AFMOE,
        **BY_SIGMOIDS,
    )


def phimoe(hf: HFConfig) -> ModelConfig:
    """Return the config of Phi 3.5 MoE: LayerNorm; biases; two experts per row, each with its own softmax
    (SparseMixer)."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8} | Settings.of(hf)
    window = window_of(hf) if "sliding_window" in hf else None
    if window is not None and window >= hf.size("max_position_embeddings", most=MOST_POSITIONS):
        window = None
    lm_head_bias = hf.flag("lm_head_bias")
    settings = hf | {"mlp_bias": False}
    config = llama(settings, windows=[window] * num_layers(hf), norm="layer", lm_head_bias=lm_head_bias)
    if config.rope is not None and config.rope.kind == "longrope":
        rope = hf.settings("rope_scaling") or hf.settings("rope_parameters")
        warmth = {name: rope.number(f"{name}_mscale") for name in ("short", "long")}
        own = warmth["long" if config.rope.settings["is_long"] else "short"]
        config = replace(config, rope=replace(config.rope, settings={**config.rope.settings, "attention_factor": own}))
    chosen = hf.size("num_experts_per_tok", 2)
    if chosen != 2:
        raise hf.wrong("num_experts_per_tok", "2, because SparseMixer chooses two experts")
    tolerance = 2.0 * hf.number("router_jitter_noise", 0.01, zero=True)
    rules: dict[str, Any] = {"score": "sparsemixer", "tolerance": tolerance}
    return mixture(config, count=experts_of(hf, 16), chosen=chosen, names=MIXTRAL, **rules)


def aria(hf: HFConfig) -> ModelConfig:
    """Return the config of Aria (text): Llama with experts and a shared expert."""
    hf = {"pad_token_id": 2} | Settings.of(hf)
    works_with(hf, "Aria", {"hidden_act": "silu"})
    config = llama(hf)
    return mixture(
        config,
        count=hf.size("moe_num_experts", 8, most=MOST_EXPERTS),
        chosen=hf.size("moe_topk", 2),
        shared=config.intermediate * hf.size("moe_num_shared_experts", 2, least=0),
        mlp_bias=config.mlp_bias,
        names=ARIA,
    )


def flex_olmo(hf: HFConfig) -> ModelConfig:
    """Return the config of FlexOlmo: OLMo 2 with experts."""
    defaults = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "pad_token_id": 100277, "mlp_bias": False}
    hf = defaults | Settings.of(hf)
    return qwen_mixture(hf, olmo2(hf), count=7, chosen=5)


def granite_moe_swa(hf: HFConfig) -> ModelConfig:
    """Return the config of Granite Swash MoE: Granite Swash with experts; some models have a shared expert."""
    hf = Settings.of(hf)
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    defaults |= {"num_key_value_heads": hf.size("num_attention_heads")}
    chosen, shared = hf.size("num_experts_per_tok", 2), hf.size("shared_intermediate_size", 0, least=0)
    config = granite_swa(defaults | hf)
    return mixture(config, count=experts_of(hf, 8), chosen=chosen, shared=shared, names=GRANITE_SWA)


def mellum(hf: HFConfig) -> ModelConfig:
    """Return the config of Mellum 2: Qwen 3 MoE; sliding-window layers have their own RoPE settings."""
    hf = {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024} | Settings.of(hf)
    layers = num_layers(hf)
    types = hf.texts("layer_types", None) or [FULL] * layers
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        hf.get(key)  # layers for multi-token prediction are not loaded
    bias = {"qkv_bias": hf.flag("attention_bias"), "o_bias": hf.flag("attention_bias")}
    far = rope_of(hf, FULL, "rope_theta", 5e5)
    config = decoder(far, windows=windows_of(hf, types), qk_norm=True, **bias)
    return mixture(
        with_local_rope(config, types, rope_of(hf, SLIDING, "rope_theta", 1e4)),
        count=experts_of(hf, 64),
        chosen=hf.size("num_experts_per_tok", 8),
        width=hf.size("moe_intermediate_size", 896),
        normalised=hf.flag("norm_topk_prob", True),
        mlp=dense_or_sparse(hf, layers, (EXPERTS,) * layers),
        names=MELLUM,
    )


def cohere2_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Cohere 2 MoE: Cohere 2 with experts after the first dense layers; full-attention layers
    have no RoPE."""
    hf = {"head_dim": 128, "tie_word_embeddings": True, "pad_token_id": 0} | Settings.of(hf)
    layers = num_layers(hf)
    dense, pattern = first_dense(hf, layers, 0), hf.size("prefix_dense_sliding_window_pattern", 1)
    first = dense.count("gated")
    rest = full_every(hf.size("sliding_window_pattern", 4), layers - first)
    types = hf.texts("layer_types", None) or full_every(pattern, first) + rest
    kinds, windows = dense_or_sparse(hf, layers, dense), windows_of(hf, types)
    of_rms, of_layer = hf.number("rms_norm_eps", None, zero=True), hf.number("layer_norm_eps", 1e-5, zero=True)
    norm: dict[str, Any] = {"norm": "layer", "norm_bias": False} if of_rms is None else {}
    width, shared = hf.size("intermediate_size"), hf.size("num_shared_experts", 0, least=0)
    own = {
        "rms_norm_eps": of_layer if of_rms is None else of_rms,
        "intermediate_size": hf.size("prefix_dense_intermediate_size", width),
    }
    scale = float(hf.number("logit_scale", 0.0625))
    config = llama(hf | own | {"mlp_bias": False}, windows=windows, parallel=True, logit_scale=scale, **norm)
    turns = [
        window is not None or (mlp == "gated" and pattern == 1) for window, mlp in zip(windows, kinds, strict=True)
    ]
    score, combined = (
        hf.text("expert_selection_fn", "softmax"),
        hf.text("shared_expert_combination_strategy", "average"),
    )
    if score not in ("softmax", "sigmoid"):
        raise hf.wrong("expert_selection_fn", "softmax or sigmoid")
    if combined not in ("average", "sum"):
        raise hf.wrong("shared_expert_combination_strategy", "average or sum")
    part = 0.5 if shared and combined == "average" else 1.0
    normalised = hf.flag("norm_topk_prob", True) or score == "softmax"
    return mixture(
        turning(config, turns),
        count=experts_of(hf, 8),
        chosen=hf.size("num_experts_per_tok", 2),
        width=width,
        score=score,
        normalised=normalised,
        scale=part,
        shared=width * shared,
        shared_scale=part,
        mlp=kinds,
        names=COHERE2_MOE,
    )


def flint(hf: HFConfig) -> ModelConfig:
    """Return the config of Flint: Qwen 3 with attention sinks; experts with sigmoid scores and a shared expert;
    full-attention layers have no RoPE."""
    defaults = {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513, "norm_topk_prob": True}
    hf = defaults | Settings.of(hf)
    layers = num_layers(hf)
    full = {0, 1, layers - 1, *range(1, layers, 4)}
    types = hf.texts("layer_types", None) or [FULL if number in full else SLIDING for number in range(layers)]
    hf = hf | {"layer_types": types, "use_sliding_window": True}
    if hf.get("mlp_only_layers") is None:
        hf = hf | {"mlp_only_layers": [0, 1]}
    config = replace(turning(qwen3(hf), [kind == SLIDING for kind in types]), sinks=True)
    shared = hf.size("shared_expert_intermediate_size", 1024)
    options: dict[str, Any] = {"score": "sigmoid", "shared": shared, "names": FLINT}
    return qwen_mixture({"moe_intermediate_size": 512} | hf, config, count=256, chosen=6, **options)


def kolibri(hf: HFConfig) -> ModelConfig:
    """Return the config of Kolibri 1: EXAONE 4 with norms before and after each sublayer; experts with a logit bias
    for the choice, and a shared expert."""
    defaults = {"num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "sliding_window": 513}
    hf = defaults | {"sliding_window_pattern": 5} | Settings.of(hf)
    width = hf.size("moe_intermediate_size", 512)
    config = exaone4({"intermediate_size": width} | hf, in_norms=True, out_norms=True)
    return mixture(
        config,
        count=experts_of(hf, 384),
        chosen=hf.size("num_experts_per_tok", 6),
        width=width,
        score="sigmoid",
        normalised=hf.flag("norm_topk_prob"),
        corrected="logits",
        shared=hf.size("shared_expert_intermediate_size", 512),
        names=KOLIBRI,
    )
