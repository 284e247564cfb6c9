"""Families that are Llama but for a few settings: functions from a Hugging Face config (a dict) to a ModelConfig, and
what their checkpoints call things. No torch."""

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

# Norms of what each part reads and of what it gives, by the names of GLM-4 and of HyperCLOVA X.
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
# As the checkpoints of its makers call things; transformers writes the names of Llama.
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
    """Returns the config of GLM 4 (9B, of 2024): half of each head is rotated, number by number; gate and up are one
    tensor. options: further arguments of `decoder`."""
    hf = Settings.of(hf)
    defaults = {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2, "pad_token_id": 151329}
    biased = hf.flag("attention_bias", True)
    return decoder(defaults | {"rms_norm_eps": 1.5625e-07} | hf, qkv_bias=biased, **{"names": GLM} | options)


def glm4(hf: HFConfig) -> ModelConfig:
    """Returns the config of GLM 4 (0414): GLM, which norms what each part gives, too."""
    return glm(hf, out_norms=True, names=GLM4)


def seed_oss(hf: HFConfig) -> ModelConfig:
    """Returns the config of Seed-OSS: biases on q, k and v."""
    hf = Settings.of(hf)
    biased, out, inner = hf.flag("attention_bias", True), hf.flag("attention_out_bias"), hf.flag("mlp_bias")
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "pad_token_id": 1}
    return decoder(defaults | hf, qkv_bias=biased, o_bias=out, mlp_bias=inner)


def cwm(hf: HFConfig) -> ModelConfig:
    """Returns the config of CWM: three layers of four have a sliding window."""
    hf = Settings.of(hf)
    rope = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    hf = rope_unless_given(hf, rope | {"rope_theta": 1e6, "original_max_position_embeddings": 8192})
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": 8192}
    hf = defaults | {"rope_theta": 1e6} | hf
    windows = windows_of(hf, hf.texts("layer_types", None) or _full_first(hf))
    return decoder(hf, windows=windows, mlp_bias=hf.flag("mlp_bias"))


def ministral(hf: HFConfig) -> ModelConfig:
    """Returns the config of Ministral 8B: Mistral, where some layers have a sliding window."""
    hf = {"num_key_value_heads": 8} | Settings.of(hf)
    every = [FULL if window_of(hf) is None else SLIDING] * num_layers(hf)
    return decoder(hf, windows=windows_of(hf, hf.texts("layer_types", None) or every))


