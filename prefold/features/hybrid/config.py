"""What a hybrid is, as data: which layers have attention and which have states, and the families. No torch.

A family is a function from a Hugging Face config (a dict) to a ModelConfig. A mixer is what a layer has in place of
attention: `add_mixer` adds a kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ...checkpoint.settings import Settings
from ...errors import UnsupportedModelError
from ...model import decoders
from ...model.builders import LayerBuilder, Module
from ...model.config import ModelConfig
from ...model.decoders import HFConfig, decoder
from ...model.names import Names
from ...model.program import DELTA, Buffer, GatedDelta, H, Mamba2, Operation, Pick, ShortConv, Weight, X, add_operation

ATTENTION = "attention"
# Buffers: what a mixer's first linear gives, and what the mixer gives.
MIXED, MIXER_OUT = "mixed", "mixer_out"


@dataclass(frozen=True, slots=True)
class StateShape:
    """A StateShape is the shape of one of the tensors that a layer's state consists of.

    shape    of one state
    is_wide  whether it is float32 whatever the model's dtype is
    """

    shape: tuple[int, ...]
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class MixerKind:
    """A MixerKind says what a layer with a state has in place of attention; `HybridConfig.mixers` names it.

    build   adds the operations of the mixer to a layer; it takes the buffer that they read, and they fill DELTA
    states  returns the shapes of a layer's state, of a config
    """

    build: Callable[[LayerBuilder, Buffer], None]
    states: Callable[[HybridConfig], tuple[StateShape, ...]]


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """A HybridConfig is a ModelConfig some of whose layers have a state that runs along the sequence.

    planes       of the layers that have attention, in their order
    mixers       of each layer: "attention", or the name of a MixerKind
    sizes        the numbers that the mixers need, by names of theirs
    """

    model: ClassVar[str] = "prefold.features.hybrid.worker:HybridLM"
    layer_builder: ClassVar[str] = "prefold.features.hybrid.config:state_layer"

    mixers: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig, mixers: Sequence[str], **values: Any) -> HybridConfig:
        """Returns a hybrid with the sizes of another model. mixers: of each layer; values: fields of HybridConfig.

        Raises UnsupportedModelError for a kind of mixer that is not known, and for a model without attention.
        """
        if len(mixers) != config.layers:
            raise UnsupportedModelError(f"layer_types has {len(mixers)} entries; it must have {config.layers}")
        if unknown := set(mixers) - {ATTENTION, *MIXERS}:
            kinds = ", ".join([ATTENTION, *MIXERS])
            raise UnsupportedModelError(f"layers of the kind {sorted(unknown)[0]!r} are not known; these are: {kinds}")
        if ATTENTION not in mixers:
            raise UnsupportedModelError("no layer has attention; a model of states alone is not supported")
        own = {entry.name: getattr(config, entry.name) for entry in fields(ModelConfig)}
        planes = tuple(plane for plane, mixer in zip(config.planes, mixers, strict=True) if mixer == ATTENTION)
        return cls(**own | {"planes": planes, "mixers": tuple(mixers), **values})

    @property
    def visited(self) -> tuple[int, ...]:
        return tuple(number for number, mixer in enumerate(self.mixers) if mixer == ATTENTION)

    @property
    def pass_layers(self) -> Sequence[int]:
        return range(self.layers)

    @property
    def fixed(self) -> str:
        return "some of its layers have a state that runs along the sequence, so that a row depends on all rows before"

    @property
    def unsplit(self) -> str:
        return "a model with layers of states is not split over ranks"

    def mixer(self, number: int) -> MixerKind | None:
        """Returns the kind of a layer's mixer; None for attention."""
        return MIXERS.get(self.mixers[number])

    def states(self, number: int) -> tuple[StateShape, ...]:
        """Returns the shapes of a layer's state; none for a layer with attention."""
        kind = self.mixer(number)
        return () if kind is None else kind.states(self)


