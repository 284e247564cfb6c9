"""Products of rows with a matrix: the code that multiplies, and the memory layout of the matrix.

A `Linear` or the LM head multiplies with PyTorch and its plain weight, or holds a `Product`, which has the weight in a
layout of its own. This file makes packed layouts; callers can assign other products (quantised, merged, ...).
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ... import kernels
from ...kernels import LANES
from ...model.machine import computes_bf16
from .device import available_memory
from .ops import wide
from .tensors import ARRAY_DTYPES, array_of, tensor_of

# Vocabulary entries of an LM head that are converted to float32 at once.
HEAD_COLUMNS = 4096


class Product:
    """A matrix [outputs, inputs] to multiply rows with. A subclass needs only `__call__`."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [rows, inputs] times the matrix, plus bias [outputs]: [rows, outputs], in x's dtype."""
        raise NotImplementedError

    def wide(self, x: Tensor) -> Tensor:
        """Return x [rows, inputs] times the matrix in float32, for logits. Best without rounding the sums first."""
        return self(x).float()

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor | None:
        """Return activation(gate) * up [rows, outputs / 2]; the first half of the outputs is gate, the second half up.

        None: the whole product is as fast.
        """
        return None


class OneDNN(Product):
    """A copy of a weight in oneDNN's layout, which avoids reordering it in every call. No gradients."""

    def __init__(self, weight: Tensor):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class Panels(Product):
    """A copy of a weight [outputs, inputs] in the layout of the compiled kernels (`Kernels.pack_words`). No gradients.

    Args:
        pool: Allocates the memory.
    """

    has_gate = False  # the outputs are gate and up, interleaved

    def __init__(self, weight: Tensor, compiled: kernels.Kernels, pool: kernels.PanelPool | None = None):
        self._compiled, self.outputs = compiled, len(weight)
        self.packed = compiled.pack_words(array_of(weight), pool, gated=self.has_gate)
        self._memory = _LogitsBuffer()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return tensor_of(self._compiled.linear(array_of(x), self.packed, self.outputs, array_of(bias)))

    def wide(self, x: Tensor) -> Tensor:
        """Return the float32 sums without rounding. PyTorch has no bfloat16 product that does this on a CPU."""
        out = self._memory.take(len(x), self.outputs)
        return tensor_of(self._compiled.linear(array_of(x), self.packed, self.outputs, out=out))


class GatePanels(Panels):
    """Panels of gate and up, interleaved in blocks of LANES columns.

    The kernel applies the gate to the sums directly, so gate and up are never written to memory.
    """

    has_gate = True

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return True if gate and up have whole LANES of columns."""
        return len(weight) % (2 * LANES) == 0

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().__call__(x)
        out = out.view(len(x), self.outputs // (2 * LANES), 2, LANES).transpose(1, 2).reshape(len(x), self.outputs)
        return out if bias is None else out + bias

    def gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        if bias is not None:  # interleave it like the columns
            bias = bias.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
        width = self.outputs // 2
        return tensor_of(self._compiled.gated_linear(array_of(x), self.packed, width, array_of(bias), activation))


class _LogitsBuffer:
    """Memory for logits, reused once nothing refers to the last result.

    Fresh pages would make the product 10 to 33 % slower.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)
        self._references = sys.getrefcount(self._memory)  # the count without other references

    def take(self, rows: int, columns: int) -> np.ndarray:
        """Return an uninitialised float32 array [rows, columns]."""
        size = rows * columns
        if len(self._memory) < size or sys.getrefcount(self._memory) > self._references:
            self._memory = np.empty(size, np.float32)
        return self._memory[:size].reshape(rows, columns)


def pack(weight: Tensor, pool: kernels.PanelPool | None = None, *, gated: bool = False) -> Product | None:
    """Return the fastest product with a copy of `weight` [outputs, inputs]. None: PyTorch's own is as fast.

    Args:
        pool: Allocates the memory of Panels.
        gated: Half of the outputs is gate, half up.
    """
    if compiled := product_kernels(weight):
        kind = GatePanels if gated and GatePanels.takes(weight) else Panels
        return kind(weight, compiled, pool)
    return OneDNN(weight) if packs_with_onednn(weight) else None


def pack_head(weight: Tensor) -> Product | None:
    """Return the fastest `wide` product with a copy of an LM head [vocabulary, hidden].

    None: PyTorch's own product is as fast, or there is no memory for a copy.
    """
    weight = weight.detach()
    if weight.device.type != "cpu" or 2 * weight.nbytes > available_memory(weight.device):
        return None
    if compiled := product_kernels(weight):
        return Panels(weight, compiled)
    if weight.dtype == torch.bfloat16:  # even slow kernels are faster than converting the weight in every call
        compiled = kernels.load()
        return Panels(weight, compiled) if compiled and can_pack(weight) else None
    return OneDNN(weight) if packs_with_onednn(weight) else None


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [rows, inputs] times weight [outputs, inputs] in float32, with PyTorch (float64 if both are float64).

    Differentiable.
    """
    if x.is_cuda and x.dtype == weight.dtype != torch.float32 and not torch.is_grad_enabled():
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    x = wide(x)
    if weight.dtype == x.dtype:
        return F.linear(x, weight)
    return torch.cat([F.linear(x, part.float()) for part in weight.split(HEAD_COLUMNS)], 1)


def packs_with_onednn(weight: Tensor) -> bool:
    """Return True if oneDNN multiplies natively with this weight on this CPU.

    Measured on two AVX-512 bf16 cores. With 512 and more rows: 2 to 7 % faster in bfloat16, 11 to 25 % in float32. With
    1 to 16 rows: mostly 1.3 to 3 times as fast.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return computes_bf16() if weight.dtype == torch.bfloat16 else weight.dtype == torch.float32


def product_kernels(weight: Tensor) -> kernels.Kernels | None:
    """Return the compiled kernels if they multiply with this weight at least as fast as oneDNN, else None.

    Speed relative to oneDNN's packed linears. On AVX-512: 2 to 2.3 times at 1 to 4 rows, 1.4 at 16, 1.1 at 64, 1 to
    1.05 at 256 and more. On AVX2 (Zen 3), in float32: 1.4 to 1.6 times at 1 to 3 rows, 1 to 1.2 at more. On AVX2 in
    bfloat16, relative to oneDNN in float32: 1.3 to 2.5 times at up to 8 rows. On AMX, in bfloat16: 1.3 to 2 times at up
    to 64 rows, 1 to 1.3 at more.
    """
    if weight.device.type != "cpu" or not can_pack(weight):
        return None
    compiled = kernels.load()
    return compiled if compiled and compiled.has_products(ARRAY_DTYPES[weight.dtype]) else None


def can_pack(weight: Tensor) -> bool:
    """Return True if a weight [outputs, inputs] can be packed for the compiled kernels."""
    return kernels.can_pack_words(ARRAY_DTYPES.get(weight.dtype), weight.shape[1])
