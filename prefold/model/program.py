"""A model's forward pass as data: a list of operations over named buffers and named weights. No NumPy, no torch.

A buffer holds one vector for each row of a step. An operation names the buffers that it reads and writes. It names its
weights by tensor names of a checkpoint: the names of transformers' Llama, without "model.". `builders` turns a config
into a program, and the executors run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import prod
from typing import Generic, Literal, TypeVar

Buffer = str
Array = TypeVar("Array")
X, H, DELTA = "x", "h", "delta"  # the residual stream; the input of a sublayer; its result
OUT = "out"  # the result of the final norm


@dataclass(frozen=True, slots=True)
class Weight:
    """One or more tensors of the checkpoint, stacked along their rows."""

    parts: tuple[tuple[str, int], ...]  # the name and the number of rows of each tensor
    inputs: tuple[int, ...] = ()  # the other dimensions; (): a row is one element
    offset: float = 0.0  # added to the checkpoint's values
    wide: bool = False  # at least float32, whatever the model's dtype

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.inputs)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by name."""
        return {name: (rows, *self.inputs) for name, rows in self.parts}


NormKind = Literal["rms", "layer", "unit"]


def plain_norm(kind: NormKind, size: int, eps: float) -> tuple[float, float]:
    """Return (factor, eps) that express a norm as an RMSNorm or a LayerNorm.

    x / sqrt(sum x^2 + eps) equals n^-0.5 * x / sqrt(mean x^2 + eps / n).
    """
    return (size**-0.5, eps / size) if kind == "unit" else (1.0, eps)


class Operation:
    """Base class of operations, which read and write rows of buffers.

    Subclasses are frozen dataclasses. A plugin may add more.
    """

    __slots__ = ()

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        """Return the buffer that the operation fills, and its width; None if it changes rows in place."""
        return None

    @property
    def buffers(self) -> list[Buffer]:
        """Return the buffers that the operation reads or writes."""
        names = (getattr(self, name, None) for name in ("source", "beside", "by", "out"))
        return [name for name in names if name is not None]

    @property
    def named_weights(self) -> list[tuple[str, Weight]]:
        """Return the weights with their field names. Weights in a tuple are numbered: "name.0"."""
        found = list[tuple[str, Weight]]()
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if isinstance(value, Weight):
                found.append((entry.name, value))
            elif isinstance(value, tuple):
                every = enumerate(value)
                found += [(f"{entry.name}.{number}", one) for number, one in every if isinstance(one, Weight)]
        return found

    @property
    def weights(self) -> list[Weight]:
        return [weight for _, weight in self.named_weights]

    @property
    def row_weights(self) -> int:
        """Return the number of matrix elements that one row is multiplied with."""
        return 0


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """out = scale * table[token] + positions[position + first].

    A table other than the model's own may have fewer rows than the vocabulary. Token ids beyond it use row 0.
    """

    out: Buffer
    table: Weight
    positions: Weight | None = None
    scale: float = 1.0
    first: int = 0

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.table.inputs[0]


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """out = norm(source[at : at + size]) * weight + bias."""

    source: Buffer
    out: Buffer
    weight: Weight | None
    eps: float
    bias: Weight | None = None
    # "rms": RMSNorm (Zhang and Sennrich 2019); "layer": LayerNorm (Ba et al. 2016); "unit": to length 1, by the root of
    # the sum of squares (Loshchilov et al. 2024, nGPT).
    kind: NormKind = "rms"
    at: int = 0
    whole: int = 0  # number of elements on all ranks, for the mean; 0: this rank has all
    copies: int = 1  # ranks that hold each of these elements
    size: int = 0  # set to the size of `weight` if there is a weight

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "size", self.weight.rows)

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        return None if self.out == self.source else (self.out, self.size)

    @property
    def plain(self) -> tuple[float, float]:
        """Return the (factor, eps) of the equivalent RMSNorm or LayerNorm."""
        return plain_norm(self.kind, self.size, self.eps)


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """Norm each head of `source` in place. Heads start at `at`, `stride` elements apart."""

    source: Buffer
    at: int
    heads: int
    dim: int
    stride: int
    eps: float
    weight: Weight | None = None  # [dim], shared by all heads, or [heads * dim]
    bias: Weight | None = None  # the same shapes; only for kind "layer"
    kind: NormKind = "rms"  # see `Norm`

    @property
    def plain(self) -> tuple[float, float]:
        """Return the (factor, eps) of the equivalent RMSNorm or LayerNorm of a head."""
        return plain_norm(self.kind, self.dim, self.eps)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """out = source @ weight.T + bias."""

    source: Buffer
    out: Buffer
    weight: Weight
    bias: Weight | None = None  # may be shorter than the outputs; then the last outputs have no bias
    layer: int = -1
    name: str = ""  # the linear's name in `layer`, for adapters; "": adapters cannot change it
    # Applied to the result: "silu", "gelu_tanh", "gelu", "relu", "relu2" (relu squared), or "": nothing.
    activation: str = ""
    # The first half of the outputs is gate, the second half up: out = activation(gate_scale * gate) * up.
    gated: bool = False
    summed: bool = False  # each rank has some of the inputs: sum the result over all ranks
    gate_scale: float = 1.0

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.weight.rows // (2 if self.gated else 1)

    @property
    def row_weights(self) -> int:
        return self.weight.size


