"""Families with multi-head latent attention (MLA): functions from a Hugging Face config to a ModelConfig. No torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError
from .config import Latent, ModelConfig
from .decoders import HFConfig, decoder
from .llamas import query_growth, rope_unless_given
from .mixtures import BY_SIGMOIDS, DEEPSEEK, deepseek_mixture, dense_or_sparse, first_dense, without_further
from .names import Names


def latent_decoder(hf: HFConfig, *, value_dim: int | None = 128, **options: Any) -> ModelConfig:
    """Return the config of a dense model with latent attention.

    Args:
        hf: the Hugging Face config.
        value_dim: default for `v_head_dim`; None: hidden_size / heads.
        options: fields of ModelConfig.
    """
    hf = Settings.of(hf)
    heads, tail, dim = hf.size("num_attention_heads"), hf.size("qk_rope_head_dim", 64), hf.size("qk_nope_head_dim", 128)
    if (kv_heads := hf.size("num_key_value_heads", heads)) != heads:
        raise UnsupportedModelError(
            f"num_key_value_heads is {kv_heads}; with latent attention it must be num_attention_heads, {heads}"
        )
    hf.get("head_dim")  # ignored: the rotated part has qk_rope_head_dim elements
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
    """Return the factor of attention scores for YaRN in DeepSeek's models, as in transformers."""
    assert config.rope is not None
    settings = config.rope.settings
    if config.rope.kind != "yarn" or not settings["mscale_all_dim"] or settings["factor"] <= 1:
        return 1.0
    return float((0.1 * settings["mscale_all_dim"] * math.log(settings["factor"]) + 1) ** 2)


def _names(hf: Settings) -> Names:
    return without_further(hf, replace(DEEPSEEK, interleaved=hf.flag("rope_interleave", True)))


def deepseek_v2(hf: HFConfig) -> ModelConfig:
    """Return the config of DeepSeek-V2 and V2-Lite: latent attention; experts with a shared expert."""
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
    """Return the config of DeepSeek-V3 and R1: latent attention; experts with sigmoid scores, a bias for the choice,
    and groups."""
    hf = Settings.of(hf)
    defaults = {"moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 2.5}
    hf = defaults | {"n_group": 8, "topk_group": 4} | hf
    config = latent_decoder(hf, names=_names(hf))
    kinds = first_dense(hf, config.layers, 3)
    return deepseek_mixture(hf, config, kinds, **BY_SIGMOIDS)


def glm4_moe_lite(hf: HFConfig) -> ModelConfig:
    """Return the config of GLM-4.7-Flash: latent attention; DeepSeek-V3's mixtures in all layers but the first."""
    hf = Settings.of(hf)
    defaults = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
    defaults |= {"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4}
    hf = defaults | hf
    config = latent_decoder(hf, names=_names(hf))
    return deepseek_mixture(hf, config, dense_or_sparse(hf, config.layers), **BY_SIGMOIDS)


def mistral4(hf: HFConfig) -> ModelConfig:
    """Return the config of Mistral Small 4: latent attention; queries grow with the position; experts in groups.
    Source: modeling_mistral4.py of transformers."""
    defaults = {"num_attention_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64}
    defaults |= {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "pad_token_id": 11}
    rope = {"type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    hf = rope_unless_given(Settings.of(hf), rope)
    if not hf.get("num_key_value_heads"):
        hf = hf | {"num_key_value_heads": hf.size("num_attention_heads")}
    hf = defaults | {"n_shared_experts": 1} | hf
    hf = hf | {"rope_parameters": _rope_of_tails(hf), "rope_scaling": None}
    config = latent_decoder(hf, names=_names(hf), query_growth=query_growth(hf))
    return deepseek_mixture(hf, config, first_dense(hf, config.layers, 0), group_best=2)


def _rope_of_tails(hf: Settings) -> dict[str, Any]:
    """Return the rotary settings of the key tails, which rotate as a whole.

    Configs may state the share of a key that rotates. It must match the tail.
    """
    rope, tail = hf.settings("rope_scaling") or hf.settings("rope_parameters"), hf.size("qk_rope_head_dim", 64)
    share = rope.number("partial_rotary_factor", None)
    if share is not None and int(share * (whole := hf.size("qk_nope_head_dim") + tail)) != tail:
        raise rope.wrong("partial_rotary_factor", f"the rotated share of a key, {tail} of {whole}")
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


def youtu(hf: HFConfig) -> ModelConfig:
    """Return the config of Youtu-LLM: Llama with latent attention."""
    hf = Settings.of(hf)
    return latent_decoder({"tie_word_embeddings": True} | hf, names=Names(interleaved=hf.flag("rope_interleave", True)))


def minicpm3(hf: HFConfig) -> ModelConfig:
    """Return the config of MiniCPM 3: latent attention; factors on embeddings, residuals and logits."""
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
