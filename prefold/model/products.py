"""Products of rows with a matrix: the code that multiplies, and how the matrix lies in memory for it.

A `Linear`, and the LM head, multiply by PyTorch with their weight as it is, or hold a `Product` that has the weight in
a form of its own. Packed forms are made here; others (quantised, merged, ...) can be put in from outside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..kernels import LANES
from .arrays import ARRAY_DTYPES, array_of, tensor_of
from .device import available_memory
from .machine import computes_bf16
from .ops import wide

# Vocabulary entries of an LM head that are widened to float32 at once.
HEAD_COLUMNS = 4096


class Product:
    """A Product is a matrix [outputs, inputs] that rows are multiplied with. A product of your own needs `__call__`
    alone."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x [rows, inputs] times the matrix, plus bias [outputs]: [rows, outputs], of x's dtype."""
        raise NotImplementedError

    def wide(self, x: Tensor) -> Tensor:
        """Returns x [rows, inputs] times the matrix in float32, as logits are wanted: the sums are best not rounded
        before."""
        return self(x).float()

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor | None:
        """Returns activation(gate) * up [rows, outputs / 2], where the first half of the outputs is gate, the other one
        up; or None: there is no faster way to it than by the whole product."""
        return None

    def settle(self) -> bool:
        """Multiply a row in the same way from now on, however many rows there are. Return False if that cannot be."""
        return False


class OneDNN(Product):
    """A OneDNN has a copy of a weight in the layout of oneDNN, which need not reorder it in every call. No
    gradients."""

    def __init__(self, weight: Tensor):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class Panels(Product):
    """A Panels has a copy of a weight in the layout of our compiled kernels: packed, as of `Kernels.pack_words`, or in
    the blocks of its file. No gradients.

    weight: [outputs, inputs], or blocks; pool: where memory comes from; has_gate: whether the outputs are
    gate and up, in turn; dtype: of rows that are read
    """

    has_gate = False
    dtype = torch.float32

    def __init__(
        self, weight: Tensor | kernels.Blocks, compiled: kernels.Kernels, pool: kernels.PanelPool | None = None
    ):
        self._compiled = compiled
        self.packed: np.ndarray | kernels.Blocks
        if isinstance(weight, kernels.Blocks):
            self.packed, self.outputs = weight, weight.outputs
        else:
            self.packed = compiled.pack_words(array_of(weight), pool, gated=self.has_gate)
            self.outputs = len(weight)
        self._memory = _LogitsBuffer()

    @staticmethod
    def side_by_side(parts: Sequence[kernels.StoredRows]) -> Sequence[kernels.StoredRows]:
        """Returns stored rows in the order that they are packed in."""
        return parts

    def settle(self) -> bool:
        if isinstance(self.packed, kernels.Blocks):
            self.packed = self._compiled.in_one_form(self.packed)
        return True

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of a matrix of blocks, [ids, inputs]."""
        assert isinstance(self.packed, kernels.Blocks)
        return tensor_of(self._compiled.block_rows(self.packed, array_of(ids), ARRAY_DTYPES[self.dtype]))

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return tensor_of(self._compiled.linear(array_of(x), self.packed, self.outputs, array_of(bias)))

    def wide(self, x: Tensor) -> Tensor:
        """Returns the product as summed, in float32, which no product of PyTorch gives of bfloat16."""
        out = self._memory.take(len(x), self.outputs)
        return tensor_of(self._compiled.linear(array_of(x), self.packed, self.outputs, out=out))


class GatePanels(Panels):
    """A GatePanels has panels of gate and up, whose columns lie in turn, LANES of each: the kernel applies the gate to
    what it has just summed, and no copy of gate and up is made in memory. Blocks have them in turn already."""

    has_gate = True

    @staticmethod
    def side_by_side(parts: Sequence[kernels.StoredRows]) -> Sequence[kernels.StoredRows]:
        starts = range(0, len(parts[0].rows), LANES)
        return [kernels.StoredRows(part.type, part.rows[at : at + LANES]) for at in starts for part in parts]

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether gate and up have whole LANES of columns."""
        return len(weight) % (2 * LANES) == 0

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().__call__(x)
        out = out.view(len(x), self.outputs // (2 * LANES), 2, LANES).transpose(1, 2).reshape(len(x), self.outputs)
        return out if bias is None else out + bias

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        bias = None if bias is None else in_turn(bias)
        width = self.outputs // 2
        return tensor_of(self._compiled.gated_linear(array_of(x), self.packed, width, array_of(bias), activation))


def in_turn(columns: Tensor) -> Tensor:
    """Returns what has an entry for each column of gate, then of up, with LANES of each in turn."""
    return columns.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)


