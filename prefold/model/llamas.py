"""Families close to Llama: functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_POSITIONS, Settings
from ..errors import UnsupportedModelError
from .config import STILL, HeadNorm, ModelConfig
from .decoders import (  # fmt: skip
    FULL,
    SLIDING,
    HFConfig,
    decoder,
    gemma2,
    granite,
    llama,
    num_layers,
    window_of,
    windows_of,
    works_with,
)
from .names import FUSED, Names

# GLM-4 and HyperCLOVA X have norms before and after each sublayer, with their own names.
GLM4 = Names(
    interleaved=True,
    parts={
        "post_self_attn_layernorm": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "post_mlp_layernorm": ("post_feedforward_layernorm",),
        "mlp.gate_up_proj": FUSED.parts["mlp.gate_up_proj"],
    },
)
GLM = Names(interleaved=True, parts={"mlp.gate_up_proj": FUSED.parts["mlp.gate_up_proj"]})
HYPERCLOVAX = Names(
    parts={
        "post_norm1": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "post_norm2": ("post_feedforward_layernorm",),
    }
)
HUNYUAN = Names(
    parts={"self_attn.query_layernorm": ("self_attn.q_norm",), "self_attn.key_layernorm": ("self_attn.k_norm",)}
)
APERTUS = Names(
    parts={"attention_layernorm": ("input_layernorm",), "feedforward_layernorm": ("post_attention_layernorm",)}
)
NANOCHAT = Names(swapped=True, parts={"mlp.fc1": ("mlp.up_proj",), "mlp.fc2": ("mlp.down_proj",)})
VAULTGEMMA = Names(parts={"pre_feedforward_layernorm": ("post_attention_layernorm",)})
# Names in LG's own checkpoints. transformers saves Llama's names.
EXAONE = Names(
    prefix="transformer.",
    lists={"h": 0},
    parts={
        "wte": ("embed_tokens",),
        "ln_f": ("norm",),
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        **{f"attn.attention.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkv"},
        "attn.attention.out_proj": ("self_attn.o_proj",),
        "mlp.c_fc_0": ("mlp.gate_proj",),
        "mlp.c_fc_1": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
)


def glm(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of GLM 4 (9B, 2024): interleaved RoPE on half of each head; fused gate and up. `options` are
    further arguments of `decoder`."""
    hf = Settings.of(hf)
    defaults = {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2, "pad_token_id": 151329}
    biased = hf.flag("attention_bias", True)
    return decoder(defaults | {"rms_norm_eps": 1.5625e-07} | hf, qkv_bias=biased, **{"names": GLM} | options)


def glm4(hf: HFConfig) -> ModelConfig:
    """Return the config of GLM 4 (0414): GLM 4 (9B) with norms after each sublayer too."""
    return glm(hf, out_norms=True, names=GLM4)


def seed_oss(hf: HFConfig) -> ModelConfig:
    """Return the config of Seed-OSS: Llama with biases on q, k and v."""
    hf = Settings.of(hf)
    biased, out, inner = hf.flag("attention_bias", True), hf.flag("attention_out_bias"), hf.flag("mlp_bias")
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "pad_token_id": 1}
    return decoder(defaults | hf, qkv_bias=biased, o_bias=out, mlp_bias=inner)


def cwm(hf: HFConfig) -> ModelConfig:
    """Return the config of CWM: Llama with a sliding window in three of four layers."""
    hf = Settings.of(hf)
    rope = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    hf = rope_unless_given(hf, rope | {"rope_theta": 1e6, "original_max_position_embeddings": 8192})
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": 8192}
    hf = defaults | {"rope_theta": 1e6} | hf
    windows = windows_of(hf, hf.texts("layer_types", None) or _full_first(hf))
    return decoder(hf, windows=windows, mlp_bias=hf.flag("mlp_bias"))


def ministral(hf: HFConfig) -> ModelConfig:
    """Return the config of Ministral 8B: Mistral with a sliding window in some layers."""
    hf = {"num_key_value_heads": 8} | Settings.of(hf)
    every = [FULL if window_of(hf) is None else SLIDING] * num_layers(hf)
    return decoder(hf, windows=windows_of(hf, hf.texts("layer_types", None) or every))