def state_layer(builder: LayerBuilder) -> tuple[Operation, ...]:
    """Returns the operations of a layer, which has attention or a mixer."""
    config = builder.config
    assert isinstance(config, HybridConfig)
    kind = config.mixer(builder.number)
    if kind is None:
        return builder.decoder_layer()
    h = builder.norm("input_layernorm", X, H)
    kind.build(builder, h)
    return builder.after_mixer(h)


def add_mixer(name: str, kind: MixerKind) -> None:
    """Adds a kind of mixer, which configs may name."""
    MIXERS[name] = kind


def _mixer(
    builder: LayerBuilder,
    h: Buffer,
    before: Sequence[Module],
    after: str,
    make: Callable[[Callable[..., Weight]], Operation],
) -> None:
    """Add a mixer with a linear before and after it.

    before  the modules that lie side by side in the first linear; after: the module of the last one
    make    takes a function that makes a weight of the layer (by its name, its rows and further dimensions), and
            returns the operation, from MIXED to MIXER_OUT
    """
    config = builder.config
    assert isinstance(config, HybridConfig)
    last = [(after, config.hidden)]
    biased = bool(config.sizes.get("bias"))

    def weight(name: str, rows: int, *inputs: int) -> Weight:
        return Weight(((builder.prefix + name, rows),), inputs)

    builder.linear("in_proj", before, h, MIXED, config.hidden, biased=before if biased else ())
    operation = make(weight)
    builder.add(operation)
    if builder.is_last:
        builder.add(Pick((X,)))
    assert operation.fills is not None
    builder.linear("out_proj", last, MIXER_OUT, DELTA, operation.fills[1], biased=last if biased else ())


def _build_conv(builder: LayerBuilder, h: Buffer) -> None:
    config = builder.config
    assert isinstance(config, HybridConfig)
    hidden, taps, biased = config.hidden, config.sizes["taps"], config.sizes["bias"]
    _mixer(
        builder,
        h,
        [("conv.in_proj", 3 * hidden)],
        "conv.out_proj",
        lambda weight: ShortConv(
            builder.number,
            MIXED,
            MIXER_OUT,
            weight("conv.conv.weight", hidden, 1, taps),
            weight("conv.conv.bias", hidden) if biased else None,
            builder.is_last,
        ),
    )


def _build_delta(builder: LayerBuilder, h: Buffer) -> None:
    config = builder.config
    assert isinstance(config, HybridConfig)
    sizes, prefix = config.sizes, "linear_attn."
    heads, channels = sizes["value_heads"], _delta_states(config)[0].shape[1]
    rows = {"qkv": channels, "z": heads * sizes["value_dim"], "b": heads, "a": heads}
    _mixer(
        builder,
        h,
        [(f"{prefix}in_proj_{name}", size) for name, size in rows.items()],
        f"{prefix}out_proj",
        lambda weight: GatedDelta(
            builder.number,
            MIXED,
            MIXER_OUT,
            heads=heads,
            key_heads=sizes["key_heads"],
            key_dim=sizes["key_dim"],
            value_dim=sizes["value_dim"],
            taps=weight(f"{prefix}conv1d.weight", channels, 1, sizes["taps"]),
            dt_bias=weight(f"{prefix}dt_bias", heads),
            a_log=weight(f"{prefix}A_log", heads),
            norm=weight(f"{prefix}norm.weight", sizes["value_dim"]),
            eps=config.norm_eps,
            picked=builder.is_last,
        ),
    )


