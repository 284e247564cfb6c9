"""What a model computes, as data: a list of operations over named buffers and named weights. No NumPy, no torch.

A buffer holds a row of numbers for each row of a step. An operation names the buffers that it reads and writes, and the
weights that it needs by the names of their tensors in a checkpoint (those of Llama in transformers, without "model.").
`builders` makes programs of configs; the executors run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import prod
from typing import Generic, Literal, TypeVar

Buffer = str
Array = TypeVar("Array")
X, H, DELTA = "x", "h", "delta"  # the residual stream; what a part of a layer reads; what it gives
OUT = "out"  # the final norm


@dataclass(frozen=True, slots=True)
class Weight:
    """A Weight is made of tensors of the checkpoint, one below the other.

    parts   the name of each tensor, and how many rows it has
    inputs  the other dimensions of a row; (): a row is a number
    offset  what is added to the checkpoint's numbers
    wide    whether it is float32 at least, whatever the model's dtype is
    """

    parts: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...] = ()
    offset: float = 0.0
    wide: bool = False

    @property
    def rows(self) -> int:
        """Return the rows of all tensors."""
        return sum(rows for _, rows in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        return (self.rows, *self.inputs)

    @property
    def size(self) -> int:
        """Return how many numbers there are."""
        return prod(self.shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name."""
        return {name: (rows, *self.inputs) for name, rows in self.parts}


NormKind = Literal["rms", "layer", "unit"]


def plain_norm(kind: NormKind, size: int, eps: float) -> tuple[float, float]:
    """Return the factor and the epsilon with which a norm is an RMS norm, or a LayerNorm: x / sqrt(sum x^2 + eps) is
    n^-0.5 times x / sqrt(mean x^2 + eps / n)."""
    return (size**-0.5, eps / size) if kind == "unit" else (1.0, eps)


class Operation:
    """An Operation reads and writes rows of buffers. Each kind is a frozen dataclass; an extension may have its own."""

    __slots__ = ()

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        """Return the buffer that it fills, and the numbers of a row there; None: it changes rows in place."""
        return None

    @property
    def buffers(self) -> list[Buffer]:
        """Return the buffers that it reads or writes."""
        names = (getattr(self, name, None) for name in ("source", "beside", "by", "out"))
        return [name for name in names if name is not None]

    @property
    def named_weights(self) -> list[tuple[str, Weight]]:
        """Return the weights that it needs, each with the name of its field. Those of a tuple have a number each, as
        "name.0"."""
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
        """Return the weights that it needs."""
        return [weight for _, weight in self.named_weights]

    @property
    def row_weights(self) -> int:
        """Return how many weights of matrices a row meets in it."""
        return 0


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """out = scale * the rows of `table` that the tokens name, plus the rows of `positions`. Position 0 has the row
    `first`. Tokens behind the last row of a table beside the model's have its first row."""

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
    """out = the norm of `source`, times the weight, plus the bias: of `size` numbers from `at` on.

    weight  None: the norm has none
    size    as many numbers as the weight has, unless it is given
    kind    "rms": by the root of the mean square (Zhang and Sennrich 2019); "layer": LayerNorm (Ba et al. 2016);
            "unit": by the root of the sum of squares, to a length of 1 (Loshchilov et al. 2024, nGPT)
    whole   how many numbers all ranks have together, over which the mean is taken; 0: this rank has all
    copies  how many ranks have each of these numbers
    """

    source: Buffer
    out: Buffer
    weight: Weight | None
    eps: float
    bias: Weight | None = None
    kind: NormKind = "rms"
    at: int = 0
    whole: int = 0
    copies: int = 1
    size: int = 0

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "size", self.weight.rows)

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        return None if self.out == self.source else (self.out, self.size)

    @property
    def plain(self) -> tuple[float, float]:
        """Return what each number is multiplied with beside the weight, and the epsilon, as of an RMS norm or a
        LayerNorm."""
        return plain_norm(self.kind, self.size, self.eps)


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """Norm heads of `source` in place, each by itself. The heads begin at `at`, `stride` numbers apart.

    weight, bias  of the numbers of one head, which all heads share, or of those of all heads; None: there is none
    kind          as of Norm; only a "layer" norm may have a bias
    """

    source: Buffer
    at: int
    heads: int
    dim: int
    stride: int
    eps: float
    weight: Weight | None = None
    bias: Weight | None = None
    kind: NormKind = "rms"

    @property
    def plain(self) -> tuple[float, float]:
        """Return the same as `Norm.plain`, of a head."""
        return plain_norm(self.kind, self.dim, self.eps)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """out = source times the weight, plus the bias.

    layer, name  how adapters know it; "": they do not
    bias         of the first outputs; None: there is none
    activation   of the result: "silu", "gelu_tanh", "gelu", "relu" or "relu2", the square of "relu"; "": none
    gated        the first half of the outputs is gate, the other one up: out = activation(gate_scale * gate) * up
    summed       each rank has some of the inputs: the result is the sum over all ranks
    """

    source: Buffer
    out: Buffer
    weight: Weight
    bias: Weight | None = None
    layer: int = -1
    name: str = ""
    activation: str = ""
    gated: bool = False
    summed: bool = False
    gate_scale: float = 1.0

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.weight.rows // (2 if self.gated else 1)

    @property
    def row_weights(self) -> int:
        return self.weight.size


