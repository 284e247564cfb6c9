"""Families with mixtures of experts: functions from a Hugging Face config (a dict) to a ModelConfig. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, Settings
from ..errors import UnsupportedModelError
from .builders import EXPERTS
from .config import Mixture, ModelConfig
from .decoders import (  # fmt: skip
    FULL,
    SLIDING,
    HFConfig,
    decoder,
    granite,
    llama,
    mistral,
    qwen2,
    qwen3,
    windows_of,
    works_with,
)
from .names import Names


def mixture(
    config: ModelConfig, *, count: int, chosen: int, width: int | None = None, dense: int = 0, **values: Any
) -> ModelConfig:
    """Return a decoder whose MLPs are mixtures of experts.

    Args:
        config: a dense decoder.
        count: experts per layer.
        chosen: experts per row.
        width: inner width of an expert; None: `config.intermediate`.
        values: further fields of Mixture and of ModelConfig (`mlp`, if some layers have another MLP).
    """
    of_mixture = {name: values.pop(name) for name in FIELDS if name in values}
    experts = Mixture(count, chosen, config.intermediate if width is None else width, **of_mixture)
    fields_of_config: dict[str, Any] = {"mlp": EXPERTS, "experts": experts, "mlp_bias": False} | values
    return replace(config, **fields_of_config)


FIELDS = [field.name for field in fields(Mixture)]
MOST_EXPERTS = 4096
GATE_UP, DOWN = (
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    ("mlp.experts.{}.down_proj.weight",),
)
# transformers stacks the matrices of all experts in memory, and may save them so.
STACKS = {"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN}
# DeepSeek's names of shared experts, and of the bias that corrects scores.
SHARED_EXPERTS = {
    f"mlp.shared_experts.{name}_proj": (f"mlp.shared_expert.{name}_proj",) for name in ("gate", "up", "down")
}
CORRECTION = ("mlp.gate.correction",)
DEEPSEEK = Names(parts={"mlp.gate.e_score_correction_bias": CORRECTION, **SHARED_EXPERTS}, stacks=STACKS)
# The router rules of DeepSeek-V3.
BY_SIGMOIDS: dict[str, Any] = {"score": "sigmoid", "corrected": True, "group_best": 2}
GRANITE = Names(
    parts={
        "block_sparse_moe.router.layer": ("mlp.gate",),
        "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
    },
    stacks={"block_sparse_moe.input_linear.weight": GATE_UP, "block_sparse_moe.output_linear.weight": DOWN},
    writes_stacks=True,
)
# Names of experts' matrices in Mixtral and LFM2.
W1_TO_W3 = {
    f"experts.{{}}.{theirs}": (f"mlp.experts.{{}}.{ours}_proj",)
    for theirs, ours in {"w1": "gate", "w2": "down", "w3": "up"}.items()
}
MIXTRAL = Names(
    parts={f"block_sparse_moe.{name}": parts for name, parts in W1_TO_W3.items()}
    | {"block_sparse_moe.gate": ("mlp.gate",)},
    stacks=STACKS,
)
# gpt-oss in transformers, and in OpenAI's files, which have the matrices in MXFP4 blocks.
GPT_OSS = Names(
    parts={"mlp.router": ("mlp.gate",)},
    stacks=STACKS
    | {
        "mlp.experts.gate_up_proj_blocks": GATE_UP,
        "mlp.experts.down_proj_blocks": DOWN,
        "mlp.experts.gate_up_proj_bias": tuple(name.replace(".weight", ".bias") for name in GATE_UP),
        "mlp.experts.down_proj_bias": tuple(name.replace(".weight", ".bias") for name in DOWN),
    },
    writes_stacks=True,
    in_turn=True,
    turned=True,
    other_names=r".*_proj_scales$",  # read together with the blocks
)


def qwen3_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen 3 MoE: Qwen 3 with experts."""
    hf = Settings.of(hf)
    head_dim = hf.size("head_dim", None) or hf.size("hidden_size") // hf.size("num_attention_heads")
    hf = hf | {"head_dim": head_dim}
    return qwen_mixture(hf, qwen3(_of_experts(hf, 768)), count=128, chosen=8)


