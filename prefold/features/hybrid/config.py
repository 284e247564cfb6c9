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
from ...model.config import Linears, ModelConfig
from ...model.decoders import HFConfig, decoder
from ...model.names import Names

ATTENTION = "attention"


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

    module         the module and the class of the layer, which has the methods of `layers.Mixer`
    linears        returns the linears that every row goes through, of a config; adapters may add to them
    states         returns the shapes of a layer's state, of a config
    other_weights  returns how many weights a layer has beside these linears, their biases among them
    """

    module: str
    linears: Callable[[HybridConfig], Linears]
    states: Callable[[HybridConfig], tuple[StateShape, ...]]
    other_weights: Callable[[HybridConfig], int] = lambda config: 0


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """A HybridConfig is a ModelConfig some of whose layers have a state that runs along the sequence.

    planes       of the layers that have attention, in their order
    mixers       of each layer: "attention", or the name of a MixerKind
    sizes        the numbers that the mixers need, by names of theirs
    gated        whether what attention gives is multiplied with the sigmoid of a gate, which is computed beside q
    rotated_dim  how many numbers of each head are rotated, its first ones; None: all
    """

    model: ClassVar[str] = "prefold.features.hybrid.worker:HybridLM"

    mixers: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = False
    rotated_dim: int | None = None

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
    def fixed(self) -> str:
        return "some of its layers have a state that runs along the sequence, so that a row depends on all rows before"

    def mixer(self, number: int) -> MixerKind | None:
        """Returns the kind of a layer's mixer; None for attention."""
        return MIXERS.get(self.mixers[number])

    def mixer_linears(self, number: int) -> Linears | None:
        kind = self.mixer(number)
        if kind is not None:
            return kind.linears(self)
        if not self.gated:
            return None
        q, kv, hidden = self.q_size, self.kv_size, self.hidden
        keys_values = [("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        return {
            "q": (hidden, [("self_attn.q_proj", 2 * q)]),
            "kv": (hidden, keys_values),
            "o": (q, [("self_attn.o_proj", hidden)]),
        }

    def states(self, number: int) -> tuple[StateShape, ...]:
        """Returns the shapes of a layer's state; none for a layer with attention."""
        kind = self.mixer(number)
        return () if kind is None else kind.states(self)

    @property
    def linear_flops(self) -> int:
        return 2 * (self.layers * self.layer_weights + self._more_weights())

    @property
    def num_parameters(self) -> int:
        kinds = [kind for number in range(self.layers) if (kind := self.mixer(number)) is not None]
        # What the layers without attention lack beside its linears.
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * self.hidden
        lacking = len(kinds) * (biases + self.qk_norm * 2 * self.head_dim)
        return super().num_parameters + self._more_weights() + sum(kind.other_weights(self) for kind in kinds) - lacking

    def _more_weights(self) -> int:
        """Returns how many weights the linears of all layers have beyond those of as many layers with attention."""
        attention = self.hidden * (2 * self.q_size + 2 * self.kv_size)
        total = 0
        for number in range(self.layers):
            linears = self.mixer_linears(number)
            if linears is not None:
                total += sum(inputs * size for inputs, parts in linears.values() for _, size in parts) - attention
        return total


def add_mixer(name: str, kind: MixerKind) -> None:
    """Adds a kind of mixer, which configs may name."""
    MIXERS[name] = kind


def _conv_linears(config: HybridConfig) -> Linears:
    hidden = config.hidden
    return {"in_proj": (hidden, [("conv.in_proj", 3 * hidden)]), "out_proj": (hidden, [("conv.out_proj", hidden)])}


MIXERS: dict[str, MixerKind] = {
    "conv": MixerKind(
        "prefold.features.hybrid.layers:ShortConv",
        _conv_linears,
        lambda config: (StateShape((config.sizes["taps"] - 1, config.hidden)),),
        lambda config: config.hidden * (config.sizes["taps"] + 5 * config.sizes["bias"]),
    )
}


def _delta_linears(config: HybridConfig) -> Linears:
    sizes, hidden = config.sizes, config.hidden
    keys, values = sizes["key_heads"] * sizes["key_dim"], sizes["value_heads"] * sizes["value_dim"]
    inner = [
        ("linear_attn.in_proj_qkv", 2 * keys + values),
        ("linear_attn.in_proj_z", values),
        ("linear_attn.in_proj_b", sizes["value_heads"]),
        ("linear_attn.in_proj_a", sizes["value_heads"]),
    ]
    return {"in_proj": (hidden, inner), "out_proj": (values, [("linear_attn.out_proj", hidden)])}


def _delta_states(config: HybridConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = 2 * sizes["key_heads"] * sizes["key_dim"] + sizes["value_heads"] * sizes["value_dim"]
    recurrent = StateShape((sizes["value_heads"], sizes["key_dim"], sizes["value_dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


def _delta_weights(config: HybridConfig) -> int:
    sizes = config.sizes
    return _delta_states(config)[0].shape[1] * sizes["taps"] + 2 * sizes["value_heads"] + sizes["value_dim"]


add_mixer(
    "linear_attention",
    MixerKind("prefold.features.hybrid.layers:GatedDeltaNet", _delta_linears, _delta_states, _delta_weights),
)


def _mamba_linears(config: HybridConfig) -> Linears:
    sizes, inner = config.sizes, config.sizes["heads"] * config.sizes["dim"]
    projected = 2 * inner + 2 * sizes["groups"] * sizes["state"] + sizes["heads"]
    return {
        "in_proj": (config.hidden, [("mamba.in_proj", projected)]),
        "out_proj": (inner, [("mamba.out_proj", config.hidden)]),
    }


def _mamba_states(config: HybridConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = sizes["heads"] * sizes["dim"] + 2 * sizes["groups"] * sizes["state"]
    recurrent = StateShape((sizes["heads"], sizes["state"], sizes["dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


def _mamba_weights(config: HybridConfig) -> int:
    sizes, outputs = config.sizes, sum(parts[0][1] for _, parts in _mamba_linears(config).values())
    conv = _mamba_states(config)[0].shape[1] * (sizes["taps"] + sizes["conv_bias"])
    return conv + 3 * sizes["heads"] + sizes["heads"] * sizes["dim"] + sizes["bias"] * outputs


add_mixer("mamba", MixerKind("prefold.features.hybrid.layers:Mamba2", _mamba_linears, _mamba_states, _mamba_weights))

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
    return HybridConfig.of(config, mixers, sizes=sizes, gated=True, rotated_dim=int(head_dim * partial))


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
