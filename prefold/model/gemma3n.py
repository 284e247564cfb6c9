"""The Gemma 3n family: its config, and the operations of its layers, which use several residual streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, ClassVar

from ..checkpoint.settings import Settings
from ..errors import UnsupportedModelError
from .builders import LayerBuilder, MlpKind, add_mlp, decoder_program, widths_of
from .config import ModelConfig
from .decoders import FULL, SLIDING, HFConfig, full_every, gemma_decoder, num_layers, read_rope, rope_of
from .gemma4 import kv_layers_of
from .names import Names
from .program import DELTA, Add, Buffer, H, Linear, Match, Mix, Operation, Program, Scale, SparseGate, Weight, X

MOST_STREAMS = 8  # limit of the operation Mix
LEAST_SQUARE = 1e-5  # smallest mean square of a stream when it is rescaled
SPARSE = "sparse_gated"
# Buffers: the router's result; the residual stream within a layer; the insides of LAuReL and of a sparse MLP.
ROUTED, ACTIVE, LAUREL, GATES, SPARSE_WIDE = "routed_streams", "active", "laurel", "sparse_gates", "sparse_wide"


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(ModelConfig):
    """A decoder with AltUp (Baykal et al. 2023) and LAuReL (Menghani et al. 2024)."""

    layer_builder: ClassVar[str] = "prefold.model.gemma3n:layer"

    streams: int  # residual streams; the first one is X
    laurel_rank: int  # width between the two linears beside attention
    # Per layer, gates are cut off at this many standard deviations above their mean; None: no cut.
    deviations: tuple[float | None, ...]
    stream_scale: bool  # the gate of a per-layer embedding reads the first stream times a weight

    @property
    def others(self) -> list[Buffer]:
        """Return the buffers of all residual streams but the first."""
        return [f"stream@{number}" for number in range(1, self.streams)]

    def program(self, copies: int = 1) -> Program:
        made = decoder_program(self, copies)
        begin = (*made.begin, *_streams(self, "altup_projections", [X] * len(self.others), self.others))
        widths = widths_of(self, (begin, *made.layers))
        return replace(made, begin=begin, widths=widths, kept=(*made.kept, *self.others))


def gemma3n(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 3n (text): several residual streams (AltUp); a low-rank branch beside attention
    (LAuReL); sparse gates; per-layer embeddings; late layers read K/V of earlier layers. Source: modeling_gemma3n.py
    of transformers."""
    hf = Settings.of(hf)
    for key in ("altup_coef_clip", "altup_lr_multiplier"):  # for training
        hf.get(key)
    layers = num_layers(hf)
    defaults: dict[str, Any] = {"num_key_value_heads": 2, "sliding_window": 512, "final_logit_softcapping": 30.0}
    widths = _of_layers(hf, "intermediate_size", layers)
    hf = defaults | hf | {"query_pre_attn_scalar": 1.0, "intermediate_size": widths[0]}
    types = hf.texts("layer_types", None) or full_every(5, layers)
    config = gemma_decoder(
        hf,
        rope_of(hf, FULL, "rope_theta", 1e6),
        types,
        qk_norm=True,
        value_norm=True,
        norm_offset=0.0,
        layer_inputs=hf.size("hidden_size_per_layer_input", 256),
        layer_vocab=hf.size("vocab_size_per_layer_input", 262_144),
        logit_cap=hf.number("final_logit_softcapping", None),
    )
    if active := hf.size("altup_active_idx", 0, least=0):
        raise UnsupportedModelError(f"altup_active_idx is {active}; only 0, the first stream, is supported")
    deviations = _deviations(hf, layers)
    near = read_rope(rope_of(hf, SLIDING, "rope_local_base_freq", 1e4))
    reads = kv_layers_of(types, layers - hf.size("num_kv_shared_layers", 15, least=0, most=layers))
    planes = [replace(plane, rope=near) if types[n] == SLIDING else plane for n, plane in enumerate(config.planes)]
    scaled = hf.flag("altup_correct_scale", True)
    own = {entry.name: getattr(config, entry.name) for entry in fields(ModelConfig)}
    own |= {
        "planes": tuple(plane for n, plane in enumerate(planes) if reads[n] == n),
        "kv_layers": reads if len({*reads}) < layers else (),
        "mlp_widths": tuple(widths) if len({*widths}) > 1 else (),
        "mlp": tuple("gated" if of_layer is None else SPARSE for of_layer in deviations),
        "names": Names() if scaled else Names(other_names=r".*\.altup\.correct_output_scale"),
    }
    return Gemma3nConfig(
        **own,
        streams=hf.size("altup_num_inputs", 4, least=2, most=MOST_STREAMS),
        laurel_rank=hf.size("laurel_rank", 64),
        deviations=deviations,
        stream_scale=scaled,
    )


