"""Execute each kind of operation with tensors: a function, and the module that has the weights.

`EXECUTE` has the core's operations. Features and extensions add theirs with `model.add_operation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UnsupportedModelError
from ...model.program import (  # fmt: skip
    ADDED,
    ActivateGated,
    Add,
    Attend,
    AttendLatent,
    Buffer,
    ByPosition,
    Clamp,
    Embed,
    Experts,
    Gate,
    Interpolate,
    Linear,
    Match,
    Mix,
    Norm,
    NormHeads,
    Operation,
    Pick,
    Rope,
    Scale,
    ScaleHeads,
    SparseGate,
    Weight,
    X,
    Xielu,
)
from ...spec.plugins import named_class
from . import layers
from .lora import RowAdapters
from .ops import ACTIVATIONS, Ops, wide
from .parallel import Alone


@dataclass(slots=True)
class Rows:
    """The rows of a step on their way through the operations of one layer.

    Attributes:
        buffers: [rows, width] each, by name.
        delta: A pending term of the residual stream, which the next norm adds. None: there is none.
        attend: Computes attention: q, k, v, sinks -> o, shaped like q.
        cos_sin: The rotation at the rows' positions, as in `Ops.rope`.
        read: int64, the rows whose result is read. None: all rows, or unread rows are dropped already.
        adapters: The LoRA adapter of each row.
        ops: Computes the position-wise operations.
        ranks: The ranks of the model.
        states: The states of the rows' paths, in a model with recurrent layers.
        tokens: The tokens of the rows, before the first layer.
        heads: Parts of buffers that operations have changed, by buffer and first column: the number of columns, and
            the new values, [rows, heads, dim] or [rows, columns].
        positions: int64 [rows]. None: no operation needs them.
    """

    buffers: dict[Buffer, Tensor]
    delta: Tensor | None
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None
    cos_sin: Tensor | None
    read: Tensor | None
    adapters: RowAdapters
    ops: Ops
    ranks: Alone
    states: object = None
    tokens: Tensor | None = None
    heads: dict[Buffer, dict[int, tuple[int, Tensor]]] = field(default_factory=dict)
    positions: Tensor | None = None

    def get(self, name: Buffer) -> Tensor:
        """Return a buffer with all changes applied, [rows, width]."""
        if name == X and self.delta is not None:
            self.buffers[X], self.delta = self.buffers[X] + self.delta, None
        if name in self.heads:
            x = self.buffers[name]
            for at, (columns, values) in self.heads.pop(name).items():
                heads, dim = values.shape[1:] if values.dim() == 3 else (1, values.shape[1])
                firsts = torch.arange(heads, device=x.device) * (columns // heads) + at
                places = (firsts[:, None] + torch.arange(dim, device=x.device)).flatten()
                x = x.index_copy(1, places, values.reshape(len(x), len(places)))
            self.buffers[name] = x
        return self.buffers[name]

    def put(self, name: Buffer, values: Tensor) -> None:
        """Set a buffer, [rows, width]."""
        self.buffers[name] = values
        if name in self.heads:
            del self.heads[name]
        if name == X:
            self.delta = None

    def drop(self, name: Buffer) -> None:
        """Free a buffer that no later operation reads."""
        self.buffers.pop(name, None)
        self.heads.pop(name, None)

    def change(self, name: Buffer, at: int, columns: int, values: Tensor) -> None:
        """Change some columns of a buffer without copying the buffer."""
        self.heads.setdefault(name, {})[at] = columns, values

    def heads_of(self, name: Buffer, at: int, heads: int, dim: int, stride: int) -> Tensor:
        """Return heads of a buffer with all changes, [rows, heads, dim]. They start at `at`, `stride` columns apart."""
        x = self.buffers[name]
        if name in self.heads:
            for first, (columns, values) in self.heads[name].items():
                if first <= at < first + columns:
                    x, at = values, at - first
                    break
        if x.dim() == 3:
            x = x if x.shape[1] == heads else x.narrow(1, at // stride, heads)
            return x if x.shape[2] == dim else x.narrow(2, at % stride, dim)
        columns, first = heads * stride, 0
        if x.shape[1] == columns:
            first = at  # within each head
        else:
            x = x.narrow(1, at, columns)
        x = x.view(len(x), heads, stride)
        return x if dim == stride else x.narrow(2, first, dim)

    def leave_out(self, names: Iterable[Buffer]) -> None:
        """Keep only the read rows of these buffers, and compute no other rows from here on."""
        read = self.read
        for name in names:
            self.put(name, self.get(name)[read])
        if self.cos_sin is not None:
            self.cos_sin = self.cos_sin[read]
        if self.positions is not None:
            self.positions = self.positions[read]
        self.adapters, self.read = self.adapters.read, None


@dataclass(frozen=True, slots=True)
class Place:
    """The dtype and device of a model's weights, and its ranks."""

    dtype: torch.dtype
    device: torch.device
    ranks: Alone

    def empty(self, weight: Weight) -> nn.Parameter:
        """Return an uninitialised parameter with the shape of a weight."""
        dtype = torch.promote_types(self.dtype, torch.float32) if weight.wide else self.dtype
        return nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=self.device))