@dataclass(frozen=True, slots=True)
class Experts(Operation):
    """out = the weighted sum of the results of the `chosen` experts with the largest scores, per row of `source`.

    An expert is an MLP. The logits (float32) are the router's product with `by`, plus its bias. The scores are the
    softmax of the logits, or the sigmoid of each. An expert's weight is `scale` times its score. If `normalised`, it is
    divided by the sum of the chosen experts' scores, which counts as at least `least_sum`.

    With "sparsemixer", an expert's weight is `scale` times a softmax of its logit. This softmax covers the experts that
    are not chosen yet and are within `tolerance`, see `Mixture`.
    """

    source: Buffer
    out: Buffer
    router: Weight  # [experts, hidden]
    gate_up: (
        Weight  # [experts * 2 * width, inputs]: gate, then up, per expert; if not `gated` [experts * width, inputs]
    )
    down: Weight  # [experts * inputs, width]
    experts: int
    chosen: int
    normalised: bool
    activation: str  # "silu", "gelu_tanh", "clamped" (gpt-oss) or "relu2"
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    least_sum: float = 0.0
    tolerance: float = 0.0
    scale: float = 1.0
    # A row chooses from the best `chosen_groups` of `groups` equal groups only (DeepSeek-V2, DeepSeek-V3). A group is
    # rated by the sum of its `group_best` largest corrected scores.
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    correction: Weight | None = None  # float32 [experts], added to scores for the choice only (DeepSeek-V3)
    corrects_logits: bool = False  # add `correction` to the logits instead
    router_bias: Weight | None = None
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    summed: bool = False  # each rank has some columns of every expert: sum the result over all ranks
    gated: bool = True  # an expert is down(activation(gate) * up); if not: down(activation(up))
    by: Buffer | None = None  # input of the router; None: source
    scales: Weight | None = None  # float32 [experts], further factors of the weights

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.down.rows // self.experts

    @property
    def row_weights(self) -> int:
        return self.router.size + (self.gate_up.size + self.down.size) // self.experts * self.chosen


@dataclass(frozen=True, slots=True)
class Rope(Operation):
    """Rotate heads of `source` in place by the rows' positions, with the rotary settings of the layer's plane.

    Heads start at `at`, `stride` elements apart. In each head, the first half of the first `turned` elements is rotated
    against the second half. If `norm` is set, an RMSNorm of each head comes first.
    """

    source: Buffer
    at: int
    heads: int
    dim: int
    turned: int
    stride: int
    norm: Weight | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class ByPosition(Operation):
    """Multiply heads of `source` in place by 1 + rate * log(1 + floor(position / period)).

    Heads start at `at`, `stride` elements apart.
    """

    source: Buffer
    at: int
    heads: int
    dim: int
    stride: int
    rate: float
    period: int