def ministral3(hf: HFConfig) -> ModelConfig:
    """Return the config of Ministral 3: Mistral; queries grow with the position."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    hf = rope_unless_given(Settings.of(hf), rope)
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "pad_token_id": 11}
    window = window_of(hf) if "sliding_window" in hf else None
    return decoder(defaults | hf, windows=[window] * num_layers(hf), query_growth=query_growth(hf))


def query_growth(hf: Settings) -> tuple[float, int] | None:
    """Return `ModelConfig.query_growth`."""
    given = hf.settings("rope_scaling") or hf.settings("rope_parameters")
    rate = given.number("llama_4_scaling_beta", None, zero=True)
    return (float(rate), given.size("original_max_position_embeddings", most=MOST_POSITIONS)) if rate else None


def helium(hf: HFConfig) -> ModelConfig:
    """Return the config of Helium: Llama with interleaved RoPE."""
    hf = Settings.of(hf)
    defaults = {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5, "pad_token_id": 3}
    biased, inner = hf.flag("attention_bias"), hf.flag("mlp_bias")
    return decoder(defaults | hf, qkv_bias=biased, mlp_bias=inner, names=Names(interleaved=True))


def ernie4_5(hf: HFConfig) -> ModelConfig:
    """Return the config of ERNIE 4.5 (dense): Llama with interleaved RoPE."""
    hf = Settings.of(hf)
    bias = hf.flag("use_bias")
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "pad_token_id": 0}
    hf = defaults | {"tie_word_embeddings": True} | hf
    return decoder(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bias, names=Names(interleaved=True))


def hunyuan(hf: HFConfig) -> ModelConfig:
    """Return the config of Hunyuan (dense): Llama with norms on q and k after RoPE."""
    hf = Settings.of(hf)
    # Keys of Tencent's own code.
    rules = {"use_qk_norm": True, "norm_type": "rms", "use_cla": False, "use_rotary_pos_emb": True}
    works_with(hf, "Hunyuan", rules | {"position_embedding_xdrope": False})
    hf.get("attention_head_dim")  # also of Tencent's own code; head_dim decides
    defaults = {"rms_norm_eps": 1e-5, "pad_token_id": 0}
    return llama(defaults | _stretched(hf) | {"mlp_bias": False}, qk_norm=HeadNorm(after=True), names=HUNYUAN)


def _stretched(hf: Settings) -> Settings:
    """Return a Hunyuan config with the RoPE base that `alpha` stretches. Its files call this "dynamic"."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if hf.settings(key)), None)
    rope = hf.settings(key or "rope_scaling")
    alpha = rope.number("alpha", None)
    if key is None or not alpha or (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return hf
    dim = hf.size("head_dim", None) or hf.size("hidden_size") // hf.size("num_attention_heads")
    if dim <= 2:
        raise hf.wrong("head_dim", "more than 2 if the rotary settings have alpha")
    theta = rope.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    for name in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        rope.get(name)  # settings of YaRN, which these files list but do not use
    return hf | {"rope_scaling": None, "rope_parameters": {"rope_theta": theta * alpha ** (dim / (dim - 2))}}


def arcee(hf: HFConfig) -> ModelConfig:
    """Return the config of Arcee (AFM): Llama with squared ReLU and no gate."""
    return llama({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | Settings.of(hf), mlp="plain")


def hyperclovax(hf: HFConfig) -> ModelConfig:
    """Return the config of HyperCLOVA X: Granite with norms after each sublayer too."""
    hf = Settings.of(hf)
    heads, is_normed = hf.size("num_attention_heads"), hf.flag("use_post_norm", True)
    dim = hf.size("head_dim", None) or hf.size("hidden_size") // heads
    defaults = {"attention_multiplier": hf.number("attention_multiplier", dim**-0.5)}
    names = HYPERCLOVAX if is_normed else Names()
    config = granite(hf | defaults, out_norms=is_normed, names=names)
    return replace(config, logit_scale=float(hf.number("logits_scaling", 1.0)))


def granite_swa(hf: HFConfig) -> ModelConfig:
    """Return the config of Granite Swash: Granite with a sliding window in most layers, attention sinks, and a RoPE
    base per layer."""
    defaults = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128, "num_key_value_heads": 4}
    hf = defaults | Settings.of(hf)
    windows = windows_of(hf, hf.texts("layer_types", None) or _full_first(hf))
    config = granite(hf, windows=windows, sinks=True)
    thetas = hf.get("layer_rope_theta") or [None] * config.layers
    is_number = [theta is None or (isinstance(theta, (int, float)) and 0 <= theta <= 1e18) for theta in thetas]
    if len(thetas) != config.layers or not all(is_number):
        raise hf.wrong("layer_rope_theta", f"a list of {config.layers} numbers, one per layer")
    rope = config.rope or STILL
    ropes = [rope if t is None else replace(rope, theta=float(t)) if t else STILL for t in thetas]
    planes = zip(config.planes, ropes, strict=True)
    return replace(config, planes=tuple(replace(plane, rope=own) for plane, own in planes))


def apertus(hf: HFConfig) -> ModelConfig:
    """Return the config of Apertus: xIELU without a gate; norms on q and k."""
    hf = Settings.of(hf)
    if hf.get("qk_norm") is False or hf.get("post_norm"):  # keys of Apertus' own code
        raise UnsupportedModelError("Apertus needs qk_norm true and post_norm false")
    if hf.size("output_vocab_size", None) not in (None, hf.size("vocab_size")):
        raise UnsupportedModelError(
            "output_vocab_size is not vocab_size; an LM head for part of the vocabulary is not supported"
        )
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = rope_unless_given(hf, rope | {"rope_theta": 12e6, "original_max_position_embeddings": 8192})
    defaults = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6, "pad_token_id": 3}
    return llama(defaults | hf | {"mlp_bias": False}, mlp="plain", qk_norm=True, names=APERTUS)