def gemma3n_with_towers(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 3n with towers; text only."""
    hf = Settings.of(hf)
    for key in ("vision_config", "audio_config"):
        hf.get(key)
    config = gemma3n(hf.settings("text_config"))
    others = "|".join(filter(None, (r"model\.(?!language_model)", config.names.other_names)))
    names = replace(config.names, prefix="", before=r"model\.language_model\.", other_names=others)
    return replace(config, names=names, tie_embeddings=hf.flag("tie_word_embeddings", config.tie_embeddings))


def _of_layers(hf: Settings, key: str, layers: int) -> list[int]:
    """Return a size per layer, from a setting that is one size or a list."""
    values = hf.get(key)
    if not isinstance(values, list):
        return [hf.size(key)] * layers
    if len(values) != layers:
        raise hf.wrong(key, f"a whole number, or a list of {layers}, one per layer")
    return [Settings({key: value}, hf.file, hf.prefix).size(key) for value in values]


def _deviations(hf: Settings, layers: int) -> tuple[float | None, ...]:
    """Return a gate threshold per layer, in standard deviations above the mean; None: no threshold.

    The threshold is the quantile of the normal distribution for the layer's sparsity.
    """
    default = [0.95] * 10 * (layers > 10)
    shares = hf.get("activation_sparsity_pattern")
    shares = default + [0.0] * (layers - len(default)) if shares is None else shares
    is_right = isinstance(shares, list) and all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    if not is_right or len(shares) != layers:
        raise hf.wrong(
            "activation_sparsity_pattern", f"a list of {layers} numbers from 0 to less than 1, one per layer"
        )
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def layer(builder: LayerBuilder) -> tuple[Operation, ...]:
    """Return the operations of a layer.

    Every stream is predicted from all streams. Attention, LAuReL and the MLP continue from the prediction of the first
    stream, and what they add corrects all streams. Then the result of the per-layer embedding is added to all streams
    but the first.
    """
    config = builder.config
    assert isinstance(config, Gemma3nConfig)
    others, count, hidden, add = config.others, config.streams, config.hidden, builder.add
    streams, altup = (X, *others), f"{builder.prefix}altup."
    predict = Weight(((f"{altup}prediction_coefs.weight", count * count),), (count,), wide=True)
    correct = Weight(((f"{altup}correction_coefs.weight", count),), (count,), wide=True)
    builder.begun = (*builder.begun, *others)
    _add_router(builder, X, count)
    add(Mix(streams, streams, ROUTED, predict))
    h = builder.norm("input_layernorm", X, H)
    builder.attention(h)
    builder.norm("post_attention_layernorm", DELTA, DELTA)
    builder.linear("", [("laurel.linear_left", config.laurel_rank)], h, LAUREL, hidden)
    builder.linear("", [("laurel.linear_right", hidden)], LAUREL, ACTIVE, config.laurel_rank)
    builder.norm("laurel.post_laurel_norm", ACTIVE, ACTIVE)
    for part in (h, X, DELTA):
        add(Add(ACTIVE, part))
    add(Scale(ACTIVE, 2**-0.5))
    builder.mlp(builder.norm("pre_feedforward_layernorm", ACTIVE, H), DELTA)
    builder.norm("post_feedforward_layernorm", DELTA, DELTA)
    add(Add(ACTIVE, DELTA))
    _add_router(builder, ACTIVE, count)
    add(Add(ACTIVE, X, -1.0))  # the layer's change to the prediction
    add(Mix(streams, (ACTIVE,), ROUTED, correct, offset=1.0))
    source = X
    if config.stream_scale:
        source = H
        add(Scale(X, weight=Weight(((f"{altup}correct_output_scale", hidden),)), out=source))
    builder.layer_input(source)
    for stream in others:
        add(Add(stream, DELTA))
    if builder.number == config.layers - 1:
        ends = [f"{stream}/end" for stream in others]
        for operation in _streams(config, "altup_unembed_projections", others, ends):
            add(operation)
        for end in ends:
            add(Add(X, end))
        add(Scale(X, 1 / count))
    return tuple(builder.operations)


def _add_router(builder: LayerBuilder, source: Buffer, streams: int) -> None:
    """Add the layer's router, from `source` to ROUTED, with one element per stream."""
    hidden = builder.config.hidden
    builder.norm("altup.router_norm", source, H)
    builder.linear("", [("altup.modality_router", streams)], H, ROUTED, hidden)
    builder.add(Scale(ROUTED, 1 / hidden))


def _streams(
    config: Gemma3nConfig, name: str, sources: Sequence[Buffer], outs: Sequence[Buffer]
) -> tuple[Operation, ...]:
    """Return operations that map each source by a linear, and scale it to the length of the first stream.

    `name` is the list of the linears.
    """
    hidden, made = config.hidden, list[Operation]()
    for number, (source, out) in enumerate(zip(sources, outs, strict=True)):
        weight = Weight(((f"{name}.{number}.weight", hidden),), (hidden,))
        made += [Linear(source, out, weight), Match(out, X, LEAST_SQUARE)]
    return tuple(made)


def _build_sparse(builder: LayerBuilder, h: Buffer, out: Buffer) -> None:
    """Add a gated MLP in which most gates are 0."""
    config, width = builder.config, builder.config.mlp_width(builder.number)
    assert isinstance(config, Gemma3nConfig)
    deviations = config.deviations[builder.number]
    assert deviations is not None
    gates, inside = f"{GATES}:{width}", f"{SPARSE_WIDE}:{width}"
    builder.linear("gate_up", [("mlp.gate_proj", width), ("mlp.up_proj", width)], h, gates, config.hidden)
    builder.add(SparseGate(gates, inside, width, deviations, config.activation))
    builder.linear("down", [("mlp.down_proj", config.hidden)], inside, out, width)


add_mlp(SPARSE, MlpKind(_build_sparse))
