"""The forward pass as a program: one call into the compiled kernels takes the rows of a step through all layers, where
every operation of a model's program has a compiled form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..engine.schedule.steps import NOT_FINITE, SlotStep
from ..kernels import (
    COLUMNS,
    Activation,
    Kind,
    LowRank,
    Operation,
    PathPlane,
    ProgramCall,
    RowLow,
    SlotPlane,
    TileCall,
)
from ..model import Adapter, CausalLM, MediaRows, RowAdapters, builders
from ..model import program as ir
from ..model.arrays import array_of
from ..model.layer import Layer
from ..model.layers import ActivatedLinear, Linear, Norm
from ..model.lora import Delta
from ..model.products import GatePanels, Panels, Product, in_turn
from .attention import KVStore, RowPlan, SlotPlan
from .rows import Batch, Path, PathKV, heads_of
from .slots import SlotBatch

# Buffers of rows: the residual stream, what the norms give, what is added to the residual stream next, q, k and v
# together or q beside k and v, what attention gives, the inside of the MLP, and the result.
X, H, DELTA, QKV, Q, KV, ATTENDED, WIDE, OUT = range(9)
# Their numbers, by their names in programs of models.
BUFFERS = {
    ir.X: X, ir.H: H, ir.DELTA: DELTA, builders.QKV: QKV, builders.Q: Q, builders.KV: KV, builders.ATTENDED: ATTENDED,
    builders.WIDE: WIDE, ir.OUT: OUT,
}  # fmt: skip
# The operations of layers that have a compiled form.
COMPILED = (ir.Norm, ir.Linear, ir.Rope, ir.Attend, ir.Add, ir.Pick)
LINE = 64  # bytes of a cache line, where buffers begin
MOST_POSITIONS = 1 << 62
LOW_BYTES = sizeof(RowLow)
ACTIVATIONS = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}


@dataclass(slots=True)
class PreparedStep:
    """A PreparedStep is a step that is ready to run. It serves all repetitions of the step (`Program.follow`).

    buffers    the addresses of the buffers, int64
    last       the last position of its rows
    keepalive  what the call names by address beside these
    ids        memory for the most likely tokens, where they are wanted
    grows      whether the keys that its rows see can grow in place by a key each, once that was wanted
    """

    batch: SlotBatch | Batch
    call: ProgramCall
    buffers: np.ndarray
    last: int
    keepalive: tuple[Any, ...]
    ids: np.ndarray | None = None
    grows: bool | None = None


@dataclass(frozen=True, slots=True)
class NamedLinear:
    """A NamedLinear is a linear of a layer, with the name that adapters know it by, and the product that it has."""

    layer: int
    name: str
    linear: Linear
    product: Product


class Program:
    """A Program runs the layers and the final norm of one model, or some of its layers. `program_of` makes it.

    memory       the buffers of a step, which every step uses again
    memory_rows  the most rows of a step that they hold
    """

    def __init__(
        self, model: CausalLM, compiled: kernels.Kernels, part: Sequence[tuple[int, int]] | None = None, first: int = 0
    ):
        self.model, self._kernels, self._first = model, compiled, first
        config = model.local
        self._windows = list(dict.fromkeys(plane.window for plane in config.planes))
        # Planes that are turned alike have one table; a model whose positions are learned has none.
        self._table_of = () if config.rope is None else model.rotary(model.device).table_of
        self._num_tables = max(self._table_of, default=-1) + 1
        hidden, q, kv, wide = config.hidden, config.q_size, config.kv_size, config.intermediate
        widths = [hidden, hidden, hidden, q + 2 * kv, q, 2 * kv, q, wide, hidden]
        wanted = [model.program.widths.get(name, 0) for name in BUFFERS]
        self._widths = np.maximum(widths, wanted).astype(np.int64)
        self._keepalive: list[Tensor] = []  # what operations name by address and the model does not hold
        self._linears: list[NamedLinear] = []
        self._operations: list[Operation] = []
        vocab, table = model.shard.vocab, model.matrix("embedding")
        view = model.ranks.view
        self._is_split, self._ranks = view is not None, None if view is None else addressof(view)
        self._heads_agree: bool | None = None  # whether each rank has the head as a product of the kernels
        embedding = _matrix(table) if isinstance(table, Panels) else {"weight": table.data_ptr()}
        learned, scale = model.position_embedding, model.embedding_scale
        self._add(
            Kind.EMBED, out=X, **embedding, bias=self._address(learned), at=vocab.start, columns=len(model.embedding),
            dim=config.vocab_size, eps=scale, positions=0 if learned is None else len(learned), summed=self._is_split,
        )  # fmt: skip
        self._picks = False  # whether rows that are not read are left out on the way
        waits = False  # whether DELTA is still to be added to the residual stream
        whole = [(number, plane) for plane, number in enumerate(config.visited)]
        for plane, (number, like) in enumerate(whole if part is None else part, first):
            waits = self._add_layer(cast(Layer, model.layers[number]), plane, like, waits)
        if part is None:
            waits = self._add_layer(model.end, -1, -1, waits)
        if waits:
            self._add(Kind.ADD, source=X, beside=DELTA, eps=1)
        self._layers_end, self._head = len(self._operations), None
        self._array = (Operation * len(self._operations))(*self._operations)
        self.memory, self.memory_rows = torch.empty(0), 0
        self._tables: list[Tensor] = []  # of cosines and sines
        self._addresses = (c_void_p * self._num_tables)()
        self._positions = 0 if self._num_tables else MOST_POSITIONS  # that the tables cover
        self._adapters: dict[int, PackedAdapter] = {}  # by number, each since a row had it first
        self._last: PreparedStep | None = None  # the last step over slots

    @property
    def is_current(self) -> bool:
        """Returns whether the model's linears have the products that they had when this was made."""
        return all([linear.linear.product is linear.product for linear in self._linears])

    def over_slots(self, batch: SlotBatch, store: KVStore, media: MediaRows[Tensor] | None = None) -> Tensor:
        """Returns what `worker.slots.forward` returns."""
        return self._run(self._over(batch, store, self._embedded(batch, media)))

    def through(self, x: Tensor, batch: SlotBatch, store: KVStore, first: int) -> Tensor:
        """Return the residual stream x [rows, hidden] after the program's part of the layers, written into x. Behind
        the model's last plane only the rows that are read are left.

        first: the plane of the store that has the K/V of the part's first layer
        """
        x = x.contiguous()
        step = self._last
        if step is None or step.batch is not batch:
            self._last = step = self._prepared(batch, x, slots=batch.slots.data_ptr(), none=NOT_FINITE)
        step.buffers[X] = x.data_ptr()
        step.call.planes = addressof(store.structs) + (first - self._first) * sizeof(SlotPlane)
        self._call(step)
        return x[: step.call.picked] if self._picks else x

    def greedy(self, batch: SlotBatch, store: KVStore, media: MediaRows[Tensor] | None = None) -> np.ndarray | None:
        """Returns what `worker.slots.greedy` returns of the hidden states of a step, without making logits, in memory
        that the next step may write into; None, and nothing is computed, where the head is no product of the
        kernels."""
        if not self._adds_head():
            return None
        step = self._over(batch, store, self._embedded(batch, media))
        if step.ids is None:
            step.ids, out = np.empty(step.call.picked, np.int64), self._empty(step.call.picked)
            step.call.ids, step.buffers[OUT] = step.ids.ctypes.data, out.data_ptr()
            step.keepalive = (*step.keepalive, out)
        self._call(step)
        return step.ids

    def follow(self, step: SlotStep) -> SlotBatch | None:
        """Make the last batch over slots the batch of the step that follows (`SlotStep.follows`), and return it. Return
        None, and change nothing, if the call of the last step is not there any more or cannot grow."""
        last = self._last
        if last is None:
            return None
        batch: Any = last.batch  # a SlotBatch
        if last.grows is None:
            last.grows = batch.numbers is not None and all([plan.can_grow(step.slots) for plan in batch.plans.values()])
        if not last.grows:
            return None
        if not (takes := step.tokens is last.ids):
            batch.numbers[0] = step.tokens
        self._kernels.follow_program(last.call, takes)
        last.last += 1
        if last.last >= self._positions:
            self._cover(last.last)
        return batch

    def greedy_again(self, step: SlotStep) -> np.ndarray | None:
        """Return what `greedy` returns, of the step that follows the last one. Return None, and compute nothing, if the
        last step was not greedy or `follow` returns None."""
        last = self._last
        if last is None or last.ids is None or self.follow(step) is None:
            return None
        self._kernels.run_program(last.call)
        return last.ids

    def _over(self, batch: SlotBatch, store: KVStore, x: Tensor | None) -> PreparedStep:
        """Returns a step over slots, ready to run: that of its batch, where it was the last one. x: as of
        `_prepared`"""
        step, planes = self._last, addressof(store.structs)
        if step is None or step.batch is not batch or step.call.planes != planes or x is not None:
            step = self._prepared(batch, x, slots=batch.slots.data_ptr(), planes=planes, none=NOT_FINITE)
            self._last = step if x is None else None
        return step

    def _adds_head(self) -> bool:
        """Returns whether the operations end with the model's head as it is now."""
        shape = self.model.shape_logits
        if shape is not None and shape.cap is not None:
            return False  # a cap makes logits equal that are far from it and near to each other
        head: Any = self.model.product_of_head()
        if self._heads_agree is None:  # there may be room for a packed one on some ranks only
            self._heads_agree = not self._is_split or self.model.ranks.agree(type(head) is Panels)
        if not self._heads_agree:
            return False
        if head is not self._head and type(head) is Panels:
            del self._operations[self._layers_end :]
            self._add(Kind.HEAD, source=OUT, **_matrix(head), columns=head.outputs, at=self.model.shard.vocab.start)
            self._array = (Operation * len(self._operations))(*self._operations)
            self._head, self._last = head, None
        return head is not None and head is self._head

    def over_rows(self, batch: Batch, path: Path, media: MediaRows[Tensor] | None = None) -> tuple[Tensor, PathKV]:
        """Returns what `worker.rows.forward_stream` returns."""
        config, kept_path, kept_new = self.model.local, len(batch.keep_path), len(batch.keep_new)
        shape = (len(config.planes), 2, kept_path + kept_new, config.kv_heads, config.head_dim)
        kv = torch.empty(shape, dtype=self.model.dtype)
        paths = (PathPlane * len(config.planes))()
        path_tensors = []
        for plane, (keys, values) in enumerate(kv):
            before = [tensor.contiguous() for tensor in path.kv.get(plane, ())]
            path_tensors.append(before)
            places = [tensor.data_ptr() for tensor in before] or [None, None]
            paths[plane] = PathPlane(*places, keys.data_ptr(), values.data_ptr())
        fold: dict[str, Any] = {}
        if batch.scatter is not None and batch.gather is not None:
            room = torch.empty((len(batch.scatter), 2 * config.q_size + 2 * config.kv_size), dtype=self.model.dtype)
            fold = {"unfolded": len(room), "unfolded_room": room.data_ptr()}
            fold |= {"scatter": batch.scatter.data_ptr(), "gather": batch.gather.data_ptr()}
            fold["read_order"] = None if batch.read_order is None else batch.read_order.data_ptr()
        step = self._prepared(
            batch, self._embedded(batch, media), paths=addressof(paths), path=path.rows, kept_path=kept_path,
            kept_new=kept_new, keep_path=batch.keep_path.data_ptr(), keep_new=batch.keep_new.data_ptr(), **fold,
        )  # fmt: skip
        hidden = self._run(step)
        return hidden, {plane: (keys, values) for plane, (keys, values) in enumerate(kv)}

    def _embedded(self, batch: SlotBatch | Batch, media: MediaRows[Tensor] | None) -> Tensor | None:
        return None if media is None else self.model.embed(batch.tokens, batch.positions, media)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, int(self._widths[OUT])), dtype=self.model.dtype)

    def _run(self, step: PreparedStep) -> Tensor:
        """Returns the hidden states of the rows of a step that are read."""
        out = self._empty(step.call.picked)
        step.buffers[OUT], step.ids, step.call.ids = out.data_ptr(), None, None
        self._call(step)
        return out

    def _call(self, step: PreparedStep) -> None:
        step.call.threads = kernels.threads()
        self._kernels.run_program(step.call)

    def _prepared(self, batch: SlotBatch | Batch, x: Tensor | None, **call_fields: Any) -> PreparedStep:
        """Returns a step, ready to run. x: what rows begin with, which is written into; None: their embeddings.
        call_fields: where its K/V comes from and goes to, and what else is wanted"""
        rows = len(batch.tokens)
        if rows > self.memory_rows:
            self._make_room(rows, self.model.dtype.itemsize)
        last = int(batch.positions.numpy().max(initial=-1))
        if last >= self._positions:
            self._cover(last)
        model, read_rows = self.model, batch.read_rows
        buffers, tokens = self._buffers.copy(), batch.tokens.data_ptr()
        if x is not None:
            buffers[X], tokens = x.data_ptr(), None
        plans, read_plans = self._calls(batch.plans), self._calls(batch.read_plans)
        call = ProgramCall(
            operations=addressof(self._array), count=len(self._array), buffers=buffers.ctypes.data,
            widths=self._widths.ctypes.data, rows=rows, picked=rows if read_rows is None else len(read_rows),
            read=None if read_rows is None else read_rows.data_ptr(), tokens=tokens,
            positions=batch.positions.data_ptr(), tables=addressof(self._addresses), num_tables=self._num_tables,
            dim=model.config.head_dim, angles=self._angles, scale=model.config.scale,
            cap=model.config.attention_cap or 0, plans=addressof(plans), read_plans=addressof(read_plans),
            is_bf16=model.dtype == torch.bfloat16, ranks=self._ranks, **call_fields,
        )  # fmt: skip
        adapted = self._adapt(call, batch.adapters) if batch.adapters.adapters else None
        return PreparedStep(batch, call, buffers, last, (x, plans, read_plans, adapted))

    def _adapt(self, call: ProgramCall, adapters: RowAdapters) -> tuple[Any, ...]:
        """Says in a call which adapters its rows have, and returns what it names by address. An adapter's matrices are
        packed when a row has it first."""
        numbers, addresses = np.ascontiguousarray(adapters.numbers, np.int64), (c_void_p * len(adapters.adapters))()
        for number in np.unique(numbers[numbers >= 0]).tolist():
            adapter = adapters.adapters[number]
            packed = self._adapters.get(number)
            if packed is None or packed.adapter is not adapter:
                packed = self._adapters[number] = PackedAdapter(adapter, self._linears, self._kernels)
            addresses[number] = addressof(packed.table)
            call.most_ranks = max(call.most_ranks, packed.most_ranks)
        room = torch.empty(call.rows * (LOW_BYTES + 4 * call.most_ranks), dtype=torch.uint8)
        call.numbers, call.adapters = numbers.ctypes.data, addressof(addresses)
        call.adapted = room.data_ptr()
        call.low = call.adapted + call.rows * LOW_BYTES
        return numbers, addresses, room

    def _calls(self, plans: Mapping[int | None, SlotPlan | RowPlan]) -> Any:
        """Returns the plans by the numbers of windows; none has queries that is not there."""
        calls = (TileCall * len(self._windows))()
        for number, window in enumerate(self._windows):
            if window in plans:
                calls[number] = plans[window].lists.call  # type: ignore[union-attr]
        return calls

    def _cover(self, last: int) -> None:
        """Lets the tables reach this position, which they do not yet."""
        self._tables = self.model.rotary(self.model.device).covering(last + 1)
        self._positions = min(map(len, self._tables))
        self._addresses[:] = [table.data_ptr() for table in self._tables]

    def _make_room(self, rows: int, itemsize: int) -> None:
        """Makes the buffers for steps of so many rows. Attention's and the MLP's lie in one place, since neither is
        read while the other is written."""
        sizes = -(-self._widths * rows * itemsize // LINE) * LINE
        attention = max(sizes[QKV], sizes[Q] + sizes[KV])
        shared = 3 * sizes[H]
        angles = shared + max(attention + sizes[ATTENDED], sizes[WIDE])
        room = angles + self._num_tables * rows * self.model.config.head_dim * 4
        self.memory = torch.empty(int(room) + LINE, dtype=torch.uint8)
        first = self.memory.data_ptr()
        first += -first % LINE
        places = [0, sizes[H], 2 * sizes[H], shared, shared, shared + sizes[Q], shared + attention, shared, 0]
        self._buffers, self.memory_rows, self._angles = np.array(places, np.int64) + first, rows, int(angles) + first
        self._last = None

    def _add(self, kind: Kind, **fields: Any) -> None:
        self._operations.append(Operation(kind=kind, **fields))

    def _add_layer(self, layer: Layer, plane: int, like: int, waits: bool) -> bool:
        """Adds the operations of one layer, and returns whether DELTA is still to be added to the residual stream.
        plane: of the store; like: the model's plane that has its window and rotation; waits: what the layer before
        returned"""
        for operation, weights in layer.weights:
            if waits:
                # A norm of the residual stream adds to it.
                waits = not isinstance(operation, ir.Norm) or operation.source != ir.X
                if waits:
                    self._add(Kind.ADD, source=X, beside=DELTA, eps=1)
                else:
                    self._add_norm(operation, weights, DELTA)
                    continue
                waits = False
            if isinstance(operation, ir.Norm):
                self._add_norm(operation, weights)
            elif isinstance(operation, ir.Linear):
                self._add_linear(operation, weights)
            elif isinstance(operation, ir.Rope):
                self._add_rope(operation, weights.weight, like)
            elif isinstance(operation, ir.Attend):
                self._add_attend(operation, weights.sinks, plane, like)
            elif isinstance(operation, ir.Pick):
                if plane == len(self.model.config.planes) - 1:
                    self._picks = True
                    for name in operation.sources:
                        self._add(Kind.PICK, source=BUFFERS[name], beside=name == operation.sources[-1])
            else:
                assert isinstance(operation, ir.Add)
                waits = operation == ir.Add(ir.X, ir.DELTA)
                if not waits:
                    source, beside = BUFFERS[operation.source], BUFFERS[operation.beside]
                    summed = self._is_split and operation.summed
                    self._add(Kind.ADD, source=source, beside=beside, eps=operation.scale, summed=summed)
        return waits

    def _add_norm(self, operation: ir.Norm, norm: Norm, beside: int = -1) -> None:
        """Adds a norm. beside: the buffer that is added to its source first; -1: none"""
        bias = torch.zeros_like(norm.weight) if norm.kind == "layer" and norm.bias is None else norm.bias
        self._add(
            Kind.NORM, source=BUFFERS[operation.source], out=BUFFERS[operation.out], beside=beside, at=operation.at,
            weight=norm.weight.data_ptr(), columns=len(norm.weight), wide=norm.weight.dtype != self.model.dtype,
            eps=norm.eps, bias=self._address(bias),
        )  # fmt: skip

    def _add_linear(self, operation: ir.Linear, linear: Linear) -> None:
        """Adds the product of a linear."""
        product, bias, activation, kind = linear.product, linear.whole_bias, Activation.LINEARLY, Kind.LINEAR
        assert isinstance(product, Panels)
        if isinstance(linear, ActivatedLinear):
            activation = ACTIVATIONS[linear.activation]
        if isinstance(product, GatePanels):
            kind, bias = Kind.GATED, None if bias is None else in_turn(bias)
        self._add(
            kind, source=BUFFERS[operation.source], out=BUFFERS[operation.out], **_matrix(product),
            bias=self._address(bias), activation=activation, linear=len(self._linears),
            summed=self._is_split and operation.summed,
        )  # fmt: skip
        self._linears.append(NamedLinear(operation.layer, operation.name, linear, product))

    def _add_rope(self, operation: ir.Rope, norm: Tensor | None, like: int) -> None:
        """Adds the norm and the rotation of some heads. norm: the weight of the norm"""
        self._add(
            Kind.ROPE, source=BUFFERS[operation.source], plane=self._table_of[like], at=operation.at,
            heads=operation.heads, dim=operation.dim, weight=None if norm is None else norm.data_ptr(),
            eps=self.model.local.norm_eps, wide=norm is not None and norm.dtype != self.model.dtype,
        )  # fmt: skip

    def _add_attend(self, operation: ir.Attend, sinks: Tensor | None, plane: int, like: int) -> None:
        """Adds attention. plane, like: as of `_add_layer`"""
        self._add(
            Kind.ATTEND, source=BUFFERS[operation.source], out=BUFFERS[operation.out],
            beside=BUFFERS[operation.beside], keys=operation.keys, heads=operation.heads, dim=operation.dim,
            plane=plane, kv_heads=operation.kv_heads,
            window=self._windows.index(self.model.local.planes[like].window),
            weight=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._keepalive.append(tensor)
        return tensor.data_ptr()


def _matrix(product: Panels) -> dict[str, int | None]:
    """Returns what an operation says of the matrix that it multiplies with."""
    return dict(zip(("weight", "blocks"), kernels.matrix_addresses(product.packed), strict=True))


class PackedAdapter:
    """A PackedAdapter has an adapter's matrices as the kernels read them.

    table       a LowRank for each of a program's linears
    most_ranks  of a linear
    """

    def __init__(self, adapter: Adapter, linears: Sequence[NamedLinear], compiled: kernels.Kernels):
        self.adapter = adapter
        self.table, self.most_ranks = (LowRank * len(linears))(), 0
        self._keepalive: list[np.ndarray] = []  # what the table names by address
        for number, linear in enumerate(linears):
            delta = adapter.layers[linear.layer].get(linear.name)
            if delta is not None:
                matrices = low_rank_matrices(delta, linear.linear, compiled)
                self._keepalive += matrices
                self.table[number] = LowRank(*map(kernels.address, matrices), ranks=len(delta.a))
                self.most_ranks = max(self.most_ranks, len(delta.a))


def low_rank_matrices(delta: Delta, linear: Linear, compiled: kernels.Kernels) -> tuple[np.ndarray, ...]:
    """Returns `a`, `b` and `spans` of a LowRank."""
    ranks, outputs = len(delta.a), linear.outputs
    b = delta.a.new_zeros(-(-outputs // COLUMNS) * COLUMNS, ranks)
    for part in delta.parts:
        b[part.columns, part.ranks] = part.b
    if type(linear.product) is GatePanels:
        b[:outputs] = in_turn(b[:outputs])
    b = b.view(-1, COLUMNS, ranks).transpose(1, 2)
    # A panel has the ranks from the first to the last of those that its columns have any part in.
    used, numbers = (b != 0).any(2).int(), torch.arange(ranks)
    first, stop = used.argmax(1), (ranks - used.flip(1).argmax(1)) * used.any(1)
    inside = (numbers >= first[:, None]) & (numbers < stop[:, None])
    begins = (stop - first).cumsum(0).roll(1) * COLUMNS
    begins[0] = 0
    spans = torch.stack((first, stop, begins), 1)
    return compiled.pack_words(array_of(delta.a)), array_of(b[inside]), array_of(spans)


def program_of(model: CausalLM, part: Sequence[tuple[int, int]] | None = None, first: int = 0) -> Program | None:
    """Return the program of a model, or of some of its layers; None: one of its operations has no compiled form.

    part   layers, with the plane of the model whose window and rotation each has
    first  the plane of the part's first layer; with the model's last plane the part leaves only the rows that are read
    """
    compiled = heads_of(model).compiled(model.device)
    if not model.ranks.agree(compiled is not None and missing(model, part is None) is None) or compiled is None:
        return None
    return Program(model, compiled, part, first)


def missing(model: CausalLM, whole: bool = True) -> str | None:
    """Returns the first thing of a model that has no compiled form, in words; None: its forward pass is one call.
    whole: whether that is asked of the whole model, not of layers"""
    config = model.config
    layers = [cast(Layer, layer) for layer in (*model.layers, model.end)] if len(model.layers) else []
    every = [(operation, weights) for layer in layers for operation, weights in layer.weights]
    linears = [(operation, cast(Linear, weights)) for operation, weights in every if isinstance(operation, ir.Linear)]
    gated = [linear.product for operation, linear in linears if operation.gated]
    others = [linear.product for operation, linear in linears if not operation.gated]
    things = {
        "compiled kernels for its heads": heads_of(model).compiled(model.device) is not None,
        "a model of another kind, or all visits of a looped model": not whole or type(model) is CausalLM,
        "ranks that share no memory": model.ranks.size == 1 or model.ranks.view is not None,
        "norms over the heads of several ranks": model.ranks.size == 1 or not config.row_qk_norm,
        "operations of another kind": bool(layers) and all(is_compiled(operation) for operation, _ in every),
        "an MLP's width": all(type(product) is GatePanels for product in gated),
        "products of other code": all(type(product) is Panels for product in others),
        "a scale of attention": config.scale > 0,
        "LayerNorms of another dtype": config.norm == "rms" or not config.norm_offset,
        "norms of heads that are not turned": config.rope is not None or not config.qk_norm,
    }
    return next((thing for thing, is_so in things.items() if not is_so), None)


def is_compiled(operation: ir.Operation) -> bool:
    """Returns whether an operation of a layer has a compiled form."""
    buffers = (getattr(operation, name, ir.X) for name in ("source", "beside", "out"))
    if not {*buffers} <= BUFFERS.keys():
        return False
    if isinstance(operation, ir.Linear):
        return bool(operation.name) and operation.activation in ("", *ACTIVATIONS)
    if isinstance(operation, ir.Rope):
        return operation.turned == operation.stride == operation.dim
    return isinstance(operation, COMPILED)
