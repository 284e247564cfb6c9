"""Families with LayerNorm: functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, Settings
from ..errors import UnsupportedModelError
from .config import HeadNorm, ModelConfig
from .decoders import HFConfig, decoder, gpt2_settings, llama
from .names import GPT2, Names

QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
# Names of MLPs in GPT-NeoX and Falcon.
DENSE = {"mlp.dense_h_to_4h": ("mlp.up_proj",), "mlp.dense_4h_to_h": ("mlp.down_proj",)}
# The entry of `ModelConfig.sizes` with the number of groups in a fused tensor of q, k and v.
GROUPS = "qkv_groups"
STABLELM = Names(parts={f"self_attn.{part}_layernorm.norms.{{}}": (f"self_attn.{part}_norm.{{}}",) for part in "qk"})
GPT_NEOX = Names(
    prefix="gpt_neox.",
    parts={
        "embed_in": ("embed_tokens",),
        "final_layer_norm": ("norm",),
        "embed_out": ("lm_head",),
        "attention.query_key_value": QKV,
        "attention.dense": ("self_attn.o_proj",),
        **DENSE,
    },
    grouped={"attention.query_key_value": GROUPS},
)
FALCON = Names(
    prefix="transformer.",
    lists={"h": 0},
    parts={
        "word_embeddings": ("embed_tokens",),
        "ln_f": ("norm",),
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "ln_attn": ("input_layernorm",),
        "ln_mlp": ("post_attention_layernorm",),
        "self_attention.query_key_value": QKV,
        "self_attention.dense": ("self_attn.o_proj",),
        **DENSE,
    },
    grouped={"self_attention.query_key_value": GROUPS},
)
HEAD_NORMS = {f"self_attn.{part}_layernorm": (f"self_attn.{part}_norm",) for part in "qk"}
PERSIMMON = Names(
    parts={
        "final_layernorm": ("norm",),
        "self_attn.query_key_value": QKV,
        "self_attn.dense": ("self_attn.o_proj",),
        **HEAD_NORMS,
        **DENSE,
    },
    grouped={"self_attn.query_key_value": GROUPS},
)
PHI = Names(
    parts={
        "final_layernorm": ("norm",),
        "self_attn.dense": ("self_attn.o_proj",),
        "mlp.fc1": ("mlp.up_proj",),
        "mlp.fc2": ("mlp.down_proj",),
        **HEAD_NORMS,
    }
)
OPT = Names(
    prefix="model.decoder.",
    before=r"decoder\.",
    parts={
        "final_layer_norm": ("norm",),
        "self_attn_layer_norm": ("input_layernorm",),
        "layers.final_layer_norm": ("post_attention_layernorm",),
        "self_attn.out_proj": ("self_attn.o_proj",),
        "fc1": ("mlp.up_proj",),
        "fc2": ("mlp.down_proj",),
    },
)
GPT_BIGCODE = replace(GPT2, transposed=False, grouped={"attn.c_attn": GROUPS})
GPTJ = replace(
    GPT2,
    transposed=False,
    interleaved=True,
    parts={
        **GPT2.parts,
        **{f"attn.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkv"},
        "attn.out_proj": ("self_attn.o_proj",),
        "mlp.fc_in": ("mlp.up_proj",),
        "mlp.fc_out": ("mlp.down_proj",),
    },
)
# CodeGen stores heads in four groups, a result of its model-parallel training.
CODEGEN = replace(
    GPTJ, parts={**GPTJ.parts, "attn.qkv_proj": (QKV[0], QKV[2], QKV[1])}, grouped={"attn.qkv_proj": GROUPS}
)
GPT_NEO = replace(
    GPT2,
    transposed=False,
    parts={
        **GPT2.parts,
        **{f"attn.attention.{name}_proj": (f"self_attn.{name}_proj",) for name in "qkv"},
        "attn.attention.out_proj": ("self_attn.o_proj",),
    },
)


def cohere(hf: HFConfig) -> ModelConfig:
    """Return the config of Command R: parallel attention and MLP; LayerNorm without bias; interleaved RoPE; in some
    models, norms on q and k with weights per head."""
    hf = {"tie_word_embeddings": True, "rope_theta": 5e5, "pad_token_id": 0} | Settings.of(hf)
    return llama(
        hf | _epsilon(hf, "layer_norm_eps") | {"mlp_bias": False},
        norm="layer",
        norm_bias=False,
        parallel=True,
        qk_norm=hf.flag("use_qk_norm") and HeadNorm("layer", "each"),
        logit_scale=float(hf.number("logit_scale", 0.0625)),
        names=Names(interleaved=True),
    )


def nemotron(hf: HFConfig) -> ModelConfig:
    """Return the config of Nemotron 4 and Minitron: LayerNorm weights stored minus 1; squared ReLU without a gate;
    RoPE on half of each head."""
    hf = {"hidden_act": "relu2", "partial_rotary_factor": 0.5} | Settings.of(hf)
    return llama(hf | _epsilon(hf, "norm_eps"), norm="layer", norm_offset=1.0, mlp="plain")


def stablelm(hf: HFConfig) -> ModelConfig:
    """Return the config of StableLM: RoPE on a quarter of each head; some models have norms per head, or parallel
    attention and MLP."""
    hf = {"partial_rotary_factor": 0.25, "num_key_value_heads": 32} | Settings.of(hf)
    return decoder(
        hf | _epsilon(hf, "layer_norm_eps"),
        head_dim=_head_dim(hf),
        norm="layer",
        qkv_bias=hf.flag("use_qkv_bias"),
        qk_norm=hf.flag("qk_layernorm") and HeadNorm("layer", "apart"),
        parallel=hf.flag("use_parallel_residual"),
        names=STABLELM,
    )


def falcon(hf: HFConfig) -> ModelConfig:
    """Return the config of Falcon: parallel attention and MLP, with the same norm or one each; fused q, k and v; no
    gate."""
    hf = Settings.of(hf)
    if hf.flag("alibi"):
        raise UnsupportedModelError("alibi is not supported; only rotary positions are")
    heads, is_new = hf.size("num_attention_heads"), hf.flag("new_decoder_architecture")
    kv_heads = 1 if hf.flag("multi_query", True) else heads
    if is_new:
        kv_heads = hf.size("num_kv_heads", heads)
    hidden = hf.size("n_embed", None) or hf.size("hidden_size")
    hf.get("num_kv_heads")  # no effect in older models
    renamed = {"hidden_size": hidden, "hidden_act": hf.text("activation", "gelu")}
    renamed["intermediate_size"] = hf.size("ffn_hidden_size", 4 * hidden)
    two_norms, parallel = hf.size("num_ln_in_parallel_attn", 2), hf.flag("parallel_attn", True)
    biased = hf.flag("bias")
    return decoder(
        {"tie_word_embeddings": True} | hf | renamed | _epsilon(hf, "layer_norm_epsilon"),
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        norm="layer",
        mlp="plain",
        parallel=is_new or parallel,
        mlp_norm=is_new and two_norms == 2,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        sizes={GROUPS: kv_heads},
        names=FALCON,
    )


def gpt_neox(hf: HFConfig) -> ModelConfig:
    """Return the config of GPT-NeoX and Pythia: parallel attention and MLP, with one norm each; fused q, k and v;
    RoPE on a quarter of each head."""
    hf = Settings.of(hf)
    heads, parallel = hf.size("num_attention_heads"), hf.flag("use_parallel_residual", True)
    biased = hf.flag("attention_bias", True)
    own = {"rope_theta": hf.number("rotary_emb_base", 10000.0), "partial_rotary_factor": hf.number("rotary_pct", 0.25)}
    return decoder(
        {"hidden_act": "gelu"} | hf | own | _epsilon(hf, "layer_norm_eps"),
        kv_heads=heads,
        head_dim=_head_dim(hf),
        norm="layer",
        mlp="plain",
        parallel=parallel,
        mlp_norm=parallel,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=True,
        sizes={GROUPS: heads},
        names=GPT_NEOX,
    )


def phi(hf: HFConfig) -> ModelConfig:
    """Return the config of Phi 1, 1.5 and 2: parallel attention and MLP; biases; RoPE on half of each head."""
    hf = {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5} | Settings.of(hf)
    return decoder(
        hf | _epsilon(hf, "layer_norm_eps"),
        kv_heads=hf.size("num_key_value_heads", None) or hf.size("num_attention_heads"),
        norm="layer",
        mlp="plain",
        parallel=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        qk_norm=hf.flag("qk_layernorm") and HeadNorm("layer", biased=True),
        names=PHI,
    )


def persimmon(hf: HFConfig) -> ModelConfig:
    """Return the config of Persimmon: fused q, k and v; norms on q and k; squared ReLU; RoPE on half of each head."""
    hf = {"hidden_act": "relu2", "partial_rotary_factor": 0.5} | Settings.of(hf)
    heads = hf.size("num_attention_heads")
    return decoder(
        hf | _epsilon(hf, "layer_norm_eps"),
        kv_heads=heads,
        head_dim=_head_dim(hf),
        norm="layer",
        mlp="plain",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=hf.flag("qk_layernorm", True) and HeadNorm("layer", biased=True),
        sizes={GROUPS: heads},
        names=PERSIMMON,
    )


def jais2(hf: HFConfig) -> ModelConfig:
    """Return the config of Jais 2: biases; squared ReLU without a gate."""
    hf = {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True} | Settings.of(hf)
    return llama(hf | _epsilon(hf, "layer_norm_eps"), norm="layer", mlp="plain")


def opt(hf: HFConfig) -> ModelConfig:
    """Return the config of OPT: learned positions; ReLU without a gate."""
    hf = Settings.of(hf)
    hidden = hf.size("hidden_size")
    expected = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": hidden}
    for key, value in expected.items():
        if hf.get(key, value) not in (None, value):
            raise UnsupportedModelError(
                f"{key} is {hf[key]}; OPT needs {value}. Other values need transformers' modules (pip install "
                "'prefold[transformers]')"
            )
    renamed = {"hidden_act": hf.text("activation_function", "relu"), "intermediate_size": hf.size("ffn_dim")}
    biased, weighted = hf.flag("enable_bias", True), hf.flag("layer_norm_elementwise_affine", True)
    hf = {"tie_word_embeddings": True, "pad_token_id": 1} | hf | renamed
    return _with_learned_positions(
        hf, first_position=2, norm_weight=weighted, qkv_bias=biased, o_bias=biased, mlp_bias=biased, names=OPT
    )


def gpt_neo(hf: HFConfig) -> ModelConfig:
    """Return the config of GPT-Neo: learned positions; a sliding window in every second layer; unscaled attention
    scores."""
    hf = Settings.of(hf)
    hidden, layers = hf.size("hidden_size"), hf.size("num_layers", most=MOST_LAYERS)
    kinds = list[str]()
    for entry in hf.get("attention_types") or [[["global", "local"], layers // 2]]:
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int) and 0 < entry[1] <= layers
        if not is_pair or not isinstance(entry[0], list):
            raise hf.wrong("attention_types", "a list of pairs [list of layer types, repetitions]")
        kinds += entry[0] * entry[1]
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        raise hf.wrong("attention_types", f"global or local for each of the {layers} layers")
    window = hf.size("window_size", 256)
    renamed = {
        "num_hidden_layers": layers,
        "num_attention_heads": hf.size("num_heads"),
        "intermediate_size": hf.size("intermediate_size", 4 * hidden),
        "hidden_act": hf.text("activation_function", "gelu_new"),
    }
    hf.get("attention_layers")  # the same as attention_types
    return _with_learned_positions(
        {"tie_word_embeddings": True} | hf | renamed,
        epsilon="layer_norm_epsilon",
        windows=[window if kind == "local" else None for kind in kinds],
        o_bias=True,
        mlp_bias=True,
        query_scalar=1.0,
        names=GPT_NEO,
    )


def gpt_bigcode(hf: HFConfig) -> ModelConfig:
    """Return the config of StarCoder and SantaCoder: GPT-2 with one KV head."""
    hf = Settings.of(hf)
    if hf.get("add_cross_attention"):
        raise UnsupportedModelError("add_cross_attention is not supported")
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        hf.get(key)  # for rounding only
    renamed = {**gpt2_settings(hf), "hidden_act": hf.text("activation_function", "gelu_pytorch_tanh")}
    kv_heads = 1 if hf.flag("multi_query", True) else renamed["num_attention_heads"]
    return _with_learned_positions(
        {"tie_word_embeddings": True} | hf | renamed,
        epsilon="layer_norm_epsilon",
        kv_heads=kv_heads,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scalar=None if hf.flag("scale_attn_weights", True) else 1.0,
        sizes={GROUPS: kv_heads},
        names=GPT_BIGCODE,
    )


def gptj(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of GPT-J: parallel attention and MLP; interleaved RoPE on part of each head. `options` are
    further arguments of `decoder`."""
    hf = Settings.of(hf)
    renamed = gpt2_settings(hf)
    heads, dim = renamed["num_attention_heads"], renamed["hidden_size"] // renamed["num_attention_heads"]
    turned = hf.size("rotary_dim", 64)
    if turned > dim:
        raise hf.wrong("rotary_dim", f"at most {dim}, the size of a head")
    own = {"rope_theta": 10000.0, "partial_rotary_factor": turned / dim, "rope_scaling": None, "rope_parameters": None}
    return decoder(
        hf | renamed | own,
        kv_heads=heads,
        head_dim=dim,
        norm="layer",
        mlp="plain",
        parallel=True,
        mlp_bias=True,
        lm_head_bias=True,
        **{"names": GPTJ} | options,
    )