class Weights(nn.Module):
    """The weights of an operation, by the names of their fields.

    A tuple of weights becomes a ParameterList. A field that is None becomes an attribute that is None.
    """

    def __init__(self, operation: Operation, place: Place):
        super().__init__()
        for entry in fields(operation):  # type: ignore[arg-type]
            if getattr(operation, entry.name) is None:
                self.register_parameter(entry.name, None)
        for name, weight in operation.named_weights:
            several, _, number = name.partition(".")
            if not number:
                self.register_parameter(name, place.empty(weight))
            else:
                if number == "0":
                    self.add_module(several, nn.ParameterList())
                getattr(self, several).append(place.empty(weight))


@dataclass(frozen=True, slots=True)
class Execution:
    """The functions that execute a kind of operation with tensors."""

    run: Callable[[Any, Any, Rows], None]  # takes an operation, the module with its weights, and the rows
    hold: Callable[[Any, Place], nn.Module] = Weights  # makes the module
    names: dict[str, str] = field(default_factory=dict)  # parameter names in the module that differ from field names


def execution_of(kind: type[Operation]) -> Execution:
    """Return how to execute a kind of operation with tensors. Raise UnsupportedModelError if no function is known."""
    found: object = EXECUTE.get(kind) or ADDED.get(kind)
    if isinstance(found, str):
        found = named_class(found)
    if found is None:
        raise UnsupportedModelError(
            f"the model has an operation {kind.__name__}, and no function computes it with tensors; register one with "
            "prefold.extend.register_operation"
        )
    return found if isinstance(found, Execution) else Execution(cast(Callable[[Any, Any, Rows], None], found))


def norm(operation: Norm, weights: layers.Norm, rows: Rows) -> None:
    """Compute the norm of a buffer or of some of its columns. A pending term of the residual stream is added first."""
    source, size = operation.source, operation.size
    if rows.buffers[source].shape[1] != size:
        part = rows.buffers[source][:, operation.at : operation.at + size]
        rows.change(source, operation.at, size, _norm_of_part(operation, weights, part, rows))
    elif rows.ranks.size > 1 and operation.whole:
        rows.put(operation.out, _norm_of_part(operation, weights, rows.get(source), rows))
    elif source == X:
        # Calling `forward` directly: calling the module costs more than a norm of few rows.
        rows.buffers[X], h = weights.forward(rows.buffers[X], rows.delta, rows.ops)
        rows.delta = None
        rows.put(operation.out, h)
    else:
        rows.put(operation.out, weights.forward(rows.buffers[source], None, rows.ops)[1])


def _norm_of_part(operation: Norm, weights: layers.Norm, x: Tensor, rows: Rows) -> Tensor:
    """Return the norm of [rows, columns] values. In a split model, each rank may have some of the columns."""
    if rows.ranks.size == 1 or not operation.whole:
        return weights(x.contiguous(), None, rows.ops)[1]
    # Columns that several ranks hold count once.
    total = rows.ranks.sum(wide(x).pow(2).sum(-1) / operation.copies)
    return (weights.weight * (wide(x) * torch.rsqrt(total[:, None] / operation.whole + operation.eps))).to(x.dtype)