def ministral3(hf: HFConfig) -> ModelConfig:
    """Returns the config of Ministral 3: Mistral, whose queries grow with their positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    hf = rope_unless_given(Settings.of(hf), rope)
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "pad_token_id": 11}
    window = window_of(hf) if "sliding_window" in hf else None
    return decoder(defaults | hf, windows=[window] * num_layers(hf), query_growth=query_growth(hf))


def query_growth(hf: Settings) -> tuple[float, int] | None:
    """Return how queries grow with their positions, as of ModelConfig."""
    given = hf.settings("rope_scaling") or hf.settings("rope_parameters")
    rate = given.number("llama_4_scaling_beta", None, zero=True)
    return (float(rate), given.size("original_max_position_embeddings", most=MOST_POSITIONS)) if rate else None


def helium(hf: HFConfig) -> ModelConfig:
    """Returns the config of Helium: heads are rotated number by number."""
    hf = Settings.of(hf)
    defaults = {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5, "pad_token_id": 3}
    biased, inner = hf.flag("attention_bias"), hf.flag("mlp_bias")
    return decoder(defaults | hf, qkv_bias=biased, mlp_bias=inner, names=Names(interleaved=True))


def ernie4_5(hf: HFConfig) -> ModelConfig:
    """Returns the config of ERNIE 4.5, the dense model: heads are rotated number by number."""
    hf = Settings.of(hf)
    bias = hf.flag("use_bias")
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "pad_token_id": 0}
    hf = defaults | {"tie_word_embeddings": True} | hf
    return decoder(hf, qkv_bias=bias, o_bias=bias, mlp_bias=bias, names=Names(interleaved=True))


def hunyuan(hf: HFConfig) -> ModelConfig:
    """Returns the config of Hunyuan, the dense models: norms on q and k after the rotation."""
    hf = Settings.of(hf)
    # Of Tencent's own code.
    rules = {"use_qk_norm": True, "norm_type": "rms", "use_cla": False, "use_rotary_pos_emb": True}
    works_with(hf, "Hunyuan", rules | {"position_embedding_xdrope": False})
    hf.get("attention_head_dim")  # likewise; head_dim is what counts
    defaults = {"rms_norm_eps": 1e-5, "pad_token_id": 0}
    return llama(defaults | _stretched(hf) | {"mlp_bias": False}, qk_norm=HeadNorm(after=True), names=HUNYUAN)


def _stretched(hf: Settings) -> Settings:
    """Return a config of Hunyuan with the rotary base that `alpha` stretches, which its files call "dynamic"."""
    key = next((key for key in ("rope_scaling", "rope_parameters") if hf.settings(key)), None)
    rope = hf.settings(key or "rope_scaling")
    alpha = rope.number("alpha", None)
    if key is None or not alpha or (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return hf
    dim = hf.size("head_dim", None) or hf.size("hidden_size") // hf.size("num_attention_heads")
    if dim <= 2:
        raise hf.wrong("head_dim", "more than 2 with a rotary alpha")
    theta = rope.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    for name in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        rope.get(name)  # of YaRN, whose settings these files have beside alpha
    return hf | {"rope_scaling": None, "rope_parameters": {"rope_theta": theta * alpha ** (dim / (dim - 2))}}


def arcee(hf: HFConfig) -> ModelConfig:
    """Returns the config of Arcee (AFM): no gate, and the square of ReLU."""
    return llama({"hidden_act": "relu2", "rms_norm_eps": 1e-5} | Settings.of(hf), mlp="plain")


def hyperclovax(hf: HFConfig) -> ModelConfig:
    """Returns the config of HyperCLOVA X: Granite, which norms what each part gives, too; a factor on logits."""
    hf = Settings.of(hf)
    heads, is_normed = hf.size("num_attention_heads"), hf.flag("use_post_norm", True)
    dim = hf.size("head_dim", None) or hf.size("hidden_size") // heads
    defaults = {"attention_multiplier": hf.number("attention_multiplier", dim**-0.5)}
    names = HYPERCLOVAX if is_normed else Names()
    config = granite(hf | defaults, out_norms=is_normed, names=names)
    return replace(config, logit_scale=float(hf.number("logits_scaling", 1.0)))


def granite_swa(hf: HFConfig) -> ModelConfig:
    """Returns the config of Granite Swash: Granite, where most layers have a sliding window; sinks; a rotary base of
    each layer."""
    defaults = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128, "num_key_value_heads": 4}
    hf = defaults | Settings.of(hf)
    windows = windows_of(hf, hf.texts("layer_types", None) or _full_first(hf))
    config = granite(hf, windows=windows, sinks=True)
    thetas = hf.get("layer_rope_theta") or [None] * config.layers
    is_number = [theta is None or (isinstance(theta, (int, float)) and 0 <= theta <= 1e18) for theta in thetas]
    if len(thetas) != config.layers or not all(is_number):
        raise hf.wrong("layer_rope_theta", f"a list of {config.layers} numbers, one a layer")
    rope = config.rope or STILL
    ropes = [rope if t is None else replace(rope, theta=float(t)) if t else STILL for t in thetas]
    planes = zip(config.planes, ropes, strict=True)
    return replace(config, planes=tuple(replace(plane, rope=own) for plane, own in planes))


def apertus(hf: HFConfig) -> ModelConfig:
    """Returns the config of Apertus: no gate, xIELU, and norms on q and k."""
    hf = Settings.of(hf)
    if hf.get("qk_norm") is False or hf.get("post_norm"):  # of its makers' own code
        raise UnsupportedModelError("Apertus works with qk_norm true and post_norm false")
    if hf.size("output_vocab_size", None) not in (None, hf.size("vocab_size")):
        raise UnsupportedModelError("output_vocab_size is not vocab_size; an LM head of some tokens is not supported")
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = rope_unless_given(hf, rope | {"rope_theta": 12e6, "original_max_position_embeddings": 8192})
    defaults = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6, "pad_token_id": 3}
    return llama(defaults | hf | {"mlp_bias": False}, mlp="plain", qk_norm=True, names=APERTUS)


def nanochat(hf: HFConfig) -> ModelConfig:
    """Returns the config of nanochat: norms without weights, on q and k after the rotation, and on the embedding."""
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
    """Returns the config of VaultGemma: Gemma 2, which norms what each part reads alone."""
    return gemma2(hf, out_norms=False, names=VAULTGEMMA)


def bitnet(hf: HFConfig) -> ModelConfig:
    """Returns the config of BitNet b1.58, with weights that are numbers: norms before the last linears of attention and
    of the MLP."""
    defaults = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 5}
    return llama(defaults | Settings.of(hf) | {"mlp_bias": False}, inner_norms=True)


def olmo(hf: HFConfig) -> ModelConfig:
    """Returns the config of OLMo 1: LayerNorm without weights."""
    hf = Settings.of(hf)
    if hf.number("clip_qkv", None) is not None:
        raise UnsupportedModelError(
            "clip_qkv, a limit of queries, keys and values, needs transformers' modules (pip install "
            "'prefold[transformers]')"
        )
    settings = {"rms_norm_eps": 1e-5, "mlp_bias": False}
    return llama({"pad_token_id": 1} | hf | settings, norm="layer", norm_weight=False)


def internlm3(hf: HFConfig) -> ModelConfig:
    """Returns the config of InternLM 3: Llama, with keys of its own for biases."""
    hf = Settings.of(hf)
    qkv, every = hf.flag("qkv_bias", hf.flag("attention_bias")), hf.flag("bias", hf.flag("mlp_bias"))
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 2}
    return decoder(defaults | hf, qkv_bias=qkv, o_bias=every, mlp_bias=every)


def iquestcoder(hf: HFConfig) -> ModelConfig:
    """Returns the config of IQuest-Coder: Llama, with a head_dim of its own."""
    hf = Settings.of(hf)
    for key in ("clip_qkv", "use_sliding_window"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} is not supported; no IQuest-Coder has it")
    hf.get("sliding_window")  # says nothing without use_sliding_window
    return llama({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5} | hf)


def exaone(hf: HFConfig) -> ModelConfig:
    """Returns the config of EXAONE 3 and 3.5: Llama, with names of its own."""
    hf = Settings.of(hf)
    renamed = {
        "num_hidden_layers": hf.get("num_layers", hf.get("num_hidden_layers")),
        "rms_norm_eps": hf.get("layer_norm_epsilon", hf.get("rms_norm_eps", 1e-5)),
        "hidden_act": hf.get("activation_function", hf.get("hidden_act", "silu")),
    }
    hf.get("embed_dropout")
    return llama({"num_key_value_heads": 8, "rope_theta": 5e5, "pad_token_id": 0} | hf | renamed, names=EXAONE)


def rope_unless_given(hf: Settings, rope: HFConfig) -> Settings:
    """Return a config with rotary settings, if it has none of its own."""
    return hf if hf.settings("rope_scaling") or hf.settings("rope_parameters") else hf | {"rope_parameters": rope}


def _full_first(hf: Settings) -> list[str]:
    """Return layer types where one layer in four is full: the first of each."""
    return [SLIDING if number % 4 else FULL for number in range(num_layers(hf))]