@dataclass(frozen=True, slots=True)
class Experts(Operation):
    """out = the weighted sum of what the `chosen` experts with the largest scores give for a row of `source`.

    An expert is an MLP. The logits, in float32, are `by` times the router plus its bias; the scores are their softmax,
    or the sigmoid of each. The weight of a chosen expert is `scale` times its score, divided by the sum of the
    chosen experts' scores, at least `least_sum`, if `normalised`. By "sparsemixer" it is `scale` times the softmax of
    its logit among those of the experts that are not chosen yet and within `tolerance`, as of `Mixture`.

    correction     float32 [experts], added to the scores that choose, and not to the weights (DeepSeek-V3)
    corrects_logits  whether it is added to the logits instead
    groups         equal groups of experts, of which a row may choose from the best `chosen_groups`: those whose
                   `group_best` largest corrected scores have the largest sum (DeepSeek-V2, DeepSeek-V3)
    router         [experts, hidden]
    gate_up        [experts * 2 * width, inputs]: of each expert gate, then up; or [experts * width, inputs]: up
    down           [experts * inputs, width]
    gated          whether an expert is activation(gate) * up, and down; else it is activation(up), and down
    by             the buffer that the router reads; None: source
    scales         float32 [experts], further factors of the weights; None: there are none
    activation     "silu", "gelu_tanh", "clamped" (gpt-oss) or "relu2"
    summed         each rank has some columns of every expert: the result is the sum over all ranks
    """

    source: Buffer
    out: Buffer
    router: Weight
    gate_up: Weight
    down: Weight
    experts: int
    chosen: int
    normalised: bool
    activation: str
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    least_sum: float = 0.0
    tolerance: float = 0.0
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    correction: Weight | None = None
    corrects_logits: bool = False
    router_bias: Weight | None = None
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    summed: bool = False
    gated: bool = True
    by: Buffer | None = None
    scales: Weight | None = None

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.down.rows // self.experts

    @property
    def row_weights(self) -> int:
        return self.router.size + (self.gate_up.size + self.down.size) // self.experts * self.chosen


