"""The forward pass as a program: one call into the compiled kernels takes the rows of a step through all layers, where
every operation of a model has a compiled form. PyTorch's modules define what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import kernels
from ..attention import KVStore, RowPlan, SlotPlan
from ..kernels import Kind, Operation, PathPlane, ProgramCall, TileCall
from ..model import CausalLM, MediaRows
from ..model.decoder_layer import Layer, Mlp
from ..model.layers import Linear, Norm
from ..model.products import GatePanels, Panels, Product, in_turn
from ..schedule.steps import NOT_FINITE
from .rows import Batch, Path, PathKV, heads_of
from .slots import SlotBatch

# Buffers of rows: the residual stream, what the norms give, what is added to the residual stream next, q, k and v
# together or q beside k and v, what attention gives, the inside of the MLP, and the result.
X, H, DELTA, QKV, Q, KV, ATTENDED, WIDE, OUT = range(9)
LINE = 64  # bytes of a cache line, where buffers begin


class Program:
    """A Program runs the layers and the final norm of one model. `program_of` makes it."""

    def __init__(self, model: CausalLM, compiled: kernels.Kernels):
        self._model, self._compiled = model, compiled
        config = model.local
        self._windows = list(dict.fromkeys(plane.window for plane in config.planes))
        # Planes that are turned alike have one table.
        self._table_of = model.rotary(model.device).table_of
        self._num_tables = max(self._table_of) + 1
        hidden, q, kv, wide = config.hidden, config.q_size, config.kv_size, config.intermediate
        self._widths = np.array([hidden, hidden, hidden, q + 2 * kv, q, 2 * kv, q, wide, hidden], np.int64)
        self._kept: list[Tensor] = []  # what operations name by address and the model does not hold
        self._products: list[tuple[Linear, Product | None]] = []
        self._operations: list[Operation] = []
        embedding, vocab = model.embedding.data_ptr(), len(model.embedding)
        self._add(Kind.EMBED, out=X, weight=embedding, columns=vocab, eps=model.embedding_scale)
        delta = -1
        for plane, number in enumerate(config.visited):
            self._add_layer(model.layers[number], plane, delta)  # type: ignore[arg-type]
            delta = DELTA
        self._add_norm(model.norm, X, OUT, delta)
        self._layers_end, self._head = len(self._operations), None
        self._array = (Operation * len(self._operations))(*self._operations)
        self._memory, self._room = torch.empty(0), 0
        self._tables: list[Tensor] = []  # of cosines and sines
        self._addresses = (c_void_p * self._num_tables)()
        self._positions = 0  # that the tables cover

    @property
    def is_current(self) -> bool:
        """Returns whether the model's linears have the products that they had when this was made."""
        return all([linear.product is product for linear, product in self._products])

    def over_slots(self, batch: SlotBatch, store: KVStore, media: MediaRows | None = None) -> Tensor:
        """Returns what `worker.slots.forward` returns of a step in which no row has an adapter."""
        return self._run(batch, media, slots=batch.slots.data_ptr(), planes=addressof(store.structs))

    def greedy(self, batch: SlotBatch, store: KVStore, media: MediaRows | None = None) -> np.ndarray | None:
        """Returns what `worker.slots.greedy` returns of the hidden states of a step in which no row has an adapter,
        without making logits; None, and nothing is computed, where the head is no product of the kernels."""
        if not self._adds_head():
            return None
        ids = np.empty(len(batch.tokens) if batch.read_rows is None else len(batch.read_rows), np.int64)
        slots, planes = batch.slots.data_ptr(), addressof(store.structs)
        self._run(batch, media, slots=slots, planes=planes, ids=ids.ctypes.data, none=NOT_FINITE)
        return ids

    def _adds_head(self) -> bool:
        """Returns whether the operations end with the model's head as it is now."""
        head: Any = self._model.product_of_head()
        if head is not self._head and type(head) is Panels:
            del self._operations[self._layers_end :]
            weight = head.packed.data_ptr()
            self._add(Kind.HEAD, source=OUT, weight=weight, columns=head.outputs)
            self._array = (Operation * len(self._operations))(*self._operations)
            self._head = head
        return head is not None and head is self._head

    def over_rows(self, batch: Batch, path: Path, media: MediaRows | None = None) -> tuple[Tensor, PathKV]:
        """Returns what `worker.rows.forward_stream` returns of a step that is not folded, in which no row has an
        adapter."""
        config, kept_path, kept_new = self._model.local, len(batch.keep_path), len(batch.keep_new)
        shape = (len(config.planes), 2, kept_path + kept_new, config.kv_heads, config.head_dim)
        kv = torch.empty(shape, dtype=self._model.dtype)
        paths = (PathPlane * len(config.planes))()
        carried = []
        for plane, (keys, values) in enumerate(kv):
            before = [tensor.contiguous() for tensor in path.kv.get(plane, ())]
            carried.append(before)
            places = [tensor.data_ptr() for tensor in before] or [None, None]
            paths[plane] = PathPlane(*places, keys.data_ptr(), values.data_ptr())
        hidden = self._run(
            batch, media, paths=addressof(paths), path=path.rows, keep_path=batch.keep_path.data_ptr(),
            keep_new=batch.keep_new.data_ptr(), kept_path=kept_path, kept_new=kept_new,
        )  # fmt: skip
        return hidden, {plane: (keys, values) for plane, (keys, values) in enumerate(kv)}

    def _run(self, batch: SlotBatch | Batch, media: MediaRows | None, **call_fields: Any) -> Tensor:
        """Returns the hidden states of the rows of a step that are read. call_fields: where its K/V comes from and goes
        to, and what else is wanted"""
        model, read_rows, rows = self._model, batch.read_rows, len(batch.tokens)
        picked = rows if read_rows is None else len(read_rows)
        out = torch.empty((picked, int(self._widths[OUT])), dtype=model.dtype)
        if rows > self._room:
            self._make_room(rows, out.itemsize)
        buffers, tokens = self._buffers, batch.tokens.data_ptr()
        if media is not None:
            x = model.embed(batch.tokens, batch.positions, media)
            buffers, tokens = buffers.copy(), None
            buffers[X] = x.data_ptr()
        buffers[OUT] = out.data_ptr()
        plans, read_plans = self._calls(batch.plans), self._calls(batch.read_plans)
        if rows and (last := int(batch.positions.numpy().max())) >= self._positions:
            self._cover(last + 1)
        call = ProgramCall(
            operations=addressof(self._array), count=len(self._array), buffers=buffers.ctypes.data,
            widths=self._widths.ctypes.data, rows=rows, picked=picked, tokens=tokens,
            positions=batch.positions.data_ptr(), read=None if read_rows is None else read_rows.data_ptr(),
            tables=addressof(self._addresses), num_tables=self._num_tables, dim=model.config.head_dim,
            angles=self._angles, plans=addressof(plans), read_plans=addressof(read_plans), scale=model.config.scale,
            threads=torch.get_num_threads(), is_bf16=model.dtype == torch.bfloat16, **call_fields,
        )  # fmt: skip
        self._compiled.run_program(call)
        return out

    def _calls(self, plans: Mapping[int | None, SlotPlan | RowPlan]) -> Any:
        """Returns the plans by the numbers of windows; none has queries that is not there."""
        calls = (TileCall * len(self._windows))()
        for number, window in enumerate(self._windows):
            if window in plans:
                calls[number] = plans[window].lists.call  # type: ignore[union-attr]
        return calls

    def _cover(self, positions: int) -> None:
        self._tables = self._model.rotary(self._model.device).covering(positions)
        self._positions = min(map(len, self._tables))
        self._addresses[:] = [table.data_ptr() for table in self._tables]

    def _make_room(self, rows: int, itemsize: int) -> None:
        """Makes the buffers for steps of so many rows. Attention's and the MLP's lie in one place, since neither is
        read while the other is written."""
        sizes = -(-self._widths * rows * itemsize // LINE) * LINE
        attention = max(sizes[QKV], sizes[Q] + sizes[KV])
        shared = 3 * sizes[H]
        angles = shared + max(attention + sizes[ATTENDED], sizes[WIDE])
        room = angles + self._num_tables * rows * self._model.config.head_dim * 4
        self._memory = torch.empty(int(room) + LINE, dtype=torch.uint8)
        first = self._memory.data_ptr()
        first += -first % LINE
        places = [0, sizes[H], 2 * sizes[H], shared, shared, shared + sizes[Q], shared + attention, shared, 0]
        self._buffers, self._room, self._angles = np.array(places, np.int64) + first, rows, int(angles) + first

    def _add(self, kind: Kind, **fields: Any) -> None:
        self._operations.append(Operation(kind=kind, **fields))

    def _add_norm(self, norm: Norm, source: int, out: int, beside: int = -1) -> None:
        wide = norm.weight.dtype != self._model.dtype
        weight = norm.weight.data_ptr()
        self._add(Kind.NORM, source=source, out=out, beside=beside, weight=weight, eps=norm.eps, wide=wide)

    def _add_linear(self, linear: Linear, source: int, out: int) -> None:
        weight, bias = self._packed(linear), self._address(linear.whole_bias)
        self._add(Kind.LINEAR, source=source, out=out, weight=weight, bias=bias)

    def _packed(self, linear: Linear) -> int:
        """Returns the address of a linear's matrix, which is held by its product."""
        assert isinstance(linear.product, Panels)
        self._products.append((linear, linear.product))
        return linear.product.packed.data_ptr()

    def _add_rope(self, plane: int, source: int, at: int, heads: int, norm: nn.Parameter | None) -> None:
        config = self._model.local
        self._add(
            Kind.ROPE, source=source, plane=self._table_of[plane], at=at, heads=heads, dim=config.head_dim,
            weight=None if norm is None else norm.data_ptr(), eps=config.norm_eps,
            wide=norm is not None and norm.dtype != self._model.dtype,
        )  # fmt: skip

    def _add_layer(self, layer: Layer, plane: int, delta: int) -> None:
        """Adds the operations of one layer. delta: what the layer before has left to be added to the residual stream,
        -1: nothing"""
        config = self._model.local
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        self._add_norm(layer.input_norm, X, H, delta)
        if layer.splits_q:
            self._add_linear(layer.kv, H, KV)
            self._add_rope(plane, KV, 0, kv_heads, layer.k_norm)
            if plane == len(config.planes) - 1:
                self._add(Kind.PICK, source=X, beside=False)
                self._add(Kind.PICK, source=H, beside=True)
            self._add_linear(layer.q, H, Q)
            self._add_rope(plane, Q, 0, heads, layer.q_norm)
            source, beside, keys = Q, KV, 0
        else:
            self._add_linear(layer.qkv, H, QKV)
            if layer.q_norm is None:
                self._add_rope(plane, QKV, 0, heads + kv_heads, None)
            else:
                self._add_rope(plane, QKV, 0, heads, layer.q_norm)
                self._add_rope(plane, QKV, heads * dim, kv_heads, layer.k_norm)
            source, beside, keys = QKV, QKV, heads * dim
        window = self._windows.index(config.planes[plane].window)
        self._add(
            Kind.ATTEND, source=source, out=ATTENDED, beside=beside, keys=keys, heads=heads, dim=dim, plane=plane,
            kv_heads=kv_heads, window=window,
        )  # fmt: skip
        self._add_linear(layer.o, ATTENDED, DELTA)
        if layer.o_norm is not None:
            self._add_norm(layer.o_norm, DELTA, DELTA)
        self._add_norm(layer.post_norm, X, H, DELTA)
        first = layer.mlp.gate_up
        weight, bias = self._packed(first), self._address(None if first.bias is None else in_turn(first.bias))
        self._add(Kind.GATED, source=H, out=WIDE, weight=weight, bias=bias, wide=first.activation == "gelu_tanh")
        self._add_linear(layer.mlp.down, WIDE, DELTA)
        if layer.down_norm is not None:
            self._add_norm(layer.down_norm, DELTA, DELTA)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()


def program_of(model: CausalLM) -> Program | None:
    """Returns the program of a model; None where one of its operations has no compiled form."""
    compiled = heads_of(model).compiled(model.device)
    return None if compiled is None or missing(model) else Program(model, compiled)


def missing(model: CausalLM) -> str | None:
    """Returns the first thing of a model that has no compiled form, in words; None: its forward pass is one call."""
    config, layers = model.config, [layer for layer in model.layers if type(layer) is Layer]
    gates = [layer.mlp.gate_up.product for layer in layers if type(layer.mlp) is Mlp]
    linears = [layer.o for layer in layers] + [layer.mlp.down for layer in layers if type(layer.mlp) is Mlp]
    linears += [linear for x in layers for linear in ((x.q, x.kv) if x.splits_q else (x.qkv,))]
    things = {
        "compiled kernels for its heads": heads_of(model).compiled(model.device) is not None,
        "a model of another kind": type(model) is CausalLM,
        "several ranks": model.ranks.size == 1,
        "norms other than RMSNorm": config.norm == "rms",
        "positions that are no rotation": config.rope is not None,
        "layers of another kind": len(layers) == len(model.layers),
        "an MLP of another kind": len(gates) == len(layers) and config.activation in ("silu", "gelu_tanh"),
        "an MLP's width": all(type(product) is GatePanels for product in gates),
        "products of other code": all(type(linear.product) is Panels for linear in linears),
        "a scale of attention": config.scale > 0,
    }
    return next((thing for thing, is_compiled in things.items() if not is_compiled), None)
