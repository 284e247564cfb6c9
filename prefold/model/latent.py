"""The families of latent attention (MLA): functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError
from .config import Latent, ModelConfig
from .decoders import HFConfig, decoder
from .mixtures import BY_SIGMOIDS, DEEPSEEK, deepseek_mixture, dense_or_sparse, first_dense, without_further
from .names import Names


def latent_decoder(hf: HFConfig, *, value_dim: int | None = 128, **options: Any) -> ModelConfig:
    """Return the config of a dense model with latent attention. value_dim: of a value, if the config does not say it;
    options: fields of ModelConfig"""
    hf = Settings.of(hf)
    heads, tail, dim = hf.size("num_attention_heads"), hf.size("qk_rope_head_dim", 64), hf.size("qk_nope_head_dim", 128)
    if (kv_heads := hf.size("num_key_value_heads", heads)) != heads:
        raise UnsupportedModelError(
            f"num_key_value_heads is {kv_heads}; latent attention has as many as heads, {heads}"
        )
    hf.get("head_dim")  # that of the rotated part, whatever it says
    query_rank = hf.size("q_lora_rank", 1536) if hf.get("q_lora_rank", 1536) is not None else 0
    value = hf.size("v_head_dim", value_dim or hf.size("hidden_size") // heads)
    sizes = Latent(hf.size("kv_lora_rank", 512), query_rank, dim, tail, value)
    bias = hf.flag("attention_bias")
    config = decoder(
        {"partial_rotary_factor": None} | hf,
        kv_heads=heads,
        head_dim=tail,
        qkv_bias=bias,
        o_bias=bias,
        latent=sizes,
        **options,
    )
    scale = (dim + tail) ** -0.5 * _temperature(config)
    return replace(config, rotated_dim=tail, query_scalar=scale**-2)


def _temperature(config: ModelConfig) -> float:
    """Return what YaRN multiplies the scores with in DeepSeek's models (yarn_apply_mscale of transformers)."""
    assert config.rope is not None
    settings = config.rope.settings
    if config.rope.kind != "yarn" or not settings["mscale_all_dim"] or settings["factor"] <= 1:
        return 1.0
    return float((0.1 * settings["mscale_all_dim"] * math.log(settings["factor"]) + 1) ** 2)


def _names(hf: Settings) -> Names:
    return without_further(hf, replace(DEEPSEEK, interleaved=hf.flag("rope_interleave", True)))


def deepseek_v2(hf: HFConfig) -> ModelConfig:
    """Returns the config of DeepSeek-V2 and V2-Lite: latent attention, and mixtures beside an MLP for all rows."""
    hf = Settings.of(hf)
    config = latent_decoder(hf, names=replace(DEEPSEEK, interleaved=True), mlp_bias=hf.flag("mlp_bias"))
    method = hf.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise hf.wrong("topk_method", "greedy or group_limited_greedy")
    values: dict[str, Any] = {"normalised": False, "mlp_bias": config.mlp_bias}
    hf.get("norm_topk_prob")  # transformers does not read it
    if method == "greedy":
        values |= {"groups": 1, "chosen_groups": 1}
    hf = {"n_shared_experts": 2} | hf
    return deepseek_mixture(hf, config, first_dense(hf, config.layers, 0), **values)


def deepseek_v3(hf: HFConfig) -> ModelConfig:
    """Returns the config of DeepSeek-V3 and R1: latent attention, and mixtures whose routers score by sigmoids, choose
    groups first and correct scores when they choose."""
    hf = Settings.of(hf)
    defaults = {"moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 2.5}
    hf = defaults | {"n_group": 8, "topk_group": 4} | hf
    config = latent_decoder(hf, names=_names(hf))
    kinds = first_dense(hf, config.layers, 3)
    return deepseek_mixture(hf, config, kinds, **BY_SIGMOIDS)


def glm4_moe_lite(hf: HFConfig) -> ModelConfig:
    """Returns the config of GLM-4.7-Flash: latent attention, and the mixtures of DeepSeek-V3 in all layers but the
    first."""
    hf = Settings.of(hf)
    defaults = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
    defaults |= {"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4}
    hf = defaults | hf
    config = latent_decoder(hf, names=_names(hf))
    return deepseek_mixture(hf, config, dense_or_sparse(hf, config.layers), **BY_SIGMOIDS)


def youtu(hf: HFConfig) -> ModelConfig:
    """Returns the config of Youtu-LLM: Llama with latent attention."""
    hf = Settings.of(hf)
    return latent_decoder({"tie_word_embeddings": True} | hf, names=Names(interleaved=hf.flag("rope_interleave", True)))


def minicpm3(hf: HFConfig) -> ModelConfig:
    """Returns the config of MiniCPM 3: latent attention, with factors on embeddings, on what each part adds, and on
    logits."""
    hf = Settings.of(hf)
    layers, hidden = hf.size("num_hidden_layers"), hf.size("hidden_size")
    depth, base = hf.number("scale_depth", None), hf.size("dim_model_base", None)
    if "scale_depth" not in hf:
        depth = 1.4
    if "dim_model_base" not in hf:
        base = 256
    defaults = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    return latent_decoder(
        defaults | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True} | hf,
        value_dim=None,
        embedding_scale=float(hf.number("scale_emb", 12)),
        residual_scale=1.0 if depth is None else float(depth) / math.sqrt(layers),
        logit_scale=1.0 if base is None else base / hidden,
        mlp_bias=hf.flag("mlp_bias"),
    )