@dataclass(frozen=True, slots=True)
class Rope(Operation):
    """Rotate heads of `source` in place by the rows' positions, by the rotary settings of the layer's plane.

    The heads begin at `at`, `stride` numbers apart; the first half of their first `turned` numbers is rotated against
    the second half. With `norm` the RMS norm of each head comes first.
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
    """Multiply heads of `source` in place with 1 + rate * log(1 + floor(position / period)). The heads begin at `at`,
    `stride` numbers apart."""

    source: Buffer
    at: int
    heads: int
    dim: int
    stride: int
    rate: float
    period: int


@dataclass(frozen=True, slots=True)
class ScaleHeads(Operation):
    """Multiply heads of `source` in place with (factor * weight)^power, a number of the weight for each of theirs. The
    heads begin at `at`, `stride` numbers apart."""

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
    """out = activation(gate) * up, of `source`, which has gate and up of `width` numbers each side by side."""

    source: Buffer
    out: Buffer
    width: int
    activation: str

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.width


@dataclass(frozen=True, slots=True)
class Interpolate(Operation):
    """source += rate * (beside - source), with the rate |factor * weight| of each number (Loshchilov et al. 2024)."""

    source: Buffer
    beside: Buffer
    weight: Weight
    factor: float


@dataclass(frozen=True, slots=True)
class Xielu(Operation):
    """source = xIELU of it, in place (Huang and Schlag 2024): with p = softplus(alpha_p) and n = beta +
    softplus(alpha_n), p x^2 + beta x of x above 0, and n (exp(min(x, eps)) - 1 - x) + beta x of others.

    alpha_p, alpha_n, beta, eps  a number each
    """

    source: Buffer
    alpha_p: Weight
    alpha_n: Weight
    beta: Weight
    eps: Weight


@dataclass(frozen=True, slots=True)
class Attend(Operation):
    """out = attention over the layer's plane: queries from `at` on in `source`, `stride` numbers apart; keys from
    `keys` on in `beside`, and values behind them.

    value_dim  numbers of a value; 0: as many as of a key
    is_own     whether the keys and values are this layer's, which its plane keeps; else they are those of an earlier
               layer, and of the plane of that
    sinks      of each head a score without a value in the softmax
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
    sinks: Weight | None = None
    value_dim: int = 0
    is_own: bool = True

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * (self.value_dim or self.dim)


@dataclass(frozen=True, slots=True)
class AttendLatent(Operation):
    """out = attention over the layer's plane, whose keys and values are made of latents (DeepSeek-AI 2024, MLA).

    `beside` has a latent of `rank` numbers for each row, then the `tail` last numbers of its key, which all heads
    share: this is what the plane keeps. `source` has queries of `dim` + `tail` numbers, one head behind the other.

    up  [heads * (dim + value_dim), rank]: for each head the matrix that makes a key of a latent, then the matrix that
        makes a value
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
        """Return how many numbers a latent has."""
        return self.up.inputs[0]

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.value_dim

    @property
    def row_weights(self) -> int:
        return self.up.size


@dataclass(frozen=True, slots=True)
class Gate(Operation):
    """Multiply `source` with sigmoids of `by`, with GELUs of it, or with its numbers themselves, in place.

    `source` has `groups` groups of numbers side by side. The gates of a group begin `stride` numbers after those of the
    group before it, the first ones at `at`. A group has one gate, or as many as it has numbers (`each`).

    activation  of the gates: "sigmoid"; "gelu_tanh"; "": none
    """

    source: Buffer
    by: Buffer
    groups: int
    dim: int
    at: int = 0
    stride: int = 0
    each: bool = True
    activation: Literal["sigmoid", "gelu_tanh", ""] = "sigmoid"


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """out = factor * weight * source.

    weight  one number, or one for each number of a row; None: there is none
    out     None: source
    """

    source: Buffer
    factor: float = 1.0
    weight: Weight | None = None
    out: Buffer | None = None

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        if self.out is None:
            return None
        assert self.weight is not None, "a copy has the width of its weight"
        return self.out, self.weight.rows


@dataclass(frozen=True, slots=True)
class Mix(Operation):
    """sources[i] += the sum over j of c[i, j] * others[j], in place: rows of one width, as they were before.

    c = offset + weight tanh(by), with a row of numbers for each pair of i and j (AltUp, Baykal et al. 2023).

    sources, others  at most 8 each
    weight           float32 [len(sources) * len(others), width of `by`]
    """

    sources: tuple[Buffer, ...]
    others: tuple[Buffer, ...]
    by: Buffer
    weight: Weight
    offset: float = 0.0

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.sources, *self.others, self.by]


@dataclass(frozen=True, slots=True)
class Match(Operation):
    """source *= the root of the mean square of `beside`, divided by that of `source`, in place.

    least  of the mean square of `source`
    """

    source: Buffer
    beside: Buffer
    least: float


@dataclass(frozen=True, slots=True)
class SparseGate(Operation):
    """out = activation(max(gate - cut, 0)) * up, of `source`, which has gates, then up, side by side.

    The cut of a row is the mean of its gates plus `deviations` of their standard deviations.
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
    """out = `source`, with `low` in place of smaller numbers and `high` in place of larger ones: `size` numbers of out,
    from `at` on.

    low, high  a number each
    is_part    whether `out` has more numbers, which stay as they are
    """

    source: Buffer
    out: Buffer
    low: Weight
    high: Weight
    size: int
    at: int = 0
    is_part: bool = False

    @property
    def fills(self) -> tuple[Buffer, int] | None:
        return None if self.is_part or self.out == self.source else (self.out, self.size)


