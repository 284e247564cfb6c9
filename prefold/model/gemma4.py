"""The Gemma 4 family: functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError
from .builders import BESIDE_EXPERTS
from .config import KVSizes, ModelConfig, Plane
from .decoders import FULL, SLIDING, HFConfig, full_every, gemma_decoder, num_layers, read_rope, rope_of
from .mixtures import DOWN, GATE_UP, MOST_EXPERTS, mixture
from .names import Names

GEMMA4 = Names(
    parts={"router.proj": ("mlp.gate",)},
    stacks={"experts.gate_up_proj": GATE_UP, "experts.down_proj": DOWN},
    writes_stacks=True,
)
# transformers' default for layers with full attention.
ROPE_OF_FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def gemma4(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 4 (text): two head sizes; late layers read K/V of earlier layers; per-layer
    embeddings (E2B, E4B); experts beside the MLP (26B-A4B). Source: modeling_gemma4.py of transformers."""
    hf = Settings.of(hf)
    if hf.text("use_bidirectional_attention", None) == "vision":  # for images only, which this text model ignores
        hf = hf | {"use_bidirectional_attention": None}
    defaults: dict[str, Any] = {"num_key_value_heads": 4, "sliding_window": 512, "query_pre_attn_scalar": 1.0}
    if not hf.settings("rope_parameters"):
        defaults |= {"rope_parameters": {FULL: ROPE_OF_FULL, SLIDING: {}}}
    hf = defaults | {"hidden_size_per_layer_input": 256} | hf
    types = hf.texts("layer_types", None) or full_every(6, num_layers(hf))
    types = [*types[:-1], FULL]
    config = gemma_decoder(
        hf,
        rope_of(hf, SLIDING, "rope_theta", 1e4),
        types,
        qk_norm=True,
        value_norm=True,
        norm_offset=0.0,
        layer_inputs=hf.size("hidden_size_per_layer_input", least=0) if hf["hidden_size_per_layer_input"] else 0,
        layer_scales=True,
        logit_cap=hf.number("final_logit_softcapping", None),
        names=GEMMA4,
    )
    if config.layer_inputs and (rows := hf.size("vocab_size_per_layer_input", 262_144)) != config.vocab_size:
        message = f"vocab_size_per_layer_input is {rows}; it must be vocab_size"
        raise UnsupportedModelError(f"{message}, {config.vocab_size}")
    tied, rope = hf.flag("attention_k_eq_v"), read_rope(rope_of(hf, FULL, "rope_theta", 1e6))
    far = Plane(rope=rope, sizes=_far_sizes(hf, config, types, tied), tied=tied)
    near = config.planes[types.index(SLIDING)] if SLIDING in types else far
    reads = kv_layers_of(types, config.layers - hf.size("num_kv_shared_layers", 0, least=0))
    own = [kind for number, kind in enumerate(types) if reads[number] == number]
    wide = 2 if hf.flag("use_double_wide_mlp") else 1
    widths = [config.intermediate * (1 if read == number else wide) for number, read in enumerate(reads)]
    config = replace(
        config,
        planes=tuple(far if kind == FULL else near for kind in own),
        kv_layers=reads if len(own) < config.layers else (),
        mlp_widths=tuple(widths) if len({*widths}) > 1 else (),
    )
    if not hf.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            hf.get(key)
        return config
    return mixture(
        config,
        count=hf.size("num_experts", most=MOST_EXPERTS),
        chosen=hf.size("top_k_experts"),
        width=hf.size("moe_intermediate_size"),
        mlp=BESIDE_EXPERTS,
    )


def gemma4_unified(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 4 12B (text): Gemma 4 without per-layer embeddings and without experts."""
    hf = Settings.of(hf)
    return gemma4({"sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": False} | hf)


def gemma4_with_towers(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 4 with towers; text only."""
    return _of_text(hf, gemma4)


def gemma4_unified_with_media(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 4 12B with image and audio embedding; text only."""
    return _of_text(hf, gemma4_unified)


def _of_text(hf: HFConfig, family: Callable[[HFConfig], ModelConfig]) -> ModelConfig:
    hf = Settings.of(hf)
    for key in ("vision_config", "audio_config"):
        hf.get(key)
    config = family(hf.settings("text_config"))
    names = replace(
        config.names, prefix="", before=r"model\.language_model\.", other_names=r"model\.(?!language_model)"
    )
    return replace(config, names=names, tie_embeddings=hf.flag("tie_word_embeddings", config.tie_embeddings))


def _far_sizes(hf: Settings, config: ModelConfig, types: list[str], tied: bool) -> KVSizes:
    """Return the KV sizes of layers with full attention."""
    dim, heads = hf.size("global_head_dim", 512), hf.size("num_global_key_value_heads", None) if tied else None
    of_layers = hf.settings("per_layer_config")
    every = [dict(value) for value in of_layers.values() if isinstance(value, Mapping)]
    named = {int(number) for number in of_layers}
    if every:
        full = {number for number, kind in enumerate(types) if kind == FULL}
        if named != full or any(one != every[0] or {*one} - {"head_dim", "num_key_value_heads"} for one in every):
            raise UnsupportedModelError(
                "per_layer_config must set the same head_dim for all full-attention layers only"
            )
        dim, heads = every[0].get("head_dim", dim), every[0].get("num_key_value_heads", heads)
    return KVSizes(heads or config.kv_heads, dim, dim)


def kv_layers_of(types: list[str], first: int) -> tuple[int, ...]:
    """Return, per layer, the layer whose keys and values it reads.

    A layer before `first` reads its own. A later layer reads the last layer before `first` of the same type.
    """
    last = {kind: number for number, kind in enumerate(types[:first])}
    if missing := {*types} - {*last}:
        raise UnsupportedModelError(f"num_kv_shared_layers leaves no {min(missing)} layer with its own keys and values")
    return tuple(number if number < first else last[kind] for number, kind in enumerate(types))