@dataclass(frozen=True, slots=True)
class ScaleHeads(Operation):
    """Multiply heads of `source` in place by (factor * weight)^power, element by element.

    `weight` has heads * dim elements. Heads start at `at`, `stride` elements apart.
    """

    source: Buffer
    at: int
    heads: int
    dim: int
    stride: int
    weight: Weight
    factor: float
    power: Literal[1, 2] = 1


@dataclass(frozen=True, slots=True)
class ActivateGated(Operation):
    """out = activation(gate) * up. `source` has `width` gate elements, then `width` up elements."""

    source: Buffer
    out: Buffer
    width: int
    activation: str

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.width


@dataclass(frozen=True, slots=True)
class Interpolate(Operation):
    """source += |factor * weight| * (beside - source), element by element (Loshchilov et al. 2024, nGPT)."""

    source: Buffer
    beside: Buffer
    weight: Weight
    factor: float


@dataclass(frozen=True, slots=True)
class Xielu(Operation):
    """source = xIELU(source), in place (Huang and Schlag 2024).

    With p = softplus(alpha_p) and n = beta + softplus(alpha_n), the result is p x^2 + beta x for x > 0. Otherwise it is
    n (exp(min(x, eps)) - 1 - x) + beta x. All four parameters are scalars.
    """

    source: Buffer
    alpha_p: Weight
    alpha_n: Weight
    beta: Weight
    eps: Weight


@dataclass(frozen=True, slots=True)
class Attend(Operation):
    """out = attention over the layer's plane.

    Queries start at `at` in `source`, `stride` elements apart. Keys start at `keys` in `beside`, and values follow
    them.
    """

    source: Buffer
    at: int
    stride: int
    beside: Buffer
    keys: int
    out: Buffer
    heads: int
    kv_heads: int
    dim: int
    sinks: Weight | None = None  # per head, an extra logit in the softmax, without a value
    value_dim: int = 0  # elements per value; 0: `dim`
    is_own: bool = True  # keys and values are this layer's; if not, an earlier layer's, in that layer's plane

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * (self.value_dim or self.dim)


@dataclass(frozen=True, slots=True)
class AttendLatent(Operation):
    """out = multi-head latent attention over the layer's plane (DeepSeek-AI 2024, MLA).

    `beside` has, per row, a latent of `rank` elements, then `tail` elements: the rotated end of the key, which all
    heads share. The plane stores these. `source` has a query of `dim` + `tail` elements per head.

    `up` is [heads * (dim + value_dim), rank]: per head, the matrix that maps a latent to a key, then the matrix that
    maps it to a value.
    """

    source: Buffer
    beside: Buffer
    out: Buffer
    heads: int
    dim: int
    tail: int
    value_dim: int
    up: Weight

    @property
    def rank(self) -> int:
        """Return the number of elements in a latent."""
        return self.up.inputs[0]

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.value_dim

    @property
    def row_weights(self) -> int:
        return self.up.size


@dataclass(frozen=True, slots=True)
class Gate(Operation):
    """Multiply `source` in place by activation(by).

    `source` has `groups` groups of `dim` elements side by side. In `by`, the gates of the first group start at `at`,
    and each further group's gates start `stride` elements later.
    """

    source: Buffer
    by: Buffer
    groups: int
    dim: int
    at: int = 0
    stride: int = 0
    each: bool = True  # one gate per element; if not, one per group
    activation: Literal["sigmoid", "gelu_tanh", ""] = "sigmoid"  # "": the gates as they are


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """out = factor * weight * source."""

    source: Buffer
    factor: float = 1.0
    weight: Weight | None = None  # one element, or one per element of a row
    out: Buffer | None = None  # None: source

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        if self.out is None:
            return None
        assert self.weight is not None, "a copy has the width of its weight"
        return self.out, self.weight.rows