@dataclass(frozen=True, slots=True)
class ShortConv(Operation):
    """out = c * conv(b * x) along the sequence, of `source`, which has b, c and x side by side (LFM2).

    taps    [channels, 1, taps], the last of the row itself
    picked  whether the result is wanted of the rows that are read alone
    """

    layer: int
    source: Buffer
    out: Buffer
    taps: Weight
    bias: Weight | None = None
    picked: bool = False

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.taps.rows


@dataclass(frozen=True, slots=True)
class GatedDelta(Operation):
    """out = a gated delta net along the sequence (Yang et al. 2024), of `source`, which has q, k and v of its heads, z,
    b and a side by side. taps, picked: as of ShortConv.

    tiled       head h has the key head h % key_heads; otherwise neighbouring heads share a key head
    beta_scale  of the sigmoids of b; above 1 a state may have negative eigenvalues (Grazzi et al. 2024)
    """

    layer: int
    source: Buffer
    out: Buffer
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: Weight
    dt_bias: Weight
    a_log: Weight
    norm: Weight
    eps: float
    tiled: bool = False
    picked: bool = False
    beta_scale: float = 1.0

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2(Operation):
    """out = a Mamba-2 along the sequence (Dao and Gu 2024), of `source`, which has a gate, then x, b and c, and a time
    step for each head side by side.

    groups      of heads that share b and c; limits: of the time steps. taps, picked: as of ShortConv
    norm        of the result times silu(gate), a norm for each group; None: there is none
    norm_first  the norm is of the result, before it is multiplied with silu(gate)
    scales      what the gate, x, b, c and the time steps are multiplied with
    """

    layer: int
    source: Buffer
    out: Buffer
    heads: int
    groups: int
    dim: int
    state: int
    limits: tuple[float, float]
    taps: Weight
    conv_bias: Weight | None
    dt_bias: Weight
    a_log: Weight
    d: Weight
    norm: Weight | None
    eps: float
    picked: bool = False
    norm_first: bool = False
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def section_scales(self) -> list[tuple[float, int]]:
        """Return the factors of the channels of the convolution, those of x, b and c, each with how many these are."""
        keys = self.groups * self.state
        return list(zip(self.scales[1:4], (self.heads * self.dim, keys, keys), strict=True))

    @property
    def fills(self) -> tuple[Buffer, int]:
        return self.out, self.heads * self.dim


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """source += scale * beside

    summed  each rank has a part of both: the result is the sum over all ranks
    """

    source: Buffer
    beside: Buffer
    scale: float = 1.0
    summed: bool = False


@dataclass(frozen=True, slots=True)
class Pick(Operation):
    """Keep of these buffers the rows that are read alone, and compute no others from here on: in the last visit of a
    pass."""

    sources: tuple[Buffer, ...]

    @property
    def buffers(self) -> list[Buffer]:
        return list(self.sources)