def _build_mamba(builder: LayerBuilder, h: Buffer) -> None:
    config = builder.config
    assert isinstance(config, HybridConfig)
    sizes, prefix, heads = config.sizes, "mamba.", config.sizes["heads"]
    channels = _mamba_states(config)[0].shape[1]
    _mixer(
        builder,
        h,
        [(f"{prefix}in_proj", heads * sizes["dim"] + channels + heads)],
        f"{prefix}out_proj",
        lambda weight: Mamba2(
            builder.number,
            MIXED,
            MIXER_OUT,
            heads=heads,
            groups=sizes["groups"],
            dim=sizes["dim"],
            state=sizes["state"],
            limits=sizes["limits"],
            taps=weight(f"{prefix}conv1d.weight", channels, 1, sizes["taps"]),
            conv_bias=weight(f"{prefix}conv1d.bias", channels) if sizes["conv_bias"] else None,
            dt_bias=weight(f"{prefix}dt_bias", heads),
            a_log=weight(f"{prefix}A_log", heads),
            d=weight(f"{prefix}D", heads),
            norm=weight(f"{prefix}norm.weight", heads * sizes["dim"]),
            eps=config.norm_eps,
            picked=builder.is_last,
        ),
    )


MIXERS: dict[str, MixerKind] = {
    "conv": MixerKind(
        _build_conv,
        lambda config: (StateShape((config.sizes["taps"] - 1, config.hidden)),),
    )
}