@dataclass(frozen=True, slots=True)
class Mix(Operation):
    """sources[i] += sum over j of c[i, j] * others[j], in place, computed from the old values of all rows.

    c = offset + weight @ tanh(by), with one element per pair (i, j) (AltUp, Baykal et al. 2023). All buffers except
    `by` have the same width.
    """

    sources: tuple[Buffer, ...]  # at most 8
    others: tuple[Buffer, ...]  # at most 8
    by: Buffer
    weight: Weight  # float32 [len(sources) * len(others), width of `by`]
    offset: float = 0.0

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.sources, *self.others, self.by]


@dataclass(frozen=True, slots=True)
class Match(Operation):
    """source *= rms(beside) / rms(source), in place. rms is the root mean square of a row."""

    source: Buffer
    beside: Buffer
    least: float  # lower bound for the mean square of `source`


@dataclass(frozen=True, slots=True)
class SparseGate(Operation):
    """out = activation(max(gate - cut, 0)) * up. `source` has the gates, then up, side by side.

    A row's cut is the mean of its gates plus `deviations` times their standard deviation.
    """

    source: Buffer
    out: Buffer
    width: int
    deviations: float
    activation: str

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.width


@dataclass(frozen=True, slots=True)
class Clamp(Operation):
    """out[at : at + size] = clamp(source, low, high)."""

    source: Buffer
    out: Buffer
    low: Weight  # one element
    high: Weight  # one element
    size: int
    at: int = 0
    is_part: bool = False  # `out` has further elements, which stay as they are

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        return None if self.is_part or self.out == self.source else (self.out, self.size)


@dataclass(frozen=True, slots=True)
class ShortConv(Operation):
    """out = c * conv(b * x) along the sequence. `source` has b, c and x side by side (LFM2)."""

    layer: int
    source: Buffer
    out: Buffer
    taps: Weight  # [channels, 1, taps]; the last tap is for the row itself
    bias: Weight | None = None
    picked: bool = False  # compute results of read rows only

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.taps.rows


@dataclass(frozen=True, slots=True)
class GatedDelta(Operation):
    """out = a gated delta net along the sequence (Yang et al. 2024).

    `source` has q, k and v of all heads, then z, b and a, side by side.
    """

    layer: int
    source: Buffer
    out: Buffer
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: Weight  # see `ShortConv`
    dt_bias: Weight
    a_log: Weight
    norm: Weight
    eps: float
    tiled: bool = False  # head h uses key head h % key_heads; if not, neighbouring heads share a key head
    picked: bool = False  # see `ShortConv`
    beta_scale: float = 1.0  # factor of sigmoid(b); above 1, states may have negative eigenvalues (Grazzi et al. 2024)

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2(Operation):
    """out = a Mamba-2 mixer along the sequence (Dao and Gu 2024).

    `source` has a gate, then x, b and c, then one time step per head, side by side.
    """

    layer: int
    source: Buffer
    out: Buffer
    heads: int
    groups: int  # heads of a group share b and c
    dim: int
    state: int
    limits: tuple[float, float]  # smallest and largest time step
    taps: Weight  # see `ShortConv`
    conv_bias: Weight | None
    dt_bias: Weight
    a_log: Weight
    d: Weight
    norm: Weight | None  # norm of result * silu(gate), per group
    eps: float
    picked: bool = False  # see `ShortConv`
    norm_first: bool = False  # norm the result before it is multiplied by silu(gate)
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # factors of gate, x, b, c, time steps

    @property
    def section_scales(self) -> list[tuple[float, int]]:
        """Return (factor, channels) of the convolution's three sections x, b and c."""
        keys = self.groups * self.state
        return list(zip(self.scales[1:4], (self.heads * self.dim, keys, keys), strict=True))

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.dim


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """source += scale * beside."""

    source: Buffer
    beside: Buffer
    scale: float = 1.0
    summed: bool = False  # each rank has a part of both: sum the result over all ranks