def qwen2_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen 1.5 and 2 MoE: Qwen 2 with experts and a gated shared expert."""
    hf = Settings.of(hf)
    config = replace(qwen2(_of_experts(hf, 1408)), qkv_bias=hf.flag("qkv_bias", True))
    shared = hf.size("shared_expert_intermediate_size", 5632)
    return qwen_mixture(hf, config, count=60, chosen=4, shared=shared, shared_gate=True)


def olmoe(hf: HFConfig) -> ModelConfig:
    """Return the config of OLMoE: Llama with experts; norms over all heads of q and of k."""
    hf = Settings.of(hf)
    return qwen_mixture(hf, llama({"rms_norm_eps": 1e-5, "pad_token_id": 1} | hf, row_qk_norm=True), count=64, chosen=8)


def mixtral(hf: HFConfig) -> ModelConfig:
    """Return the config of Mixtral: Mistral with experts."""
    hf = Settings.of(hf)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    config = mistral(defaults | {"num_key_value_heads": hf.size("num_attention_heads")} | hf)
    return mixture(config, count=experts_of(hf, 8), chosen=hf.size("num_experts_per_tok", 2), names=MIXTRAL)


def granite_moe(hf: HFConfig) -> ModelConfig:
    """Return the config of Granite 3 MoE: Granite 3 with experts; some models have a shared expert."""
    hf = Settings.of(hf)
    chosen, shared = hf.size("num_experts_per_tok", 2), hf.size("shared_intermediate_size", 0, least=0)
    return mixture(granite(hf), count=experts_of(hf, 8), chosen=chosen, shared=shared, names=GRANITE)


def gpt_oss(hf: HFConfig) -> ModelConfig:
    """Return the config of gpt-oss: attention sinks; a sliding window in every other layer; experts with biases and
    their own activation."""
    hf = Settings.of(hf)
    layers = hf.size("num_hidden_layers", most=MOST_LAYERS)
    types = hf.texts("layer_types", None) or [FULL if number % 2 else SLIDING for number in range(layers)]
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    defaults = {
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_parameters": yarn | {"original_max_position_embeddings": 4096},
    }
    hf = Settings.of(defaults | hf)
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if hf.number(key, value) != value:
            raise hf.wrong(key, f"{value}, the only supported value")
    bias = hf.flag("attention_bias", True)
    config = decoder(hf, windows=windows_of(hf, types), qkv_bias=bias, o_bias=bias, sinks=True)
    chosen = hf.size("num_experts_per_tok", 4)
    if hf.size("experts_per_token", chosen) != chosen:  # the key in OpenAI's files
        raise hf.wrong("experts_per_token", f"num_experts_per_tok, {chosen}")
    return mixture(config, count=experts_of(hf, 128), chosen=chosen, biases=True, clamped=True, names=GPT_OSS)


def deepseek_mixture(hf: Settings, config: ModelConfig, kinds: Sequence[str], **values: Any) -> ModelConfig:
    """Return the config with the experts that DeepSeek's keys describe.

    Args:
        hf: the Hugging Face config.
        config: a dense decoder.
        kinds: kind of MLP per layer.
        values: further arguments of `mixture`, which override the keys.
    """
    if "score" in values:  # keys of DeepSeek-V3's own code
        rules = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        works_with(hf, "a router of sigmoids", rules)
    groups = {"groups": hf.size("n_group", 1) if hf.get("n_group", 1) else 1}
    groups["chosen_groups"] = hf.size("topk_group", 1) if hf.get("topk_group", 1) else 1
    width = hf.size("moe_intermediate_size", 1407)
    return mixture(
        config,
        count=hf.size("n_routed_experts", 64, most=MOST_EXPERTS),
        chosen=hf.size("num_experts_per_tok", 8),
        width=width,
        shared=width * hf.size("n_shared_experts", 1, least=0),
        scale=float(hf.number("routed_scaling_factor", 1.0)),
        mlp=tuple(kinds),
        **{"normalised": hf.flag("norm_topk_prob", True), **groups, **values},
    )


def first_dense(hf: Settings, layers: int, default: int, key: str = "first_k_dense_replace") -> tuple[str, ...]:
    """Return the kind of MLP per layer, if the first layers are dense. `key` states their number."""
    dense = hf.size(key, default, least=0)
    return tuple("gated" if number < dense else EXPERTS for number in range(layers))


def dense_or_sparse(hf: Settings, layers: int, default: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the kind of MLP per layer from `mlp_layer_types`.

    Without that key, return `default`, or make only the first layer dense.
    """
    names = hf.texts("mlp_layer_types", None)
    kinds = {"dense": "gated", "sparse": EXPERTS}
    if names is None:
        return tuple(default) or ("gated",) + (EXPERTS,) * (layers - 1)
    if len(names) != layers or {*names} - kinds.keys():
        raise hf.wrong("mlp_layer_types", f"a list of {layers} entries dense or sparse, one per layer")
    return tuple(kinds[name] for name in names)


