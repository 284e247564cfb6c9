"""The tower of Gemma 4 as a program. No torch.

A row is a patch of one image. Its residual stream starts as a projection of the pixels plus one embedding for each of
its two coordinates. The executor of towers (`tower.py`) rotates queries and keys by the coordinates and merges squares
of patches.
"""

from __future__ import annotations

from ...model.builders import ATTENDED, QKV, WIDE, LayerBuilder, widths_of
from ...model.config import ModelConfig
from ...model.program import (
    DELTA,
    OUT,
    Add,
    Attend,
    Buffer,
    Clamp,
    Embed,
    Gate,
    H,
    Linear,
    Norm,
    NormHeads,
    Operation,
    Program,
    Scale,
    Weight,
    X,
)
from .config import TowerConfig

# Buffers: a linear's clamped input, its output before clamping, the MLP's gate, the values of a patch, and of a square.
BOUNDED, PART, GATES, PATCHES, MERGED = "bounded", "part", "gates", "patches", "merged"
POSITIONS = "patch_embedder.position_embedding_table"
PATCH = "patch_embedder.input_proj.weight"
SHIFT, FACTOR = "std_bias", "std_scale"


def gemma4_program(model: ModelConfig, tower: TowerConfig) -> Program:
    """Return the program of a tower of Gemma 4.

    Args:
        model: the tower as a model
    """
    hidden = tower.hidden
    embedding = Linear(PATCHES, DELTA, Weight(((PATCH, hidden),), (tower.patch_inputs,))), Add(X, DELTA)
    layers = [_layer(model, tower, number) for number in range(tower.layers)]
    projection = Weight((("embedding_projection.weight", tower.output),), (hidden,))
    end = (
        Scale(X, hidden**0.5),
        Norm(MERGED, MERGED, None, tower.projector_eps, size=hidden),
        Linear(MERGED, OUT, projection),
    )
    buffers = {PATCHES: tower.patch_inputs, MERGED: tower.merged, OUT: tower.output, QKV: 3 * tower.q_size}
    return Program(
        widths=widths_of(model, layers) | buffers,
        embed=Embed(X, Weight(((POSITIONS, 2 * tower.places),), (hidden,))),
        layers=(embedding + layers[0], *layers[1:]),
        end=end,
        beside=tuple(Weight(((name, hidden),), wide=True) for name in (SHIFT, FACTOR)) if tower.shifts else (),
    )


def _layer(model: ModelConfig, tower: TowerConfig, number: int) -> tuple[Operation, ...]:
    builder, hidden, width = _Builder(model, number), tower.hidden, tower.intermediate
    heads, dim, size = tower.heads, tower.head_dim, tower.q_size
    builder.norm("input_layernorm", X, H)
    if tower.clips:
        for place, name in enumerate("qkv"):
            builder.bounded(f"self_attn.{name}_proj", H, PART, hidden, size)
            builder.add(builder.bounds(f"self_attn.{name}_proj", "output", PART, QKV, size, place * size))
    else:
        builder.linear("", [(f"self_attn.{name}_proj.linear", size) for name in "qkv"], H, QKV, hidden)
    for place, name in enumerate("qkv"):
        weight = None if name == "v" else Weight(((f"{builder.prefix}self_attn.{name}_norm.weight", dim),))
        builder.add(NormHeads(QKV, place * size, heads, dim, dim, tower.norm_eps, weight))
    builder.add(Attend(QKV, 0, dim, QKV, size, ATTENDED, heads, heads, dim))
    builder.product(tower, "self_attn.o_proj", ATTENDED, DELTA, size, hidden)
    builder.norm("post_attention_layernorm", DELTA, DELTA)
    builder.add(Add(X, DELTA))
    builder.norm("pre_feedforward_layernorm", X, H)
    if tower.clips:
        builder.product(tower, "mlp.gate_proj", H, GATES, hidden, width)
        builder.product(tower, "mlp.up_proj", H, WIDE, hidden, width)
        builder.add(Gate(WIDE, GATES, 1, width, activation="gelu_tanh"))
    else:
        both = [(f"mlp.{name}_proj.linear", width) for name in ("gate", "up")]
        builder.linear("", both, H, WIDE, hidden, activation="gelu_tanh", gated=True)
    builder.product(tower, "mlp.down_proj", WIDE, DELTA, width, hidden)
    builder.norm("post_feedforward_layernorm", DELTA, DELTA)
    builder.add(Add(X, DELTA))
    return tuple(builder.operations)


class _Builder(LayerBuilder):
    """A LayerBuilder for linears with optional clamps of inputs and outputs."""

    def product(self, tower: TowerConfig, name: str, source: Buffer, out: Buffer, inputs: int, outputs: int) -> None:
        """Add a linear, with its clamps if the tower has them."""
        if not tower.clips:
            self.linear("", [(f"{name}.linear", outputs)], source, out, inputs)
            return
        self.bounded(name, source, out, inputs, outputs)
        self.add(self.bounds(name, "output", out, out, outputs))

    def bounded(self, name: str, source: Buffer, out: Buffer, inputs: int, outputs: int) -> None:
        """Add a linear after the clamp of its input."""
        # One buffer per width.
        bounded = f"{BOUNDED}:{inputs}"
        self.add(self.bounds(name, "input", source, bounded, inputs))
        self.linear("", [(f"{name}.linear", outputs)], bounded, out, inputs)

    def bounds(self, name: str, what: str, source: Buffer, out: Buffer, size: int, at: int | None = None) -> Clamp:
        """Return the clamp of a linear's input or output.

        Args:
            what: "input" or "output"
            at: first column in the wider rows of `out`; None: the clamped values fill the row
        """
        low, high = (Weight(((f"{self.prefix}{name}.{what}_{end}", 1),), wide=True) for end in ("min", "max"))
        return Clamp(source, out, low, high, size, at or 0, at is not None)