@dataclass(frozen=True, slots=True)
class Pick(Operation):
    """Keep only read rows in these buffers, and compute only these rows from here on.

    See `ModelConfig.reading_layer`.
    """

    sources: tuple[Buffer, ...]

    @property
    def buffers(self) -> list[Buffer]:
        return list(self.sources)


@dataclass(frozen=True, slots=True)
class Program:
    """A model's forward pass."""

    widths: dict[Buffer, int]  # elements per row of each buffer
    embed: Embed  # the first operation; fills X
    layers: tuple[tuple[Operation, ...], ...]  # each layer reads X, the residual stream, and adds to it
    end: tuple[Operation, ...]  # operations after the last layer; they fill OUT
    head: Weight | None = None  # the LM head [vocabulary, hidden], perhaps the embedding table; None: no LM head
    score: tuple[Linear, ...] = ()  # the classification head, in float32, with ReLU between its linears
    beside: tuple[Weight, ...] = field(default=())  # weights that a feature's own code reads
    begin: tuple[Operation, ...] = ()  # between the embedding and the first layer
    kept: tuple[Buffer, ...] = ()  # buffers other than X that carry values from `begin` or a layer to later layers
    head_bias: Weight | None = None  # [vocabulary], added to the logits, on every rank
    head_scale: Weight | None = None  # [vocabulary]; logits are multiplied by head_factor * head_scale before the bias
    head_factor: float = 1.0

    @property
    def operations(self) -> Iterator[Operation]:
        """Yield all operations, in the order of a pass that visits each layer once."""
        yield self.embed
        yield from self.begin
        for layer in self.layers:
            yield from layer
        yield from self.end

    @property
    def weights(self) -> list[Weight]:
        """Return each weight once, in the order of the operations."""
        found = dict.fromkeys(weight for operation in self.operations for weight in operation.weights)
        if self.head is not None:
            found[self.head] = None
        found |= dict.fromkeys(self.head_vectors)
        found |= dict.fromkeys(self.score_weights)
        return list(found | dict.fromkeys(self.beside))

    @property
    def tables(self) -> list[Weight]:
        """Return the embedding tables and the LM head, each once. Their rows are read by token, or multiplied last."""
        embeds = [self.embed, *(operation for operation in self.begin if isinstance(operation, Embed))]
        return list(dict.fromkeys([*(one.table for one in embeds), *([] if self.head is None else [self.head])]))

    @property
    def head_vectors(self) -> list[Weight]:
        """Return the weights of the LM head with one element per token."""
        return [weight for weight in (self.head_bias, self.head_scale) if weight is not None]

    @property
    def score_weights(self) -> list[Weight]:
        return [weight for linear in self.score for weight in linear.weights]

    def linears(self, layer: int) -> list[Linear]:
        """Return the linears of a layer that LoRA adapters can change."""
        return [operation for operation in self.layers[layer] if isinstance(operation, Linear) and operation.name]


@dataclass(frozen=True, slots=True)
class MediaRows(Generic[Array]):
    """Rows of a step that start from given vectors instead of token embeddings."""

    at: Array  # int64 [n]: the rows in the step. Their tokens may be any ids of the vocabulary
    values: Array  # [n, hidden], used instead of their embeddings


# Functions of operations that features and plugins add, see `add_operation`.
ADDED: dict[type[Operation], object] = {}


def add_operation(kind: type[Operation], function: object) -> None:
    """Register the function that computes an operation with PyTorch tensors.

    It is used for training, on GPUs, and on a CPU if no kernel has the operation.

    Args:
        kind: the class of the operation, a frozen dataclass.
        function: takes the operation, the module with its weights, and the `prefold.worker.torch.operations.Rows`,
            whose buffers it reads and fills. A field of the operation that is a Weight, or a tuple of Weights, is an
            attribute of that module. Alternatively, an `Execution` of that module; or the name of either,
            "module:name", which is imported with the first model that has the operation.
    """
    ADDED[kind] = function
