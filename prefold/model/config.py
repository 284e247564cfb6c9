"""A model as data: sizes, options, positions and KV planes. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..errors import UnsupportedModelError
from ..spec.plugins import named_class
from ..spec.requests import Exits, refuse_exits
from .names import Names
from .program import Program

SIZES = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_positions")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of the rotary embedding (RoPE) of q and k."""

    kind: str = "default"  # a key of `rotary.KINDS`; "none": no rotation
    theta: float = 10000.0  # base of the frequencies
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of this `kind`
    share: float = 1.0  # rotated share of each head, from its first element on

    def turned(self, head_dim: int) -> int:
        """Return the number of rotated elements per head."""
        return int(head_dim * self.share)


STILL = RopeConfig("none")
ATTENTION = "attention"  # the mixer with keys and values


def head_order(head_dim: int, turned: int, interleaved: bool, swapped: bool = False) -> tuple[int, ...] | None:
    """Return the checkpoint's position of each element of a q or k head; None if the order is the same.

    prefold rotates the first half of a head against the second half. Elements that do not rotate have frequency 0. A
    checkpoint stores the `turned` rotated elements first: one half after the other, or interleaved pairs. With
    `swapped`, the two halves of a fully rotated head change places. Reordering the elements of q and k alike does not
    change attention scores.
    """
    if swapped:
        return (*range(head_dim // 2, head_dim), *range(head_dim // 2))
    if turned == head_dim and not interleaved:
        return None
    step, half = (2, 1) if interleaved else (1, turned // 2)
    middle = (turned + head_dim) // 2
    first = (*range(0, turned if interleaved else half, step), *range(turned, middle))
    return (*first, *range(half, turned, step), *range(middle, head_dim))


@dataclass(frozen=True, slots=True)
class KVSizes:
    """The sizes of a row's keys and values in a plane."""

    heads: int  # KV heads
    dim: int  # elements per key, and per query head
    value_dim: int  # elements per value
    in_keys: bool = False  # the value is the start of its key, so only the key is stored

    @property
    def numbers(self) -> int:
        """Return the number of elements stored per row."""
        return self.heads * (self.dim if self.in_keys else self.dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Plane:
    """One KV layer: a layer of the model, or one visit of a layer in a looped model."""

    # Sliding window: a key is visible while position(query) - position(key) < window. None: no limit.
    window: int | None = None
    rope: RopeConfig | None = None  # None: the model's
    sizes: KVSizes | None = None  # None: kv_heads heads of head_dim. Planes with the same window have the same sizes
    tied: bool = False  # values are the output of the key projection


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm over each query head and each key head, other than the usual RMSNorm before the rotation."""

    kind: Literal["rms", "layer", "unit"] = "rms"  # RMSNorm, LayerNorm, or normalization to length 1
    # "shared" by all heads; "each": weights per head, in one tensor; "apart": one tensor per head; "none"
    weights: Literal["shared", "each", "apart", "none"] = "shared"
    biased: bool = False  # only for LayerNorm
    after: bool = False  # apply the norm after the rotation, not before


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts (MoE): each row goes through a few of a layer's MLPs.

    Attributes:
        count: experts per layer.
        chosen: experts per row: the experts with the largest scores.
        width: inner width of an expert.
        score: maps router logits to scores: "softmax" over all experts, or "sigmoid" of each logit. "sparsemixer":
            every choice has its own softmax (Phi 3.5 MoE, arXiv 2409.12136).
        normalised: divide the weights of the chosen experts by their sum.
        least_sum: lower bound for that divisor.
        tolerance: for "sparsemixer". With the largest remaining logit t, the softmax leaves out experts chosen before,
            and each logit x with (t - x) / max(|x|, t) > tolerance.
        scale: factor of the weights.
        corrected: the router has a bias per expert that is added to its score for the choice only, not for its weight.
            "logits": the bias is added to the logit instead.
        groups: number of equal groups of experts. A row uses experts from the best `chosen_groups` groups only.
        chosen_groups: groups per row.
        group_best: a group is rated by the sum of its `group_best` largest scores.
        shared: inner width of the shared expert, an MLP for every row beside the chosen experts; 0: no shared expert.
        shared_gate: multiply the shared expert's result by the sigmoid of a linear with one output.
        shared_scale: factor of the shared expert's result.
        biases: router and experts have biases.
        clamped: experts of gpt-oss. With gate g clamped to at most 7 and up u to [-7, 7]: g * sigmoid(1.702 g) * (1 +
            u).
        gated: experts and the shared expert compute activation(gate) * up; otherwise activation(up).
        latent: input and output width of the experts, which lie between two linears shared by all experts of a layer;
            0: the width of the residual stream.
    """

    count: int
    chosen: int
    width: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: bool = True
    least_sum: float = 0.0
    tolerance: float = 0.0
    scale: float = 1.0
    corrected: bool | Literal["logits"] = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    shared: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    biases: bool = False
    clamped: bool = False
    gated: bool = True
    latent: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.count:
            raise UnsupportedModelError(
                f"chosen is {self.chosen}; it must be from 1 to the number of experts, {self.count}"
            )
        if self.count % self.groups or not 0 < self.chosen_groups <= self.groups:
            raise UnsupportedModelError(
                f"count is {self.count}, groups {self.groups} and chosen_groups {self.chosen_groups}; count must be a "
                "multiple of groups, and chosen_groups from 1 to groups"
            )
        if self.chosen > self.count // self.groups * self.chosen_groups:
            raise UnsupportedModelError(
                f"chosen is {self.chosen}, but {self.chosen_groups} groups have only "
                f"{self.count // self.groups * self.chosen_groups} experts"
            )
        if self.score == "sparsemixer" and (self.corrected or self.groups > 1):
            raise UnsupportedModelError("sparsemixer does not support corrected scores or groups of experts")


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of multi-head latent attention (MLA), in elements."""

    rank: int  # elements of a latent, from which keys and values are computed
    query_rank: int  # elements of a query latent; 0: queries are computed from the residual stream
    dim: int  # elements of a key without its tail
    tail: int  # the rotated end of a key, shared by all heads
    value_dim: int

    @property
    def kept(self) -> KVSizes:
        """Return the sizes of a row in the KV store: the latent, then the tail."""
        return KVSizes(1, self.rank + self.tail, self.rank, in_keys=True)


@dataclass(frozen=True, slots=True)
class Sphere:
    """The factors of the learned vectors of an nGPT model (Loshchilov et al. 2024), one per kind of vector.

    The residual stream is normed in place before each sublayer, and then moves towards the sublayer's result.
    """

    queries: float  # for `sqk`, whose squares multiply the rotated queries
    gates: float  # for `s_gate`, whose squares multiply the gates of attention before the sigmoid
    inside: float  # for `suv_gate` and `suv_up`, which multiply gate and up of an MLP
    rates: float  # for `lambda_1` and `lambda_2`: how far the stream moves towards the result of attention and the MLP
    logits: float  # for `logit_scale`, which multiplies the output of the LM head


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one array of a layer's state. A state may have several arrays."""

    shape: tuple[int, ...]
    is_wide: bool = False  # always float32, whatever the model's dtype


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder as data. Subclasses describe models that need more (loops, images), and override methods.

    A sublayer is the attention, another mixer or the MLP of a layer. By default it reads a norm of the residual stream,
    and its result is added to the stream.

    Attributes:
        layers: layers with their own weights. A looped model visits a layer more than once.
        rope: rotary settings; None: no rotation, and each of the max_positions positions has an embedding.
        norm: norm of the residual stream: "rms" (RMSNorm), "layer" (LayerNorm) or "unit" (to length 1).
        sphere: factors of a model on the unit sphere (nGPT); None: results of sublayers are added to the stream.
        norm_bias: LayerNorms have biases.
        mlp: kind of MLP, for all layers or one per layer: "gated", activation(gate) * up; "plain", activation(up);
            "experts", the mixture; "none"; or a name added with `add_mlp`.
        experts: the mixture of experts, for layers whose MLP is "experts".
        mixers: what mixes rows along the sequence, per layer: "attention", a mixer with a state (a name added with
            `add_mixer`), "none", or names joined by "+", whose results are added. (): attention in all layers.
        part_scales: factor of a mixer's result by the mixer's name, or of the MLP's by "mlp". Multiplies
            residual_scale.
        sizes: sizes of mixers with a state, by names that the mixers define.
        qkv_bias: the q, k and v projections have biases.
        qk_bias: the q and k projections have biases, the v projection has none.
        o_bias: the output projection of attention has a bias.
        mlp_bias: the linears of the MLP have biases.
        qk_norm: RMSNorm over head_dim on every query head and key head, before the rotation; or another HeadNorm.
        row_qk_norm: RMSNorm over all query heads of a row together, and over all key heads, before the rotation.
        in_norms: norm before each sublayer, for all layers or per layer.
        out_norms: norm of each sublayer's result before it is added to the residual stream, for all layers or per
            layer.
        inner_norms: RMSNorm before the last linear of attention and of the MLP.
        embedding_norm: norm of the residual stream before the first layer.
        value_norm: RMSNorm without a weight over head_dim, on every value head.
        norm_weight: norms have weights.
        sum_norms: RMSNorm of the residual stream after each addition; its result becomes the residual stream.
        norm_offset: added to the checkpoint's norm weights (1: they are stored minus 1).
        parallel: the MLP reads the input of attention, and both results are added to the residual stream together.
        mlp_norm: in a parallel layer, the MLP has its own norm.
        mlp_widths: inner width of the MLP per layer; (): intermediate.
        layer_inputs: width of the per-layer embeddings of tokens (Gemma 3n and 4), from which each layer computes a
            further result; 0: no per-layer embeddings.
        layer_vocab: rows of the per-layer embedding; token ids beyond it use row 0. 0: vocab_size.
        layer_scales: after each layer, the residual stream is multiplied by a scalar weight of the layer.
        activation: the MLP's activation: an activation of `Linear`, or "xielu" (only for MLPs without a gate).
        gate_scale: factor of the gates of a gated MLP before the activation; not used for experts.
        gated: the output of attention is multiplied by the sigmoid of gates that are computed with q, one per element.
        head_gates: the output of each attention head is multiplied by the sigmoid of a gate computed with q; "each":
            one gate per element.
        rotated_dim: size of the rotated start of each head; None: the whole head.
        first_position: row of the learned position embedding for position 0.
        query_growth: (rate, period): queries are multiplied by 1 + rate * log(1 + floor(position / period)); None: no
            growth.
        embedding_scale: factor of the embedding, rounded to the model's dtype.
        residual_scale: factor of the results of attention and of the MLP.
        query_scalar: attention scores are divided by its square root; None: head_dim.
        sinks: each head has an extra logit in the softmax that belongs to no key and no value.
        attention_cap: attention scores s become cap * tanh(s / cap); None: no cap.
        logit_scale: factor of the logits.
        logit_cap: logits become cap * tanh(logit / cap), after logit_scale; None: no cap.
        lm_head_bias: the LM head has a bias.
        lm_head: the model can compute logits. A bare encoder or a classifier cannot.
        num_labels: outputs of the classification head; None: no classification head.
        head_bias: a classification head of one linear has a bias.
        head_layers: 1: one linear; 2: linear, ReLU, linear, with biases (reward models).
        labels: names of the classification head's outputs, in order; empty if the checkpoint has no names.
        pad_id: padding token. A classification head reads the last row before the padding; None: the last row.
        planes: one KV plane per layer with its own keys and values, in the order of a forward pass.
        latent: sizes of latent attention (MLA); None: ordinary keys and values.
        kv_layers: per layer, the layer whose keys and values its attention reads: itself or an earlier one. (): itself.
        names: names of tensors and modules in checkpoints, and which of them are fused.
        dtype: dtype of the checkpoint's tensors ("bfloat16", ...), if the checkpoint says it.
        kv_dtype: dtype of keys and values in the KV store; None: the compute dtype.
        invariant: a row's result is bit-equal whatever other rows a step has.
        whole: the config of the whole model, if this config has the sizes of one rank's part.
    """

    model: ClassVar[str] = "prefold.worker.torch.model:CausalLM"  # "module:class" of the PyTorch model
    # Module whose `load_model` and `load_adapter` load it. Empty: prefold.worker.torch.load and .lora.
    loading: ClassVar[str] = ""
    # "module:function" that takes a `builders.LayerBuilder` and returns the operations of a layer.
    layer_builder: ClassVar[str] = "prefold.model.builders:decoder_layer"

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: RopeConfig | None
    max_positions: int
    planes: tuple[Plane, ...]
    norm: Literal["rms", "layer", "unit"] = "rms"
    sphere: Sphere | None = None
    norm_bias: bool = True
    mlp: str | tuple[str, ...] = "gated"
    experts: Mixture | None = None
    mixers: tuple[str, ...] = ()
    latent: Latent | None = None
    kv_layers: tuple[int, ...] = ()
    part_scales: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | HeadNorm = False
    row_qk_norm: bool = False
    in_norms: bool | tuple[bool, ...] = True
    out_norms: bool | tuple[bool, ...] = False
    inner_norms: bool = False
    embedding_norm: bool = False
    value_norm: bool = False
    norm_weight: bool = True
    sum_norms: bool = False
    norm_offset: float = 0.0
    parallel: bool = False
    mlp_norm: bool = False
    mlp_widths: tuple[int, ...] = ()
    layer_inputs: int = 0
    layer_vocab: int = 0
    layer_scales: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"] = "silu"
    gate_scale: float = 1.0
    gated: bool = False
    head_gates: bool | Literal["each"] = False
    rotated_dim: int | None = None
    first_position: int = 0
    query_growth: tuple[float, int] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    query_scalar: float | None = None
    sinks: bool = False
    attention_cap: float | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    lm_head: bool = True
    lm_head_bias: bool = False
    num_labels: int | None = None
    head_bias: bool = False
    head_layers: Literal[1, 2] = 1
    labels: tuple[str, ...] = ()
    pad_id: int | None = None
    names: Names = field(default_factory=Names)
    dtype: str | None = None
    kv_dtype: str | None = None
    invariant: bool = False
    whole: ModelConfig | None = field(default=None, repr=False, compare=False)

    def image_inputs(self, checkpoint: Any, tokenizer: Any, table: Any = None, **options: Any) -> Any:
        """Return the reader of images in items (`ImageInputs`); None if the model takes text alone.

        Args:
            table: assigns ids to the rows of images; None: a new table.
            options: options of `features.images.reading.reader_of`.
        """
        return None

    def check_exits(self, exits: Exits) -> None:
        """Raise InputError for exits that this model cannot have with any executor."""
        refuse_exits(exits)

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"{name} is {value!r}; it must be a positive integer")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}")
        if self.rope is not None and self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; it must be even for rotary positions")
        for rope, dim in zip(self.ropes, self.rotated_dims, strict=False):
            factors, turned = rope.settings.get("factors"), rope.turned(dim)
            if factors is not None and len(factors) != turned // 2:
                raise UnsupportedModelError(f"{len(factors)} rotary factors, but heads need {turned // 2}")
            if turned % 2 or not 0 < turned <= dim:
                raise UnsupportedModelError(
                    f"the rotated share of a head is {rope.share}, {turned} of {dim} elements; it must be even"
                )
        if len({rope.share for rope in self.ropes if rope.kind != "none"}) > 1:
            raise UnsupportedModelError("the rotated share of a head must be the same in all layers")
        whole_blocks = (self.sum_norms, self.parallel, self.row_qk_norm, self.residual_scale != 1)
        layers = range(self.layers)
        for name in ("mixers", "mlp", "in_norms", "out_norms", "mlp_widths"):
            every = getattr(self, name)
            if every and isinstance(every, tuple) and len(every) != self.layers:
                raise UnsupportedModelError(
                    f"{name} has {len(every)} entries; it must have {self.layers}, one per layer"
                )
        if sum(whole_blocks) > 1 or (any(map(self.out_norms_of, layers)) and any(whole_blocks[:2])):
            raise UnsupportedModelError(
                "a model can have only one of sum_norms, parallel, row_qk_norm and residual_scale; sum_norms and "
                "parallel exclude out_norms too"
            )
        scales = {self.residual_scale, self.gate_scale, *self.part_scales.values()}
        if self.sphere is not None and (self.parallel or self.experts or self.latent or scales != {1}):
            raise UnsupportedModelError(
                "a model on the unit sphere (nGPT) cannot have parallel layers, experts, latent attention or residual "
                "factors"
            )
        if self.names.swapped and self.turned != self.head_dim:
            raise UnsupportedModelError("heads with swapped halves (Names.swapped) must be rotated as a whole")
        if self.activation == "xielu" and {self.mlp_of(number) for number in range(self.layers)} - {"plain", "none"}:
            raise UnsupportedModelError('activation "xielu" needs MLPs of the kind "plain"')
        for name, every in (("mixers", self.mixers), ("mlp", () if isinstance(self.mlp, str) else self.mlp)):
            if every and len(every) != self.layers:
                raise UnsupportedModelError(
                    f"{name} has {len(every)} entries; it must have {self.layers}, one per layer"
                )
        by_window = {plane.window: plane.sizes for plane in self.planes}
        if any(by_window[plane.window] != plane.sizes for plane in self.planes):
            raise UnsupportedModelError("layers with the same sliding window must have KV heads of the same sizes")
        if uneven := next((of.heads for of in map(self.kv_sizes, range(len(self.planes))) if self.heads % of.heads), 0):
            raise UnsupportedModelError(
                f"heads is {self.heads}; it must be a multiple of the {uneven} KV heads of a plane"
            )
        if not all(self.in_norms_of(number) or self.out_norms_of(number) for number in layers):
            raise UnsupportedModelError("every layer needs in_norms or out_norms")
        if any(len({*self.mixers_of(number)} - {ATTENTION}) > 1 for number in layers):
            raise UnsupportedModelError("a layer may have one mixer with a state, and attention beside it")
        if not self.visited:
            raise UnsupportedModelError("no layer has attention; models without attention are not supported")
        if len(self.planes) != len(self.visited):
            raise UnsupportedModelError(f"planes has {len(self.planes)} entries; it must have {len(self.visited)}")

    @property
    def visited(self) -> Sequence[int]:
        """Return the layer of each plane, in the order of a forward pass."""
        if not self.mixers and not self.kv_layers:
            return range(self.layers)
        return [number for number in range(self.layers) if self.attends(number) and self.kv_layer(number) == number]

    @property
    def pass_layers(self) -> Sequence[int]:
        """Return the layers of a forward pass, in order."""
        return range(self.layers) if self.mixers or self.kv_layers else self.visited

    def attends(self, number: int) -> bool:
        return ATTENTION in self.mixers_of(number)

    def kv_layer(self, number: int) -> int:
        """Return the layer whose keys and values this layer's attention reads."""
        return self.kv_layers[number] if self.kv_layers else number

    def is_unread(self, name: str) -> bool:
        """Return whether a tensor holds keys or values of a layer that reads another layer's.

        Checkpoints may have such tensors, and the model ignores them.
        """
        found = re.match(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name) if self.kv_layers else None
        return found is not None and self.kv_layer(int(found[1])) != int(found[1])

    def plane_of(self, number: int) -> int:
        """Return the plane that a layer's attention reads. The model must visit each layer once."""
        return list(self.visited).index(self.kv_layer(number))

    def kv_sizes(self, plane: int) -> KVSizes:
        if self.latent is not None:
            return self.latent.kept
        return self.planes[plane].sizes or self.own_sizes

    @property
    def own_sizes(self) -> KVSizes:
        """Return the KV sizes of a plane without `sizes`."""
        return KVSizes(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def group_of(self) -> dict[int | None, int]:
        """Return the query heads per KV head, by sliding window."""
        sizes = {plane.window: self.kv_sizes(number) for number, plane in enumerate(self.planes)}
        return {window: self.heads // of.heads for window, of in sizes.items()}

    @property
    def reading_layer(self) -> int:
        """Return the last layer of a pass with its own keys, values or state.

        From its attention on, a pass drops unread rows.
        """
        of_rows = {*self.visited, *(number for number in range(self.layers) if self.states(number))}
        return next(number for number in reversed(self.pass_layers) if number in of_rows)

    @property
    def read_windows(self) -> set[int | None]:
        """Return the sliding windows of the layers that compute only read rows."""
        if not self.kv_layers:
            return {self.planes[-1].window}
        later = range(self.reading_layer, self.layers)
        return {self.planes[self.plane_of(number)].window for number in later if self.attends(number)}

    def mixers_of(self, number: int) -> list[str]:
        """Return the mixers of a layer; [] if it has none."""
        names = self.mixers[number] if self.mixers else ATTENTION
        return [] if names == "none" else names.split("+")

    def mlp_of(self, number: int) -> str:
        return self.mlp if isinstance(self.mlp, str) else self.mlp[number]

    def mlp_width(self, number: int) -> int:
        """Return the inner width of a layer's MLP."""
        return self.mlp_widths[number] if self.mlp_widths else self.intermediate

    def in_norms_of(self, number: int) -> bool:
        return self.in_norms[number] if isinstance(self.in_norms, tuple) else self.in_norms

    def out_norms_of(self, number: int) -> bool:
        return self.out_norms[number] if isinstance(self.out_norms, tuple) else self.out_norms

    @property
    def has_states(self) -> bool:
        """Return whether a layer has a mixer with a state."""
        return any({*self.mixers_of(number)} - {ATTENTION} for number in range(self.layers))

    def states(self, number: int) -> tuple[StateShape, ...]:
        """Return the shapes of a layer's state; () for a layer without a state."""
        kinds: Any = named_class("prefold.model.builders:MIXERS")
        names = (name for name in self.mixers_of(number) if name != ATTENTION)
        return tuple(shape for name in names for shape in kinds[name].states(self))

    def program(self, copies: int = 1) -> Program:
        """Return the program. `copies` is the number of ranks that hold each KV head."""
        program: Program = named_class("prefold.model.builders:decoder_program")(self, copies)
        return program

    @property
    def text(self) -> ModelConfig:
        """Return the config of the text model alone. This is the config itself if the model takes text alone."""
        return self

    @property
    def models_beside(self) -> Sequence[ModelConfig]:
        """Return the configs of further models that run on the same executor, such as towers."""
        return ()

    @property
    def span_rows(self) -> int:
        """Return the maximum rows of a span, which see each other in both directions and need one step; 0: no spans."""
        return 0

    @property
    def media_token(self) -> int:
        """Return the token that stands for a media row in models with per-layer embeddings."""
        return (self.pad_id or 0) if self.layer_inputs else 0

    def has_spans(self, window: int | None) -> bool:
        """Return whether rows of a span see each other in both directions in layers with this sliding window.

        If not, a row sees only earlier rows there.
        """
        return True

    @property
    def fixed(self) -> str | None:
        """Return why K/V cannot be moved to other positions; None if it can."""
        if self.latent is not None:
            return "it has latent attention"
        if self.kv_layers or any(plane.sizes for plane in self.planes):
            return "its layers share keys and values, or have heads of several sizes"
        if self.has_states:
            return "some layers have a state that runs along the sequence, so a row depends on all rows before it"
        norm = self.qk_norm
        if isinstance(norm, HeadNorm) and norm.after and (norm.weights != "none" or norm.kind == "layer"):
            return "its keys are normed after the rotation, with a weight per element"
        if self.rope is None:
            return "its position embeddings are added to the token embeddings, and affect keys and values alike"
        return None

    @property
    def unsplit(self) -> str | None:
        """Return why the model cannot be split over ranks; None if it can."""
        if isinstance(self.qk_norm, HeadNorm) and self.qk_norm.weights == "apart":
            return "a model with a tensor of norm weights for each head is not split over ranks"
        if self.has_states:
            return "a model with layers of states is not split over ranks"
        if self.sphere is not None or self.norm == "unit":
            return "a model on the unit sphere (nGPT) is not split over ranks"
        if self.latent is not None:
            return "a model with latent attention is not split over ranks"
        if any(plane.sizes for plane in self.planes):
            return "a model with heads of several sizes is not split over ranks"
        if self.kv_layers or self.layer_inputs:
            return "a model with shared KV layers or per-layer embeddings is not split over ranks"
        return None

    @property
    def resident(self) -> str | None:
        """Return why all weights must stay in memory during a pass; None if the weights can be read layer by layer."""
        if self.kv_layers or self.layer_inputs:
            return "layers read the results of earlier layers, beside the residual stream"
        return None

    @property
    def scale(self) -> float:
        """Return the factor of the query-key products in attention."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Return the rotary settings of each plane; () if the model has no rotation."""
        return tuple(rope for plane in self.planes if (rope := plane.rope or self.rope))

    @property
    def chosen_positions(self) -> str | None:
        """Return a sentence that names the set of LongRoPE factors in use; None for other models."""
        for rope in self.ropes:
            if rope.kind == "longrope":
                trained, comparison = rope.settings["original_max_position_embeddings"], "up to"
                comparison = "more than" if rope.settings["is_long"] else comparison
                words = f"positions use LongRoPE's factors for {comparison} {trained:,} tokens"
                return f"{words}, because context_length is {self.max_positions:,}"
        return None

    def row_order(self, name: str) -> tuple[int, ...] | None:
        """Return the `head_order` of the rows of a tensor; None if they need no reordering.

        Args:
            name: the tensor's name in prefold, such as "layers.0.self_attn.q_proj.weight".
        """
        if self.latent is None:
            return self.head_order if re.search(r"\.[qk]_(proj|norm)\.", name) else None
        module = name.split(".")[-2]
        tail = head_order(self.latent.tail, self.latent.tail, self.names.interleaved)
        before = {"q_proj": self.latent.dim, "q_b_proj": self.latent.dim, "kv_a_proj_with_mqa": self.latent.rank}
        if tail is None or module not in before:
            return None
        first = before[module]
        return (*range(first), *(first + place for place in tail))

    @property
    def head_order(self) -> tuple[int, ...] | None:
        """Return the `head_order` of q and k in the checkpoint."""
        return head_order(self.head_dim, self.turned, self.names.interleaved, self.names.swapped)

    @property
    def turned(self) -> int:
        """Return the number of rotated elements per head, in layers that rotate."""
        return next((rope.turned(self.head_dim) for rope in self.ropes if rope.kind != "none"), self.head_dim)

    @property
    def rotated_dims(self) -> list[int]:
        """Return, per plane, the size of the part of a head that the plane's rotary settings cover."""
        return [self.rotated_dim or self.kv_sizes(number).dim for number in range(len(self.planes))]

    @property
    def q_size(self) -> int:
        """Return the number of query elements per row."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the number of key elements per row and plane (values: the same)."""
        return self.kv_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Return the number of K/V elements per row, in all planes."""
        return sum(self.kv_sizes(number).numbers for number in range(len(self.planes)))

    def fused_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the number of outputs of each tensor or module that the checkpoint fuses into one tensor of a layer.

        Args:
            names: their names in prefold, such as "layers.0.self_attn.q_proj.weight".
        """
        match = re.match(r"layers\.(\d+)\.", names[0])
        modules = [re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name) for name in names]
        layers = self.program().layers
        first = None if match is None else min(int(match[1]), self.layers - 1)
        for number in () if first is None else dict.fromkeys((first, *range(self.layers))):
            parts = (part for operation in layers[number] for weight in operation.weights for part in weight.parts)
            sizes = {re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", tensor): rows for tensor, rows in parts}
            if sizes.keys() >= {*modules}:
                return [sizes[module] for module in modules]
        raise UnsupportedModelError(f"the checkpoint stores {', '.join(modules)} as one tensor, but no layer has them")

    def groups_of(self, stored: str, names: Names | None = None) -> int:
        """Return the number of groups in the outputs of a stored tensor or module, see `Names.grouped`.

        Args:
            names: the names of the file; None: the names of the safetensors checkpoint.
        """
        size = (names or self.names).grouped_by(stored)
        return 1 if size is None else int(self.sizes[size])

    @property
    def linear_flops(self) -> int:
        """Return the floating-point operations of all linears for one row, without the LM head."""
        layers = self.program().layers
        return 2 * sum(operation.row_weights for number in self.pass_layers for operation in layers[number])

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters. An LM head counts if `lm_head` is set and the head is not tied."""
        return sum(weight.size for weight in self.program().weights)