class _LogitsBuffer:
    """A _LogitsBuffer gives memory for logits: that of the last call, once nothing refers to it any more. Fresh pages
    would cost as much again as a tenth to a third of the product."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)
        self._references = sys.getrefcount(self._memory)  # while nothing else refers to it

    def take(self, rows: int, columns: int) -> np.ndarray:
        """Returns an uninitialised float32 array [rows, columns]."""
        size = rows * columns
        if len(self._memory) < size or sys.getrefcount(self._memory) > self._references:
            self._memory = np.empty(size, np.float32)
        return self._memory[:size].reshape(rows, columns)


def pack(weight: Tensor, pool: kernels.PanelPool | None = None, *, gated: bool = False) -> Product | None:
    """Returns the fastest product with a copy of `weight` [outputs, inputs]; None where PyTorch's own is as fast.

    pool: where the memory of Panels comes from. gated: half of the outputs is gate, half up.
    """
    if compiled := product_kernels(weight):
        kind = GatePanels if gated and GatePanels.takes(weight) else Panels
        return kind(weight, compiled, pool)
    return OneDNN(weight) if packs_with_onednn(weight) else None


def pack_head(weight: Tensor) -> Product | None:
    """Returns the fastest `wide` product with a copy of an LM head [vocabulary, hidden]; None where PyTorch's own is as
    fast, or there is no room for a copy."""
    weight = weight.detach()
    if weight.device.type != "cpu" or 2 * weight.nbytes > available_memory(weight.device):
        return None
    if compiled := product_kernels(weight):
        return Panels(weight, compiled)
    if weight.dtype == torch.bfloat16:  # slower kernels are still faster than widening the weight in every call
        compiled = kernels.load()
        return Panels(weight, compiled) if compiled and can_pack(weight) else None
    return OneDNN(weight) if packs_with_onednn(weight) else None


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [rows, inputs] times weight [outputs, inputs] by PyTorch, summed and kept in float32 (float64 where
    both are).

    Differentiable.
    """
    if x.is_cuda and x.dtype == weight.dtype != torch.float32 and not torch.is_grad_enabled():
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    x = wide(x)
    if weight.dtype == x.dtype:
        return F.linear(x, weight)
    return torch.cat([F.linear(x, part.float()) for part in weight.split(HEAD_COLUMNS)], 1)


def row_by_row(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return product(x) of x [rows, inputs], computed a row at a time: PyTorch adds in another order if there are more
    rows."""
    return torch.cat([product(row) for row in x.split(1)]) if len(x) > 1 else product(x)


def packs_with_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with such a weight natively on this CPU.

    Measured on two AVX-512 bf16 cores, at 512 and more rows: 2 to 7 % faster in bfloat16, 11 to 25 % in float32;
    at 1 to 16 rows mostly 1.3 to 3 times.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return computes_bf16() if weight.dtype == torch.bfloat16 else weight.dtype == torch.float32


def product_kernels(weight: Tensor) -> kernels.Kernels | None:
    """Returns our own kernels where they multiply with such a weight at least as fast as oneDNN; else None.

    On AVX-512, beside oneDNN's packed linears: 2 to 2.3 times at 1 to 4 rows, 1.4 at 16, 1.1 at 64, 1 to 1.05 at
    256 and more. On AVX2 (Zen 3), in float32: 1.4 to 1.6 times at 1 to 3 rows, 1 to 1.2 at more; in bfloat16, beside
    oneDNN in float32, 1.3 to 2.5 times at up to 8 rows. On AMX, in bfloat16: 1.3 to 2 times at up to 64 rows, 1 to 1.3
    at more.
    """
    if weight.device.type != "cpu" or not can_pack(weight):
        return None
    compiled = kernels.load()
    return compiled if compiled and compiled.has_products(ARRAY_DTYPES[weight.dtype]) else None


def can_pack(weight: Tensor) -> bool:
    """Returns whether a weight [outputs, inputs] can be packed for the compiled kernels."""
    return kernels.can_pack_words(ARRAY_DTYPES.get(weight.dtype), weight.shape[1])