def linear(operation: Linear, weights: layers.Linear, rows: Rows) -> None:
    """Compute a product, with adapters, activation or gate, and the sum over ranks."""
    x = rows.buffers[operation.source] if rows.delta is None else rows.get(operation.source)
    adapters = rows.adapters
    if not adapters.adapters or not operation.name:
        out = weights.activated(x, rows.ops) if operation.activation else weights.forward(x)
    else:
        out = adapters.add(weights.forward(x), x, operation.layer, operation.name)
        if operation.activation:
            out = weights.activate(out, rows.ops)
    rows.put(operation.out, rows.ranks.sum(out) if operation.summed else out)


def hold_linear(operation: Linear, place: Place) -> layers.Linear:
    """Return a linear. If ranks sum its results, only rank 0 has the bias."""
    weight, bias = operation.weight, operation.bias
    biased = 0 if bias is None or (operation.summed and place.ranks.rank) else bias.rows
    dtype = torch.promote_types(place.dtype, torch.float32) if weight.wide else place.dtype
    options: dict[str, Any] = {"dtype": dtype, "device": place.device}
    (inputs,) = weight.inputs
    if not operation.activation:
        return layers.Linear(inputs, weight.rows, bias=biased, **options)
    kind = layers.GatedLinear if operation.gated else layers.ActivatedLinear
    width = weight.rows // kind.parts
    options |= {"activation": operation.activation, "gate_scale": operation.gate_scale}
    return kind(inputs, width, bias=bool(biased), **options)


def rope(operation: Rope, weights: Weights, rows: Rows) -> None:
    """Norm and rotate heads."""
    x = rows.heads_of(operation.source, operation.at, operation.heads, operation.dim, operation.stride)
    assert rows.cos_sin is not None
    x = rows.ops.rope(x, rows.cos_sin, weights.weight, operation.eps)
    rows.change(operation.source, operation.at, operation.heads * operation.stride, x)


def norm_heads(operation: NormHeads, weights: Weights, rows: Rows) -> None:
    """Norm each head by itself."""
    x = rows.heads_of(operation.source, operation.at, operation.heads, operation.dim, operation.stride)
    h = wide(x)
    if operation.kind == "layer":
        h = h - h.mean(-1, keepdim=True)
    factor, eps = operation.plain
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if factor != 1:
        h = h * factor
    if weights.weight is not None:
        h = h * weights.weight.view(-1, operation.dim)
    if weights.bias is not None:
        h = h + weights.bias.view(-1, operation.dim)
    rows.change(operation.source, operation.at, operation.heads * operation.stride, h.to(x.dtype))


