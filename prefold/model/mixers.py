"""Mixers with a state, which replace attention in layers of hybrids. No NumPy, no torch.

Short convolutions (LFM2), gated delta nets (Qwen3.5; Yang et al. 2024) and Mamba-2 (Granite 4; Dao and Gu 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .builders import LayerBuilder, MixerKind, Module, add_mixer
from .config import ModelConfig, StateShape
from .program import Buffer, GatedDelta, Mamba2, Operation, ShortConv, Weight

# Buffers: the result of a mixer's first linear, and the mixer's result.
MIXED, MIXER_OUT = "mixed", "mixer_out"


def _mixer(
    builder: LayerBuilder,
    h: Buffer,
    before: Sequence[Module],
    after: str,
    make: Callable[[Callable[..., Weight]], Operation],
) -> None:
    """Add a mixer between two linears.

    Args:
        before: modules that are fused in the first linear.
        after: module of the last linear.
        make: takes a function that makes a weight of the layer (from its name, rows and further dimensions). Returns
            the operation, from MIXED to MIXER_OUT.
    """
    config = builder.config
    last = [(after, config.hidden)]
    # Adapters fit the checkpoint's order of heads, not the tiled order of GGUF files.
    names = ("", "") if config.sizes.get("tiled") else ("in_proj", "out_proj")
    biased = bool(config.sizes.get("bias"))
    out_biased = config.sizes.get("out_bias", biased)

    def weight(name: str, rows: int, *inputs: int) -> Weight:
        return Weight(((builder.prefix + name, rows),), inputs)

    builder.linear(names[0], before, h, MIXED, config.hidden, biased=before if biased else ())
    operation = make(weight)
    builder.add(operation)
    if builder.is_last:
        builder.pick()
    assert operation.fills is not None
    builder.linear(names[1], last, MIXER_OUT, builder.mixed, operation.fills[1], biased=last if out_biased else ())


def _build_conv(builder: LayerBuilder, h: Buffer) -> None:
    config = builder.config
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
    sizes, prefix = config.sizes, "linear_attn."
    heads, channels = sizes["value_heads"], _delta_states(config)[0].shape[1]
    keys, values = sizes["key_heads"] * sizes["key_dim"], heads * sizes["value_dim"]
    rows = {"qkv": channels, "q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    parts = sizes.get("in_parts", ("qkv", "z", "b", "a"))  # as the checkpoint's tensors split them
    _mixer(
        builder,
        h,
        [(f"{prefix}in_proj_{name}", rows[name]) for name in parts],
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
            eps=sizes.get("eps", config.norm_eps),
            tiled=bool(sizes.get("tiled")),
            picked=builder.is_last,
            beta_scale=sizes.get("beta_scale", 1.0),
        ),
    )


def _build_mamba(builder: LayerBuilder, h: Buffer) -> None:
    config = builder.config
    sizes, prefix, heads = config.sizes, "mamba.", config.sizes["heads"]
    channels = _mamba_states(config)[0].shape[1]
    norm = sizes.get("norm", "last")  # "first": before the gate; "": none
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
            norm=weight(f"{prefix}norm.weight", heads * sizes["dim"]) if norm else None,
            eps=config.norm_eps,
            picked=builder.is_last,
            norm_first=norm == "first",
            scales=sizes.get("scales", (1.0,) * 5),
        ),
    )


def _conv_states(config: ModelConfig) -> tuple[StateShape, ...]:
    return (StateShape((config.sizes["taps"] - 1, config.hidden)),)


def _delta_states(config: ModelConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = 2 * sizes["key_heads"] * sizes["key_dim"] + sizes["value_heads"] * sizes["value_dim"]
    recurrent = StateShape((sizes["value_heads"], sizes["key_dim"], sizes["value_dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


def _mamba_states(config: ModelConfig) -> tuple[StateShape, ...]:
    sizes = config.sizes
    channels = sizes["heads"] * sizes["dim"] + 2 * sizes["groups"] * sizes["state"]
    recurrent = StateShape((sizes["heads"], sizes["state"], sizes["dim"]), is_wide=True)
    return StateShape((sizes["taps"] - 1, channels)), recurrent


CONV, DELTA_NET, MAMBA = "conv", "linear_attention", "mamba"
add_mixer(CONV, MixerKind(_build_conv, _conv_states))
add_mixer(DELTA_NET, MixerKind(_build_delta, _delta_states))
add_mixer(MAMBA, MixerKind(_build_mamba, _mamba_states))