def nanochat(hf: HFConfig) -> ModelConfig:
    """Return the config of nanochat: norms without weights, also on the embedding, and on q and k after RoPE."""
    hf = Settings.of(hf)
    cap = hf.number("final_logit_softcapping", None) if "final_logit_softcapping" in hf else 15.0
    defaults = {"hidden_act": "relu2", "pad_token_id": 1}
    return llama(
        defaults | hf | {"mlp_bias": False},
        mlp="plain",
        norm_weight=False,
        embedding_norm=True,
        qk_norm=HeadNorm(weights="none", after=True),
        logit_cap=cap,
        names=NANOCHAT,
    )


def vaultgemma(hf: HFConfig) -> ModelConfig:
    """Return the config of VaultGemma: Gemma 2 with norms only before each sublayer."""
    return gemma2(hf, out_norms=False, names=VAULTGEMMA)


def bitnet(hf: HFConfig) -> ModelConfig:
    """Return the config of BitNet b1.58, from a checkpoint with unpacked weights: norms before the last linears of
    attention and MLP."""
    defaults = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 5}
    return llama(defaults | Settings.of(hf) | {"mlp_bias": False}, inner_norms=True)


def olmo(hf: HFConfig) -> ModelConfig:
    """Return the config of OLMo 1: LayerNorm without weights."""
    hf = Settings.of(hf)
    if hf.number("clip_qkv", None) is not None:
        raise UnsupportedModelError("clip_qkv needs transformers' modules (pip install 'prefold[transformers]')")
    settings = {"rms_norm_eps": 1e-5, "mlp_bias": False}
    return llama({"pad_token_id": 1} | hf | settings, norm="layer", norm_weight=False)


def internlm3(hf: HFConfig) -> ModelConfig:
    """Return the config of InternLM 3: Llama with other keys for biases."""
    hf = Settings.of(hf)
    qkv, every = hf.flag("qkv_bias", hf.flag("attention_bias")), hf.flag("bias", hf.flag("mlp_bias"))
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 2}
    return decoder(defaults | hf, qkv_bias=qkv, o_bias=every, mlp_bias=every)


def iquestcoder(hf: HFConfig) -> ModelConfig:
    """Return the config of IQuest-Coder: Llama with head_dim set separately."""
    hf = Settings.of(hf)
    for key in ("clip_qkv", "use_sliding_window"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} is not supported for IQuest-Coder")
    hf.get("sliding_window")  # no effect without use_sliding_window
    return llama({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5} | hf)


def exaone(hf: HFConfig) -> ModelConfig:
    """Return the config of EXAONE 3 and 3.5: Llama with other names of keys and tensors."""
    hf = Settings.of(hf)
    renamed = {
        "num_hidden_layers": hf.get("num_layers", hf.get("num_hidden_layers")),
        "rms_norm_eps": hf.get("layer_norm_epsilon", hf.get("rms_norm_eps", 1e-5)),
        "hidden_act": hf.get("activation_function", hf.get("hidden_act", "silu")),
    }
    hf.get("embed_dropout")
    return llama({"num_key_value_heads": 8, "rope_theta": 5e5, "pad_token_id": 0} | hf | renamed, names=EXAONE)


def rope_unless_given(hf: Settings, rope: HFConfig) -> Settings:
    """Return the config with these rotary settings, if it has none."""
    return hf if hf.settings("rope_scaling") or hf.settings("rope_parameters") else hf | {"rope_parameters": rope}


def _full_first(hf: Settings) -> list[str]:
    """Return layer types in which the first of every four layers is full."""
    return [SLIDING if number % 4 else FULL for number in range(num_layers(hf))]