def _delta_states(config: HybridConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = 2 * sizes["key_heads"] * sizes["key_dim"] + sizes["value_heads"] * sizes["value_dim"]
    recurrent = StateShape((sizes["value_heads"], sizes["key_dim"], sizes["value_dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


add_mixer("linear_attention", MixerKind(_build_delta, _delta_states))


def _mamba_states(config: HybridConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = sizes["heads"] * sizes["dim"] + 2 * sizes["groups"] * sizes["state"]
    recurrent = StateShape((sizes["heads"], sizes["state"], sizes["dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


add_mixer("mamba", MixerKind(_build_mamba, _mamba_states))

for kind, function in ((ShortConv, "short_conv"), (GatedDelta, "gated_delta_net"), (Mamba2, "mamba2")):
    add_operation(kind, f"prefold.features.hybrid.layers:{function}")

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


def lfm2(hf: HFConfig) -> HybridConfig:
    """Returns the config of LFM2: layers of gated short convolutions, and a few of attention with norms on q and k.

    Source: modeling_lfm2.py of transformers, for the rounding of the MLP's width too.
    """
    hf = Settings.of(hf)
    layers = hf.size("num_hidden_layers")
    full = hf.get("full_attn_idxs")
    types = hf.texts("layer_types", None) or [
        "full_attention" if full is None or number in full else "conv" for number in range(layers)
    ]
    hidden, width = hf.size("hidden_size"), hf.size("block_ff_dim", None) or hf.size("intermediate_size")
    unit = hf.size("block_multiple_of", 256)
    factor = hf.number("block_ffn_dim_multiplier", 1.0)
    if hf.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        width = -(-int(factor * width) // unit) * unit
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        if hf.size(key, hidden) != hidden:
            raise UnsupportedModelError(f"{key} is {hf[key]}, and hidden_size {hidden}; both must be equal")
    for key in ("block_use_swiglu", "block_norm_eps", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc"):
        hf.get(key)  # of the model that was trained; transformers does not read them
    tied = hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True))
    settings = {
        "rms_norm_eps": hf.number("norm_eps", 1e-5, zero=True),
        "intermediate_size": width,
        "tie_word_embeddings": tied,
        "rope_theta": hf.number("rope_theta", 1e6),
        "hidden_act": "silu",
    }
    config = decoder({"pad_token_id": 0} | hf | settings, qk_norm=True, names=LFM2)
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    taps = hf.size("conv_L_cache", 3, least=2, most=64)
    return HybridConfig.of(config, mixers, sizes={"taps": taps, "bias": hf.flag("conv_bias")})


def qwen3_5(hf: HFConfig) -> HybridConfig:
    """Returns the config of Qwen3.5's dense text models: gated delta nets, and every fourth layer gated attention, of
    whose heads a quarter is rotated; norms whose weights are stored less one."""
    hf = Settings.of(hf)
    layers, interval = hf.size("num_hidden_layers"), hf.size("full_attention_interval", 4)
    types = hf.texts("layer_types", None) or [
        "full_attention" if (number + 1) % interval == 0 else "linear_attention" for number in range(layers)
    ]
    rope = hf.settings("rope_parameters") or hf.settings("rope_scaling")
    partial = rope.number("partial_rotary_factor", None) or hf.number("partial_rotary_factor", 0.25)
    # The three axes of an image's positions are one and the same for text.
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
        names=Names(other_names=r"mtp\.|model\.visual\."),
    )
    sizes = {
        "taps": hf.size("linear_conv_kernel_dim", 4, least=2, most=64),
        "key_heads": hf.size("linear_num_key_heads", 16),
        "value_heads": hf.size("linear_num_value_heads", 32),
        "key_dim": hf.size("linear_key_head_dim", 128),
        "value_dim": hf.size("linear_value_head_dim", 128),
    }
    if sizes["value_heads"] % sizes["key_heads"]:
        raise hf.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {sizes['key_heads']}")
    if config.activation != "silu":
        raise UnsupportedModelError("the short convolution of Qwen3.5 is followed by silu; hidden_act is not")
    mixers = [ATTENTION if kind == "full_attention" else kind for kind in types]
    config = replace(config, gated=True, rotated_dim=int(head_dim * partial))
    return HybridConfig.of(config, mixers, sizes=sizes)


def qwen3_5_with_images(hf: HFConfig) -> HybridConfig:
    """Returns the config of a checkpoint of Qwen3.5 that has a tower for images, of which text alone is read."""
    hf = Settings.of(hf)
    hf.get("vision_config")
    config = qwen3_5(hf.settings("text_config"))
    names = Names(prefix="", before=r"model\.language_model\.", other_names=r"mtp\.|model\.visual\.")
    tied = hf.flag("tie_word_embeddings", config.tie_embeddings)
    return replace(config, names=names, tie_embeddings=tied)


def granite4(hf: HFConfig) -> ModelConfig:
    """Returns the config of Granite 4 where it has no experts: layers of Mamba-2, and a few of attention, which rotate
    nothing (4 H); or attention alone."""
    hf = Settings.of(hf)
    types = hf.texts("layer_types", None) or hf.texts("layers_block_type", None) or ["mamba"]
    mixers = [ATTENTION if kind in (ATTENTION, "full_attention") else kind for kind in types]
    config = decoders.granite4(hf | {"layer_types": [ATTENTION] * len(mixers)})
    if set(mixers) == {ATTENTION}:
        return config
    heads, inner = hf.size("mamba_n_heads", 128), hf.size("mamba_expand", 2) * config.hidden
    groups = hf.size("mamba_n_groups", 1)
    if hf.get("mamba_d_head", "auto") not in ("auto", inner / heads) or inner % heads or heads % groups:
        raise hf.wrong("mamba_n_heads", f"a multiple of mamba_n_groups that divides the width, {inner}")
    if config.activation != "silu":
        raise UnsupportedModelError("the short convolution of Granite 4 is followed by silu; hidden_act is not")
    sizes = {
        "heads": heads,
        "dim": inner // heads,
        "groups": groups,
        "state": hf.size("mamba_d_state", 256),
        "taps": hf.size("mamba_d_conv", 4, least=2, most=64),
        "conv_bias": hf.flag("mamba_conv_bias", True),
        "bias": hf.flag("mamba_proj_bias"),
        "limits": _limits(hf),
    }
    kinds = {"linear_attention": "mamba"}
    return HybridConfig.of(config, [kinds.get(kind, kind) for kind in mixers], sizes=sizes)


def _limits(hf: Settings) -> tuple[float, ...]:
    """Returns the least and the largest time step of Mamba-2."""
    limits = hf.get("time_step_limit", [0.0, math.inf])
    limits = limits if isinstance(limits, list | tuple) else ()
    # transformers writes infinity as an object.
    numbers = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if len(numbers) != 2 or not all(isinstance(limit, int | float) for limit in numbers):
        raise hf.wrong("time_step_limit", "two numbers")
    return tuple(map(float, numbers))