def without_further(hf: Settings, names: Names) -> Names:
    """Return names that leave out the layers for multi-token prediction, which follow the model's layers."""
    layers, further = hf.size("num_hidden_layers", most=MOST_LAYERS), hf.size("num_nextn_predict_layers", 1, least=0)
    numbers = "|".join(str(layers + number) for number in range(min(further, MOST_LAYERS)))
    return replace(names, other_names=rf"model\.layers\.({numbers})\." if numbers else "")


def experts_of(hf: Settings, default: int) -> int:
    """Return the number of experts per layer. transformers writes one of two keys, whatever the family uses."""
    counts = [hf.size(key, 0, least=0, most=MOST_EXPERTS) for key in ("num_experts", "num_local_experts") if key in hf]
    if len(set(counts) - {0}) > 1:
        raise hf.wrong("num_local_experts", f"num_experts, {hf['num_experts']}")
    if counts and not max(counts):
        raise UnsupportedModelError(
            "num_experts is 0; for a model without experts, name its dense architecture in config.json"
        )
    return max(counts, default=default)


def _of_experts(hf: Settings, width: int) -> Settings:
    """Return a Qwen config whose `intermediate_size` is the width of an expert, if all layers have experts.

    `width` is the default width.
    """
    if "gated" in qwen_mlps(hf):
        return hf
    return hf | {"intermediate_size": hf.size("moe_intermediate_size", width)}


def qwen_mlps(hf: Settings) -> tuple[str, ...]:
    """Return the kind of MLP per layer from the keys of Qwen."""
    layers, step = hf.size("num_hidden_layers", most=MOST_LAYERS), hf.size("decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise hf.wrong("mlp_only_layers", "a list of layer indices")
    return tuple("gated" if number in dense or (number + 1) % step else EXPERTS for number in range(layers))


def qwen_mixture(hf: Settings, config: ModelConfig, *, count: int, chosen: int, **values: Any) -> ModelConfig:
    """Return the config with the experts that the keys of Qwen and OLMoE describe.

    `count` and `chosen` are defaults.
    """
    kinds = qwen_mlps(hf)
    options: dict[str, Any] = {"names": Names(stacks=STACKS), "mlp": kinds if "gated" in kinds else EXPERTS}
    options |= values
    return mixture(
        config,
        count=experts_of(hf, count),
        chosen=hf.size("num_experts_per_tok", chosen),
        width=hf.size("moe_intermediate_size", config.intermediate),
        normalised=hf.flag("norm_topk_prob"),
        **options,
    )