def by_position(operation: ByPosition, weights: Weights, rows: Rows) -> None:
    """Scale heads by a factor that grows with the row's position."""
    assert rows.positions is not None
    rows.get(operation.source)  # applies the rotation of a part of each head
    x = rows.heads_of(operation.source, operation.at, operation.heads, operation.dim, operation.stride)
    factor = 1 + operation.rate * torch.log1p((rows.positions // operation.period).float())
    x = (wide(x) * factor[:, None, None]).to(x.dtype)
    rows.change(operation.source, operation.at, operation.heads * operation.stride, x)


def scale_heads(operation: ScaleHeads, weights: Weights, rows: Rows) -> None:
    """Scale each value of the heads by a factor of its own."""
    x = rows.heads_of(operation.source, operation.at, operation.heads, operation.dim, operation.stride)
    factors = (operation.factor * weights.weight).pow(operation.power).view(-1, operation.dim)
    x = (wide(x) * factors).to(x.dtype)
    if rows.buffers[operation.source].shape[1] == operation.heads * operation.dim:
        rows.put(operation.source, x.flatten(1))
    else:
        rows.change(operation.source, operation.at, operation.heads * operation.stride, x)


def activate_gated(operation: ActivateGated, weights: Weights, rows: Rows) -> None:
    """Compute activation(gate) * up, the gate of an MLP."""
    rows.put(operation.out, rows.ops.gate(rows.get(operation.source), operation.activation))


def interpolate(operation: Interpolate, weights: Weights, rows: Rows) -> None:
    """Move a buffer towards another buffer."""
    x, rates = rows.get(operation.source), (operation.factor * weights.weight).abs()
    way = wide(rows.get(operation.beside)) - wide(x)
    rows.put(operation.source, (wide(x) + rates * way).to(x.dtype))


def xielu(operation: Xielu, weights: Weights, rows: Rows) -> None:
    """Apply xIELU to a buffer."""
    kept = rows.get(operation.source)
    x, beta = wide(kept), weights.beta
    square = F.softplus(weights.alpha_p) * x * x
    curve = (beta + F.softplus(weights.alpha_n)) * (torch.expm1(torch.minimum(x, weights.eps)) - x)
    rows.put(operation.source, (torch.where(x > 0, square, curve) + beta * x).to(kept.dtype))


def attend(operation: Attend, weights: Weights, rows: Rows) -> None:
    """Compute attention. It drops unread rows if no Pick came before in the last layer of a pass."""
    q = rows.heads_of(operation.source, operation.at, operation.heads, operation.dim, operation.stride)
    k, v = keys_values(operation, rows) if operation.is_own else (None, None)
    if rows.read is not None:
        q = q[rows.read]
        rows.leave_out(list(rows.buffers))
    assert rows.attend is not None
    rows.put(operation.out, rows.attend(q, k, v, weights.sinks).flatten(1))


def attend_latent(operation: AttendLatent, weights: Weights, rows: Rows) -> None:
    """Compute attention over latents with absorbed queries: the latents are one KV head for all query heads."""
    heads, dim, tail, rank = operation.heads, operation.dim, operation.tail, operation.rank
    of_head = dim + tail
    up = weights.up.unflatten(0, (heads, -1))  # [heads, dim + value dim, rank]
    q = rows.heads_of(operation.source, 0, heads, dim, of_head)
    q_tail = rows.heads_of(operation.source, dim, heads, tail, of_head)
    latents = rows.heads_of(operation.beside, 0, 1, rank, rank)
    keys = torch.cat((latents, rows.heads_of(operation.beside, rank, 1, tail, tail)), -1)
    absorbed = torch.cat((torch.einsum("rhd,hdc->rhc", q, up[:, :dim]), q_tail), -1)
    assert rows.attend is not None
    attended = rows.attend(absorbed, keys, keys[..., :rank], None)
    rows.put(operation.out, torch.einsum("rhc,hvc->rhv", attended, up[:, dim:]).flatten(1))


def keys_values(operation: Attend, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the rows' keys and values for attention, [rows, kv_heads, dim]."""
    buffer, at, heads, dim = operation.beside, operation.keys, operation.kv_heads, operation.dim
    return rows.heads_of(buffer, at, heads, dim, dim), rows.heads_of(buffer, at + heads * dim, heads, dim, dim)


def gate(operation: Gate, weights: Weights, rows: Rows) -> None:
    """Multiply a buffer by gates from another buffer: sigmoids, another activation, or plain values."""
    x, gates = rows.get(operation.source), rows.get(operation.by)
    groups, width, stride = operation.groups, operation.dim if operation.each else 1, operation.stride or 1
    gates = gates.narrow(1, operation.at, (groups - 1) * stride + width).unfold(1, width, stride)
    if operation.activation:
        gates = torch.sigmoid(gates) if operation.activation == "sigmoid" else ACTIVATIONS[operation.activation](gates)
    rows.put(operation.source, (x.view(len(x), groups, operation.dim) * gates).flatten(1))


def scale(operation: Scale, weights: Weights, rows: Rows) -> None:
    """Multiply a buffer by factors."""
    kept = rows.get(operation.source)
    x = kept * operation.factor if weights.weight is None else wide(kept) * (operation.factor * wide(weights.weight))
    rows.put(operation.out or operation.source, x.to(kept.dtype))


def mix(operation: Mix, weights: Weights, rows: Rows) -> None:
    """Add other buffers to each source buffer, with weights that each row computes for itself."""
    others = [wide(rows.get(name)) for name in operation.others]
    shares = operation.offset + F.linear(torch.tanh(wide(rows.get(operation.by))), weights.weight)
    mixed = []
    for name, of_source in zip(operation.sources, shares.chunk(len(operation.sources), -1), strict=True):
        kept = rows.get(name)
        parts = [share * other for share, other in zip(of_source.split(1, -1), others, strict=True)]
        mixed.append((wide(kept) + sum(parts)).to(kept.dtype))
    for name, values in zip(operation.sources, mixed, strict=True):
        rows.put(name, values)


def match(operation: Match, weights: Weights, rows: Rows) -> None:
    """Scale a buffer to the root mean square of another buffer."""
    kept = rows.get(operation.source)
    own, wanted = (wide(x).pow(2).mean(-1, keepdim=True) for x in (kept, rows.get(operation.beside)))
    rows.put(operation.source, (wide(kept) * wanted.sqrt() / own.clamp(min=operation.least).sqrt()).to(kept.dtype))


def sparse_gate(operation: SparseGate, weights: Weights, rows: Rows) -> None:
    """Compute a sparse gate: only gates that exceed the row's mean by some standard deviations pass."""
    kept = rows.get(operation.source)
    gates, up = wide(kept).chunk(2, -1)
    apart = gates - gates.mean(-1, keepdim=True)
    cut = operation.deviations * apart.pow(2).mean(-1, keepdim=True).sqrt()
    rows.put(operation.out, (ACTIVATIONS[operation.activation](torch.relu(apart - cut)) * up).to(kept.dtype))


def clamp(operation: Clamp, weights: Weights, rows: Rows) -> None:
    """Clamp a buffer to two limits."""
    x = rows.get(operation.source)
    x = torch.clamp(x, weights.low.to(x.dtype), weights.high.to(x.dtype))
    if operation.is_part:
        rows.change(operation.out, operation.at, operation.size, x)
    else:
        rows.put(operation.out, x)


def embed(operation: Embed, weights: Weights, rows: Rows) -> None:
    """Look up embeddings from another table than the model's input embedding."""
    assert rows.tokens is not None
    beyond = rows.tokens >= len(weights.table)
    x = F.embedding(rows.tokens.masked_fill(beyond, 0), weights.table)
    rows.put(operation.out, x * torch.tensor(operation.scale, dtype=x.dtype, device=x.device))


def add(operation: Add, weights: Weights, rows: Rows) -> None:
    """Add two buffers. A sum with the residual stream stays pending for the norm that follows."""
    beside = rows.get(operation.beside)
    if operation.scale != 1:
        beside = operation.scale * beside
    if operation.source == X and not operation.summed:
        rows.get(X)  # adds the pending term
        rows.delta = beside
        return
    total = rows.get(operation.source) + beside
    rows.put(operation.source, rows.ranks.sum(total) if operation.summed else total)


def pick(operation: Pick, weights: Weights, rows: Rows) -> None:
    """Drop unread rows from here on."""
    if rows.read is not None:
        rows.leave_out(operation.sources)


def hold_norm(operation: Norm, place: Place) -> layers.Norm:
    is_wide = operation.weight is not None and operation.weight.wide
    dtype = torch.promote_types(place.dtype, torch.float32) if is_wide else place.dtype
    factor, eps = operation.plain
    return layers.Norm(
        operation.size, bias=operation.bias is not None, eps=eps, kind=operation.kind, dtype=dtype,
        device=place.device, weight=operation.weight is not None, factor=factor,
    )  # fmt: skip


class HeadNorm(nn.Module):
    """The weight of the norm of rotated heads, or None."""

    def __init__(self, operation: Rope, place: Place):
        super().__init__()
        self.weight = None if operation.norm is None else place.empty(operation.norm)


EXECUTE: dict[type[Operation], Execution | str] = {
    Norm: Execution(norm, hold_norm),
    NormHeads: Execution(norm_heads),
    ByPosition: Execution(by_position),
    ScaleHeads: Execution(scale_heads),
    ActivateGated: Execution(activate_gated),
    Interpolate: Execution(interpolate),
    Xielu: Execution(xielu),
    Linear: Execution(linear, hold_linear),
    Rope: Execution(rope, HeadNorm, {"norm": "weight"}),
    Attend: Execution(attend),
    AttendLatent: Execution(attend_latent),
    Gate: Execution(gate),
    Scale: Execution(scale),
    Mix: Execution(mix),
    Match: Execution(match),
    SparseGate: Execution(sparse_gate),
    Clamp: Execution(clamp),
    Embed: Execution(embed),
    Add: Execution(add),
    Pick: Execution(pick),
    Experts: "prefold.worker.torch.experts:EXECUTION",
}