@dataclass(frozen=True, slots=True)
class Program:
    """A Program is a model's forward pass.

    widths  the numbers of a row in each buffer
    embed   what a pass begins with; it writes into X
    layers  the operations of each layer. They read X, the residual stream, and add to it
    end     what comes after the last layer; it writes into OUT
    begin   what comes between the embedding and the first layer
    kept    buffers beside X that a layer reads and an earlier one, or `begin`, has filled
    head    the LM head, [vocabulary, hidden], which may be the embedding; None: there is none
    head_bias  what is added to its products, [vocabulary], on every rank; None: nothing is
    head_scale, head_factor  its products are first multiplied with factor times scale, [vocabulary]; None: they are not
    score   the linears of the classification head, in float32, with ReLU in between
    beside  weights that a feature's own code reads
    """

    widths: dict[Buffer, int]
    embed: Embed
    layers: tuple[tuple[Operation, ...], ...]
    end: tuple[Operation, ...]
    head: Weight | None = None
    score: tuple[Linear, ...] = ()
    beside: tuple[Weight, ...] = field(default=())
    begin: tuple[Operation, ...] = ()
    kept: tuple[Buffer, ...] = ()
    head_bias: Weight | None = None
    head_scale: Weight | None = None
    head_factor: float = 1.0

    @property
    def operations(self) -> Iterator[Operation]:
        """Yield all operations, in the order of a pass through each layer once."""
        yield self.embed
        yield from self.begin
        for layer in self.layers:
            yield from layer
        yield from self.end

    @property
    def weights(self) -> list[Weight]:
        """Return each weight once, in the order in which the operations name them."""
        found = dict.fromkeys(weight for operation in self.operations for weight in operation.weights)
        if self.head is not None:
            found[self.head] = None
        found |= dict.fromkeys(self.head_vectors)
        found |= dict.fromkeys(self.score_weights)
        return list(found | dict.fromkeys(self.beside))

    @property
    def tables(self) -> list[Weight]:
        """Return the embeddings and the LM head, each once: their rows are read by token, or multiplied last."""
        embeds = [self.embed, *(operation for operation in self.begin if isinstance(operation, Embed))]
        return list(dict.fromkeys([*(one.table for one in embeds), *([] if self.head is None else [self.head])]))

    @property
    def head_vectors(self) -> list[Weight]:
        """Return the weights of the LM head that have a number for each token."""
        return [weight for weight in (self.head_bias, self.head_scale) if weight is not None]

    @property
    def score_weights(self) -> list[Weight]:
        """Return the weights of the classification head."""
        return [weight for linear in self.score for weight in linear.weights]

    def linears(self, layer: int) -> list[Linear]:
        """Return the linears of a layer that every row goes through; adapters may add to them."""
        return [operation for operation in self.layers[layer] if isinstance(operation, Linear) and operation.name]


@dataclass(frozen=True, slots=True)
class MediaRows(Generic[Array]):
    """MediaRows are rows of a step that begin with other numbers than an embedding.

    at      int64 [n]: which rows of the step they are. Their tokens may be any ids of the vocabulary
    values  [n, hidden], which stand in place of their embeddings
    """

    at: Array
    values: Array


# By the type of an operation that features and extensions compute with tensors: see `add_operation`.
ADDED: dict[type[Operation], object] = {}


def add_operation(kind: type[Operation], function: object) -> None:
    """Let models have an operation: `function` computes it with tensors, for training, on GPUs, and wherever no kernel
    does.

    kind      the class of the operation, a frozen dataclass
    function  takes the operation, the module that has its weights, and the rows (`Rows` of
              `prefold.worker.torch.operations`), of which it reads and fills buffers. A field of the operation that is
              a Weight, or a tuple of these, is an attribute of the module. Or an `Execution` of that module; or the
              name of either of them, as "module:name", which is imported with the first model that has the operation
    """
    ADDED[kind] = function