def codegen(hf: HFConfig) -> ModelConfig:
    """Return the config of CodeGen: GPT-J with fused q, v and k."""
    config = gptj(hf, names=CODEGEN, sizes={GROUPS: 4})
    if config.heads % 4:
        raise UnsupportedModelError(f"n_head is {config.heads}; for CodeGen it must be a multiple of 4")
    return config


def _with_learned_positions(hf: Settings, *, epsilon: str = "", **options: Any) -> ModelConfig:
    """Return the config of a model with learned positions and MLPs without a gate.

    `epsilon` is the key of the norms' epsilon; "": it is 1e-5.
    """
    heads, hidden = hf.size("num_attention_heads"), hf.size("hidden_size")
    norms = _epsilon(hf, epsilon) if epsilon else {"rms_norm_eps": 1e-5}
    options = {"kv_heads": heads, "norm": "layer", "mlp": "plain"} | options
    return decoder(hf | norms, head_dim=hidden // heads, rotary=False, **options)


def _epsilon(hf: Settings, key: str) -> HFConfig:
    return {"rms_norm_eps": hf.number(key, 1e-5, zero=True)}


def _head_dim(hf: Settings) -> int:
    """Return the head size hidden_size / heads, whatever `head_dim` says."""
    return int(hf.size("hidden_size") // hf.size("num_attention_heads"))
