"""The families of mixtures: functions from a Hugging Face config (a dict) to an ExpertsConfig. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...checkpoint.settings import MOST_LAYERS, Settings
from ...errors import UnsupportedModelError
from ...model.builders import LayerBuilder
from ...model.config import ModelConfig
from ...model.decoders import FULL, SLIDING, HFConfig, decoder, granite, llama, mistral, qwen2, qwen3, windows_of
from ...model.names import Names
from ...model.program import Add, Buffer, Experts, Gate, Weight

MLP = "experts"  # the kind of MLP
# Buffers: what the MLP for all rows gives, and its gate.
SHARED, SHARED_GATE = "shared", "shared_gate"


@dataclass(frozen=True, slots=True)
class ExpertsConfig(ModelConfig):
    """An ExpertsConfig describes a decoder with a mixture of experts in each layer; `intermediate` is an expert's
    width.

    experts      gated MLPs of a layer, of which each row goes through some
    chosen       of how many: of those to which the router, a linear, gives the largest logits
    normalised   whether their shares are the softmax over their logits, and so sum to 1; else the softmax over all
    shared       the width of a gated MLP beside them that every row goes through; 0: there is none
    shared_gate  whether what it gives is multiplied with the sigmoid of a linear with one output
    biases       whether the router and the experts have biases
    clamped      whether an expert is that of gpt-oss: of gates g, at most 7, and of up u, within 7, it goes on with
                 g * sigmoid(1.702 g) * (1 + u)
    """

    experts: int = 1
    chosen: int = 1
    normalised: bool = True
    shared: int = 0
    shared_gate: bool = False
    biases: bool = False
    clamped: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not 0 < self.chosen <= self.experts:
            raise UnsupportedModelError(f"each row goes through {self.chosen} experts of {self.experts}")

    @property
    def split_mlps(self) -> dict[str, str]:
        return {"shared": "shared_expert"}


def mixture(config: ModelConfig, **values: Any) -> ExpertsConfig:
    """Returns a decoder whose MLPs are mixtures. values: fields of ExpertsConfig, and others that
    differ."""
    same = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
    return ExpertsConfig(**same | values | {"mlp": MLP, "mlp_bias": False})


def build_experts(builder: LayerBuilder, h: Buffer, out: Buffer) -> None:
    """Add the operations of a mixture to a layer."""
    config, mlp = builder.config, f"{builder.prefix}mlp."
    assert isinstance(config, ExpertsConfig)
    hidden, width, count = config.hidden, config.intermediate, config.experts
    names = [f"{mlp}experts.{number}." for number in range(count)]
    halves = [(f"{name}{half}_proj", width) for name in names for half in ("gate", "up")]
    downs = [(f"{name}down_proj", hidden) for name in names]

    def weight(modules: Sequence[tuple[str, int]], inputs: int) -> Weight:
        return Weight(tuple((f"{module}.weight", rows) for module, rows in modules), (inputs,))

    def bias(modules: Sequence[tuple[str, int]]) -> Weight | None:
        return Weight(tuple((f"{module}.bias", rows) for module, rows in modules)) if config.biases else None

    router = [(f"{mlp}gate", count)]
    builder.add(
        Experts(
            h,
            out,
            weight(router, hidden),
            weight(halves, hidden),
            weight(downs, width),
            experts=count,
            chosen=config.chosen,
            normalised=config.normalised,
            activation="clamped" if config.clamped else config.activation,
            router_bias=bias(router),
            gate_up_bias=bias(halves),
            down_bias=bias(downs),
            summed=not config.shared,
        )
    )
    if not config.shared:
        return
    builder.gated_mlp(h, SHARED, config.shared, "mlp.shared_expert.", named=False, summed=False)
    if config.shared_gate:
        builder.linear("", [("mlp.shared_expert_gate", 1)], h, SHARED_GATE, hidden)
        builder.add(Gate(SHARED, SHARED_GATE, 1, hidden, each=False))
    builder.add(Add(out, SHARED, summed=True))


MOST_EXPERTS = 4096
GATE_UP, DOWN = (
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    ("mlp.experts.{}.down_proj.weight",),
)
# As transformers holds the matrices of all experts, and may write them.
STACKS = {"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN}
GRANITE = Names(
    parts={
        "block_sparse_moe.router.layer": ("mlp.gate",),
        "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
    },
    stacks={"block_sparse_moe.input_linear.weight": GATE_UP, "block_sparse_moe.output_linear.weight": DOWN},
    writes_stacks=True,
)
# As transformers has gpt-oss, and as OpenAI's files have it: the matrices are blocks of MXFP4 there.
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
    other_names=r".*_proj_scales$",  # they are read with the blocks
)


def qwen3_moe(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen 3 with experts: Qwen 3, whose MLPs are mixtures."""
    hf = Settings.of(hf)
    head_dim = hf.size("head_dim", None) or hf.size("hidden_size") // hf.size("num_attention_heads")
    hf = hf | {"head_dim": head_dim}
    return _mixture(hf, qwen3(_of_experts(hf, 768)), experts=128, chosen=8)


