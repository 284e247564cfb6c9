"""What a model is, as data: sizes, options, positions, planes. No torch."""

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
    """A RopeConfig says how q and k are rotated by position.

    kind      "default", "linear", "llama3", "yarn", "longrope", "proportional" or "factors"; "none": layers of this
              kind turn nothing
    theta     the base of the frequencies
    settings  those of the kind
    share     how much of each head is turned: its first numbers
    """

    kind: str = "default"
    theta: float = 10000.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0

    def turned(self, head_dim: int) -> int:
        """Returns how many numbers of each head are turned."""
        return int(head_dim * self.share)


STILL = RopeConfig("none")
ATTENTION = "attention"  # the mixer that has keys and values


def head_order(head_dim: int, turned: int, interleaved: bool, swapped: bool = False) -> tuple[int, ...] | None:
    """Returns the place in a checkpoint's head of each number of a head of q or k here; None: the places are the same.

    Here the first half of a head is turned against the second one, and the numbers that are not turned are those of a
    frequency of 0. A checkpoint has the `turned` numbers first, one half behind the other, or number by number in turn
    (interleaved). swapped: the halves of a head, which is turned as a whole, change their places. The scores of
    attention do not depend on the order of a head's numbers.
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
    """The sizes of a row's keys and values in a plane.

    heads      KV heads
    dim        numbers of a key, and of a query head
    value_dim  numbers of a value
    in_keys    whether a value is the first numbers of its key, which then are kept once
    """

    heads: int
    dim: int
    value_dim: int
    in_keys: bool = False

    @property
    def numbers(self) -> int:
        """Return how many numbers of a row are kept."""
        return self.heads * (self.dim if self.in_keys else self.dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Plane:
    """A Plane is one KV layer: a layer, or one visit's layer where layers are visited several times.

    window  the sliding window: a key is visible while position(query) - position(key) < window; None: always
    rope    the rotary settings of this layer; None: the model's
    sizes   of its keys and values; None: kv_heads heads of head_dim. Planes with one window have one size
    tied    values are what the linear of keys gives
    """

    window: int | None = None
    rope: RopeConfig | None = None
    sizes: KVSizes | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A HeadNorm is a norm over each query head and each key head, where it is not an RMS norm before the rotation.

    kind    "rms", "layer": LayerNorm, or "unit": to a length of 1
    weights  "shared" by all heads; "each": every head has its own, in one tensor; "apart": each in a tensor of its own;
             "none"
    biased   whether a LayerNorm has biases
    after    whether heads are rotated first
    """

    kind: Literal["rms", "layer", "unit"] = "rms"
    weights: Literal["shared", "each", "apart", "none"] = "shared"
    biased: bool = False
    after: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: MLPs of a layer, of which each row goes through some.

    count        experts of a layer
    chosen       experts that a row goes through: those with the largest scores
    width        of an expert
    score        what the router's logits become: "softmax" over all experts, or "sigmoid" of each; or "sparsemixer":
                 each choice has a softmax of its own (Phi 3.5 MoE, arXiv 2409.12136)
    normalised   whether the weights of the chosen experts are divided by their sum
    least_sum    what the weights are divided by if their sum is smaller
    tolerance    of "sparsemixer". The softmax of a choice leaves out the experts that were chosen before, and those
                 whose logit x is far from the largest one, t: (t - x) / max(|x|, t) is more than this
    scale        factor of the weights
    corrected    whether the router has a number for each expert that is added to its score when experts are chosen, and
                 not to its weight; "logits": it is added to the logit
    groups       equal groups of experts; a row goes through experts of the best `chosen_groups` alone. The best group
                 has the largest sum of its `group_best` largest scores
    chosen_groups
    group_best
    shared       width of an MLP beside the experts that every row goes through; 0: there is none
    shared_gate  whether its result is multiplied with the sigmoid of a linear with one output
    shared_scale  factor of its result
    biases       whether the router and the experts have biases
    clamped      whether an expert is that of gpt-oss: of gates g, at most 7, and of up u, within 7, it computes
                 g * sigmoid(1.702 g) * (1 + u)
    gated        whether an expert, and the MLP beside the experts, has a gate: activation(gate) * up; else it is
                 activation(up)
    latent       experts read and give so many numbers, between two linears that all experts of a layer share; 0: they
                 read and give what the MLP does
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
            raise UnsupportedModelError(f"each row goes through {self.chosen} experts of {self.count}")
        if self.count % self.groups or not 0 < self.chosen_groups <= self.groups:
            raise UnsupportedModelError(
                f"{self.count} experts in {self.groups} groups, of which a row goes through {self.chosen_groups}"
            )
        if self.chosen > self.count // self.groups * self.chosen_groups:
            raise UnsupportedModelError(
                f"each row goes through {self.chosen} experts, and {self.chosen_groups} groups have "
                f"{self.count // self.groups * self.chosen_groups}"
            )
        if self.score == "sparsemixer" and (self.corrected or self.groups > 1):
            raise UnsupportedModelError("sparsemixer goes neither with corrected scores nor with groups of experts")


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of attention whose keys and values are made of latents (MLA).

    rank        numbers of a latent
    query_rank  numbers of what queries are made of; 0: of the residual stream itself
    dim         numbers of a key without its tail
    tail        the last numbers of a key, which are rotated and which all heads share
    value_dim   numbers of a value
    """

    rank: int
    query_rank: int
    dim: int
    tail: int
    value_dim: int

    @property
    def kept(self) -> KVSizes:
        """Return the sizes of what a plane keeps of a row."""
        return KVSizes(1, self.rank + self.tail, self.rank, in_keys=True)


@dataclass(frozen=True, slots=True)
class Sphere:
    """The factors of what models on the unit sphere learn (Loshchilov et al. 2024, nGPT): of each vector of the
    checkpoint, what its numbers are multiplied with.

    The residual stream is normed in place before each part of a layer, and then moves towards what the part gives.

    queries  of `sqk`, whose squares multiply queries after their rotation
    gates    of `s_gate`, whose squares multiply the gates of attention before the sigmoid
    inside   of `suv_gate` and `suv_up`, which multiply gate and up of an MLP
    rates    of `lambda_1` and `lambda_2`, which say how far the stream moves towards attention's and the MLP's result
    logits   of `logit_scale`, which multiplies the products of the LM head
    """

    queries: float
    gates: float
    inside: float
    rates: float
    logits: float


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one of the arrays that a layer's state consists of.

    shape    of one state
    is_wide  whether it is float32 whatever the model's dtype is
    """

    shape: tuple[int, ...]
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A ModelConfig describes a decoder, whose layers norm what they read of the residual stream.

    Models that are more than that have configs of subclasses, which override what differs.

    model          the module and the class of the model that is built
    layer_builder  the module and the function that makes the operations of a layer, of a `builders.LayerBuilder`
    loading        the module whose `load_model` and `load_adapter` load it; empty: those of `prefold.model`
    layers         layers with weights of their own

    rope           rotary settings; None: nothing is rotated, and each of max_positions has an embedding
    norm           of the residual stream: RMS norm, LayerNorm, or the norm to a length of 1 ("unit")
    sphere         the factors of a model on the unit sphere (nGPT); None: the results of parts are added
    norm_bias      whether a LayerNorm has a bias
    mlp            the kind of MLP, of all layers or one for each: "gated", activation(gate) * up; "plain",
                   activation(up); "experts", the mixture; "none"; or one that was added with `add_mlp`
    experts        the mixture of the layers whose MLP is one
    mixers         of each layer, what mixes rows along the sequence: "attention", the name of a mixer with a state
                   (`builders.add_mixer`), both with "+" between, whose results are added, or "none"; (): all layers
                   have attention
    part_scales    factors of the results of mixers, and of MLPs ("mlp"), by their names, beside residual_scale
    sizes          the numbers that the mixers with states need, by names of theirs
    qkv_bias, o_bias, mlp_bias   biases of those linears; qk_bias: of q and k, and not of v
    qk_norm        an RMS norm over head_dim on every query and key head, before the rotation; or another HeadNorm
    row_qk_norm    an RMS norm over all query heads of a row, and another over its key heads, before the rotation
    in_norms       norms on what attention and the MLP read: in all layers, or in those for which there is True
    out_norms      norms on what attention and the MLP give, before it is added to the residual stream; likewise
    inner_norms    RMS norms on what attention and the MLP give before their last linears
    embedding_norm a norm on the residual stream before the first layer
    value_norm     an RMS norm without a weight over head_dim on every value head
    norm_weight    whether norms have weights
    sum_norms      RMS norms on the residual stream after each of these is added, which then is what the norm gives
    norm_offset    what is added to the norm weights of the checkpoint (1: they are stored less one)
    parallel       the MLP reads what attention reads, and both results are added to the residual stream together
    mlp_norm       in a parallel layer the MLP has a norm of its own
    mlp_widths     of each layer the width of its MLP; (): intermediate
    layer_inputs   each layer adds what it makes of so many numbers, which tokens have for it in an embedding beside
                   the first one; 0: it does not
    layer_vocab    rows of that embedding: tokens behind the last one have row 0; 0: vocab_size
    layer_scales   after each layer the residual stream is multiplied with a number of the layer
    activation     of the MLP: one of Linear, or "xielu" of an MLP without a gate
    gate_scale     what the gates of a gated MLP are multiplied with before the activation; not those of experts
    gated          what attention gives is multiplied with the sigmoid of a gate, which is computed beside q
    head_gates     what a head of attention gives is multiplied with the sigmoid of a gate, which is computed beside q;
                   "each": each of its numbers has a gate
    rotated_dim    how many numbers of each head are rotated, its first ones; None: all
    first_position the row of the learned embedding that position 0 has
    query_growth   (rate, period): queries are multiplied with 1 + rate * log(1 + floor(position / period)); None: not
    embedding_scale   what the embedding is multiplied with, rounded to the model's dtype
    residual_scale    what the results of attention and of the MLP are multiplied with
    query_scalar   attention multiplies q k with its inverse root; None: head_dim
    sinks          attention has, of each head, a number beside the scores in the softmax, which has no value
    attention_cap  scores s of attention become cap * tanh(s / cap); None: they stay
    logit_scale    what logits are multiplied with
    logit_cap      logits become cap * tanh(logit / cap) after that; None: they stay
    lm_head_bias   whether something is added to the products of the LM head
    lm_head        whether there may be logits at all (a bare encoder or a classifier has none)
    num_labels     rows of the classification head; None: no such head
    head_bias      whether a head of one linear has a bias
    head_layers    1: one linear. 2: linear, ReLU, linear, with biases (reward models)
    labels         names of the head's rows, in order; empty when the checkpoint names none
    pad_id         the padding token, whose rows at the end of a text a classification head does not read; None: the
                   head reads the last row
    planes         one for each layer with keys and values that a pass goes through, in its order
    latent         attention is over latents of these sizes; None: over keys and values
    kv_layers      of each layer the layer whose keys and values its attention reads: its own, or those of an earlier
                   layer; (): each reads its own
    names          what tensors and modules are called in checkpoints, and which of them are stored as one
    dtype          the dtype the checkpoint was saved in ("bfloat16", ...), when it says so
    kv_dtype       the dtype of keys and values in a KV store; None: that of rows
    invariant      whether the result of a row is the same, bit for bit, whatever other rows a step has
    whole          the config of the whole model, where this one has the sizes of a rank's part
    """

    model: ClassVar[str] = "prefold.worker.torch.model:CausalLM"
    loading: ClassVar[str] = ""
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
        """Returns what reads the images of items (`ImageInputs`); None: the model takes text alone.

        table    gives the rows of images their ids; None: one of its own
        options  of `features.images.reading.reader_of`: how images are read
        """
        return None

    def check_exits(self, exits: Exits) -> None:
        """Raises InputError for exits that rows of this model cannot have, whatever runs it."""
        refuse_exits(exits)

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"{name} is {value!r}; it must be a positive integer")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        if self.rope is not None and self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        for rope, dim in zip(self.ropes, self.rotated_dims, strict=False):
            factors, turned = rope.settings.get("factors"), rope.turned(dim)
            if factors is not None and len(factors) != turned // 2:
                raise UnsupportedModelError(f"{len(factors)} rotary factors for {turned} rotated numbers of a head")
            if turned % 2 or not 0 < turned <= dim:
                raise UnsupportedModelError(
                    f"{rope.share} of heads of {dim} is rotated; it must be a part with an even size"
                )
        if len({rope.share for rope in self.ropes if rope.kind != "none"}) > 1:
            raise UnsupportedModelError("the rotated part of a head must be of one size in all layers")
        whole_blocks = (self.sum_norms, self.parallel, self.row_qk_norm, self.residual_scale != 1)
        layers = range(self.layers)
        for name in ("mixers", "mlp", "in_norms", "out_norms", "mlp_widths"):
            every = getattr(self, name)
            if every and isinstance(every, tuple) and len(every) != self.layers:
                raise UnsupportedModelError(f"{len(every)} {name} for {self.layers} layers")
        if sum(whole_blocks) > 1 or (any(map(self.out_norms_of, layers)) and any(whole_blocks[:2])):
            raise UnsupportedModelError(
                "sum_norms, parallel, row_qk_norm and residual_scale do not go together, the first two not with "
                "out_norms either"
            )
        scales = {self.residual_scale, self.gate_scale, *self.part_scales.values()}
        if self.sphere is not None and (self.parallel or self.experts or self.latent or scales != {1}):
            raise UnsupportedModelError(
                "models on the unit sphere have no parallel layers, experts, latents or factors of their parts' results"
            )
        if self.names.swapped and self.turned != self.head_dim:
            raise UnsupportedModelError("heads that are rotated the other way round must be rotated as a whole")
        if self.activation == "xielu" and {self.mlp_of(number) for number in range(self.layers)} - {"plain", "none"}:
            raise UnsupportedModelError("xielu is an activation of MLPs without a gate")
        for name, every in (("mixers", self.mixers), ("mlp", () if isinstance(self.mlp, str) else self.mlp)):
            if every and len(every) != self.layers:
                raise UnsupportedModelError(f"{len(every)} {name} for {self.layers} layers")
        by_window = {plane.window: plane.sizes for plane in self.planes}
        if any(by_window[plane.window] != plane.sizes for plane in self.planes):
            raise UnsupportedModelError("layers with one sliding window have keys of different sizes")
        if uneven := next((of.heads for of in map(self.kv_sizes, range(len(self.planes))) if self.heads % of.heads), 0):
            raise UnsupportedModelError(f"{self.heads} query heads cannot share {uneven} key heads evenly")
        if not all(self.in_norms_of(number) or self.out_norms_of(number) for number in layers):
            raise UnsupportedModelError("a layer needs norms, in_norms or out_norms")
        if any(len({*self.mixers_of(number)} - {ATTENTION}) > 1 for number in layers):
            raise UnsupportedModelError("a layer may have one mixer with a state, and attention beside it")
        if not self.visited:
            raise UnsupportedModelError("no layer has attention; a model of states alone is not supported")
        if len(self.planes) != len(self.visited):
            raise UnsupportedModelError(f"{len(self.planes)} planes for {len(self.visited)} layers of a pass")

    @property
    def visited(self) -> Sequence[int]:
        """Returns the layer that each plane is of, in the order of a pass."""
        if not self.mixers and not self.kv_layers:
            return range(self.layers)
        return [number for number in range(self.layers) if self.attends(number) and self.kv_layer(number) == number]

    @property
    def pass_layers(self) -> Sequence[int]:
        """Returns the layers that a pass goes through, in its order."""
        return range(self.layers) if self.mixers or self.kv_layers else self.visited

    def attends(self, number: int) -> bool:
        """Return whether a layer has attention."""
        return ATTENTION in self.mixers_of(number)

    def kv_layer(self, number: int) -> int:
        """Return the layer whose keys and values a layer's attention reads."""
        return self.kv_layers[number] if self.kv_layers else number

    def is_unread(self, name: str) -> bool:
        """Return whether a tensor is of keys or values of a layer that reads those of another one. Checkpoints may have
        such tensors."""
        found = re.match(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name) if self.kv_layers else None
        return found is not None and self.kv_layer(int(found[1])) != int(found[1])

    def plane_of(self, number: int) -> int:
        """Return the plane that a layer's attention reads, in a model that visits each layer once."""
        return list(self.visited).index(self.kv_layer(number))

    def kv_sizes(self, plane: int) -> KVSizes:
        """Return the sizes of the keys and values of a plane."""
        if self.latent is not None:
            return self.latent.kept
        return self.planes[plane].sizes or self.own_sizes

    @property
    def own_sizes(self) -> KVSizes:
        """Return the sizes of the keys and values of a plane that names none."""
        return KVSizes(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def group_of(self) -> dict[int | None, int]:
        """Return how many query heads share a KV head, by sliding window."""
        sizes = {plane.window: self.kv_sizes(number) for number, plane in enumerate(self.planes)}
        return {window: self.heads // of.heads for window, of in sizes.items()}

    @property
    def reading_layer(self) -> int:
        """Return the last layer of a pass that has keys, values or a state of its own. From its attention on, rows that
        are not read are left out."""
        of_rows = {*self.visited, *(number for number in range(self.layers) if self.states(number))}
        return next(number for number in reversed(self.pass_layers) if number in of_rows)

    @property
    def read_windows(self) -> set[int | None]:
        """Return the sliding windows of the layers that leave out the rows that are not read."""
        if not self.kv_layers:
            return {self.planes[-1].window}
        later = range(self.reading_layer, self.layers)
        return {self.planes[self.plane_of(number)].window for number in later if self.attends(number)}

    def mixers_of(self, number: int) -> list[str]:
        """Return what mixes the rows of a layer along the sequence; []: nothing does."""
        names = self.mixers[number] if self.mixers else ATTENTION
        return [] if names == "none" else names.split("+")

    def mlp_of(self, number: int) -> str:
        """Return the kind of a layer's MLP."""
        return self.mlp if isinstance(self.mlp, str) else self.mlp[number]

    def mlp_width(self, number: int) -> int:
        """Return the width of the inside of a layer's MLP."""
        return self.mlp_widths[number] if self.mlp_widths else self.intermediate

    def in_norms_of(self, number: int) -> bool:
        """Return whether a layer has norms on what its parts read."""
        return self.in_norms[number] if isinstance(self.in_norms, tuple) else self.in_norms

    def out_norms_of(self, number: int) -> bool:
        """Return whether a layer has norms on what its parts give."""
        return self.out_norms[number] if isinstance(self.out_norms, tuple) else self.out_norms

    @property
    def has_states(self) -> bool:
        """Return whether a layer has a state that runs along the sequence."""
        return any({*self.mixers_of(number)} - {ATTENTION} for number in range(self.layers))

    def states(self, number: int) -> tuple[StateShape, ...]:
        """Return the shapes of a layer's state; none for a layer without a state."""
        kinds: Any = named_class("prefold.model.builders:MIXERS")
        names = (name for name in self.mixers_of(number) if name != ATTENTION)
        return tuple(shape for name in names for shape in kinds[name].states(self))

    def program(self, copies: int = 1) -> Program:
        """Returns what the model computes. copies: how many ranks have each KV head"""
        program: Program = named_class("prefold.model.builders:decoder_program")(self, copies)
        return program

    @property
    def text(self) -> ModelConfig:
        """Returns the config of the model without what it has beside text: itself where it takes text alone."""
        return self

    @property
    def models_beside(self) -> Sequence[ModelConfig]:
        """Return the configs of the models that run beside this one, on the same executor."""
        return ()

    @property
    def span_rows(self) -> int:
        """Returns the most rows that see each other both ways, and are computed in one step; 0: there are none."""
        return 0

    @property
    def media_token(self) -> int:
        """Return the token that stands for a row of media where layers have embeddings of their own."""
        return (self.pad_id or 0) if self.layer_inputs else 0

    def has_spans(self, window: int | None) -> bool:
        """Return whether rows of a span see each other both ways in the layers with this sliding window, too; else they
        see there what comes before them alone."""
        return True

    @property
    def fixed(self) -> str | None:
        """Returns why rows stay at the positions they were computed at, in words; None: their K/V may be moved."""
        if self.latent is not None:
            return "its keys and values are made of latents"
        if self.kv_layers or any(plane.sizes for plane in self.planes):
            return "its layers share keys and values, or have heads of several sizes"
        if self.has_states:
            return "some of its layers have a state that runs along the sequence, so that a row depends on all before"
        norm = self.qk_norm
        if isinstance(norm, HeadNorm) and norm.after and (norm.weights != "none" or norm.kind == "layer"):
            return "keys are normed after their rotation, with a weight for each of their numbers"
        if self.rope is None:
            return "its positions are embeddings that are added to those of tokens, and are in keys and values alike"
        return None

    @property
    def unsplit(self) -> str | None:
        """Returns why the model is not split over ranks, in words; None: it may be."""
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
            return "a model whose layers read keys of other layers, or embeddings of their own, is not split over ranks"
        return None

    @property
    def resident(self) -> str | None:
        """Return why all weights stay in memory while the model runs, in words; None: a pass may read them layer by
        layer."""
        if self.kv_layers or self.layer_inputs:
            return "layers read what was computed before, beside the residual stream"
        return None

    @property
    def scale(self) -> float:
        """Returns the factor of the products of queries and keys in attention."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Returns the rotary settings of each plane; none where nothing is rotated."""
        return tuple(rope for plane in self.planes if (rope := plane.rope or self.rope))

    @property
    def chosen_positions(self) -> str | None:
        """Returns in words which rotary factors all sequences have, where the longest one that there may be chooses
        them; None: there is no choice."""
        for rope in self.ropes:
            if rope.kind == "longrope":
                trained, comparison = rope.settings["original_max_position_embeddings"], "up to"
                comparison = "more than" if rope.settings["is_long"] else comparison
                words = f"positions have LongRoPE's factors for {comparison} {trained:,} tokens"
                return f"{words}, by a context_length of {self.max_positions:,}"
        return None

    def row_order(self, name: str) -> tuple[int, ...] | None:
        """Return the order of the rows of a tensor in each of its heads, as of `head_order`; None: as they are stored.
        name: of the tensor here, such as "layers.0.self_attn.q_proj.weight"."""
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
        """Returns the `head_order` of q and k in the checkpoint's tensors."""
        return head_order(self.head_dim, self.turned, self.names.interleaved, self.names.swapped)

    @property
    def turned(self) -> int:
        """Returns how many numbers of each head are rotated, in the layers that rotate."""
        return next((rope.turned(self.head_dim) for rope in self.ropes if rope.kind != "none"), self.head_dim)

    @property
    def rotated_dims(self) -> list[int]:
        """Return how many numbers of a head the rotary settings of each plane are for."""
        return [self.rotated_dim or self.kv_sizes(number).dim for number in range(len(self.planes))]

    @property
    def q_size(self) -> int:
        """Returns how many numbers the queries of one row are."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Returns how many numbers the keys (or values) of one row are, in one plane."""
        return self.kv_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Return how many numbers of keys and values a row has, in all planes."""
        return sum(self.kv_sizes(number).numbers for number in range(len(self.planes)))

    def fused_sizes(self, names: Sequence[str]) -> list[int]:
        """Returns how many outputs each of these tensors or modules of one layer has, which are stored as one: by their
        names here, with the layer's."""
        match = re.match(r"layers\.(\d+)\.", names[0])
        modules = [re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name) for name in names]
        layers = self.program().layers
        first = None if match is None else min(int(match[1]), self.layers - 1)
        for number in () if first is None else dict.fromkeys((first, *range(self.layers))):
            parts = (part for operation in layers[number] for weight in operation.weights for part in weight.parts)
            sizes = {re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", tensor): rows for tensor, rows in parts}
            if sizes.keys() >= {*modules}:
                return [sizes[module] for module in modules]
        raise UnsupportedModelError(f"no layer has {', '.join(modules)}, which the checkpoint stores as one")

    def groups_of(self, stored: str, names: Names | None = None) -> int:
        """Return how many groups the outputs of a stored tensor or module lie in, as of `Names.grouped`. names: None:
        those of the checkpoint's folder"""
        size = (names or self.names).grouped_by(stored)
        return 1 if size is None else int(self.sizes[size])

    @property
    def linear_flops(self) -> int:
        """Returns the floating-point operations of all linears in a pass of one row, the LM head left out."""
        layers = self.program().layers
        return 2 * sum(operation.row_weights for number in self.pass_layers for operation in layers[number])

    @property
    def num_parameters(self) -> int:
        """Returns how many parameters there are. The LM head counts where `lm_head` is set and it is not tied."""
        return sum(weight.size for weight in self.program().weights)