def qwen2_moe(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen 1.5 and 2 with experts: Qwen 2, whose MLPs are mixtures beside an MLP for all rows,
    with a gate."""
    hf = Settings.of(hf)
    config = replace(qwen2(_of_experts(hf, 1408)), qkv_bias=hf.flag("qkv_bias", True))
    shared = hf.size("shared_expert_intermediate_size", 5632)
    return replace(_mixture(hf, config, experts=60, chosen=4), shared=shared, shared_gate=True)


def olmoe(hf: HFConfig) -> ModelConfig:
    """Returns the config of OLMoE: Llama with norms over all heads of q and of k, whose MLPs are mixtures."""
    hf = Settings.of(hf)
    return _mixture(hf, llama({"rms_norm_eps": 1e-5, "pad_token_id": 1} | hf, row_qk_norm=True), experts=64, chosen=8)


def mixtral(hf: HFConfig) -> ModelConfig:
    """Returns the config of Mixtral: Mistral, whose MLPs are mixtures."""
    hf = Settings.of(hf)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
    config = mistral(defaults | {"num_key_value_heads": hf.size("num_attention_heads")} | hf)
    experts = _experts(hf, 8)
    modules = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    parts = {
        f"block_sparse_moe.experts.{number}.{theirs}": (f"mlp.experts.{number}.{ours}",)
        for number in range(experts)
        for theirs, ours in modules.items()
    }
    names = Names(parts={"block_sparse_moe.gate": ("mlp.gate",)} | parts, stacks=STACKS)
    return mixture(config, experts=experts, chosen=hf.size("num_experts_per_tok", 2), names=names)


def granite_moe(hf: HFConfig) -> ModelConfig:
    """Returns the config of Granite with experts: Granite 3, whose MLPs are mixtures, in some models beside an MLP for
    all rows."""
    hf = Settings.of(hf)
    chosen, shared = hf.size("num_experts_per_tok", 2), hf.size("shared_intermediate_size", 0, least=0)
    return mixture(granite(hf), experts=_experts(hf, 8), chosen=chosen, shared=shared, names=GRANITE)


def gpt_oss(hf: HFConfig) -> ModelConfig:
    """Returns the config of gpt-oss: attention with sinks, every other layer with a sliding window, and mixtures with
    biases and an activation of their own."""
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
            raise hf.wrong(key, f"{value}, the only one that there is code for")
    bias = hf.flag("attention_bias", True)
    config = decoder(hf, windows=windows_of(hf, types), qkv_bias=bias, o_bias=bias, sinks=True)
    chosen = hf.size("num_experts_per_tok", 4)
    if hf.size("experts_per_token", chosen) != chosen:  # the same in files of OpenAI's
        raise hf.wrong("experts_per_token", f"num_experts_per_tok, {chosen}")
    options = {"biases": True, "clamped": True, "names": GPT_OSS}
    return mixture(config, experts=_experts(hf, 128), chosen=chosen, **options)


def _experts(hf: Settings, default: int) -> int:
    """Returns how many experts a layer has: transformers writes either key, whatever a family calls it."""
    counts = [hf.size(key, 0, least=0, most=MOST_EXPERTS) for key in ("num_experts", "num_local_experts") if key in hf]
    if len(set(counts) - {0}) > 1:
        raise hf.wrong("num_local_experts", f"num_experts, {hf['num_experts']}")
    if counts and not max(counts):
        raise UnsupportedModelError("num_experts is 0, which is a model without experts; name its dense architecture")
    return max(counts, default=default)


def _of_experts(hf: Settings, width: int) -> Settings:
    """Returns a config of Qwen's with the width of an expert as that of its MLPs. width: where the config has none."""
    if hf.size("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        raise UnsupportedModelError(
            "decoder_sparse_step and mlp_only_layers say that some layers have no experts, which is not supported"
        )
    return hf | {"intermediate_size": hf.size("moe_intermediate_size", width)}


def _mixture(hf: Settings, config: ModelConfig, *, experts: int, chosen: int) -> ExpertsConfig:
    """Returns a config with the experts that the keys of Qwen and OLMoE say. experts, chosen: where they do not."""
    return mixture(
        config,
        experts=_experts(hf, experts),
        chosen=hf.size("num_experts_per_tok", chosen),
        normalised=hf.flag("norm_topk_prob"),
        names=Names(stacks=STACKS),
    )
