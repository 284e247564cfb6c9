"""The residual stream's norm; linears, with the weight packed where that is faster."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kernels
from ..device import computes_bf16
from .ops import add_layer_norm, add_rms_norm, gelu_mul, silu_mul

__all__ = ["GATES", "ActivatedLinear", "GatedLinear", "Linear", "Norm", "can_pack", "product_kernels"]

# By ModelConfig.activation.
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
# Both halves of [rows, 2 * width] to what an MLP goes on with, by ModelConfig.activation.
GATES = {"silu": silu_mul, "gelu_tanh": gelu_mul}
LANES = 16  # columns of gate, or of up, that lie side by side in a packed GatedLinear


class Norm(nn.Module):
    """x, delta [rows, size] -> x + delta, and its norm. kind: "rms", or "layer", which has a bias."""

    def __init__(self, size: int, *, kind: str, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device)) if kind == "layer" else None

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.bias is None:
            return add_rms_norm(x, delta, self.weight, self.eps)
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps)


class Linear(nn.Module):
    """x [rows, inputs] -> [rows, outputs]; weight [outputs, inputs], bias [outputs] or None.

    `pack` replaces the weight by a copy in the layout of our kernels or of oneDNN (and frees it): the same
    products and sums, but no reordering in every call. A packed layer has no gradient.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight: Tensor | None = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.packed: Tensor | None = None
        self.compiled: kernels.Kernels | None = None  # where `packed` is in its layout

    def pack(self, pool: kernels.Pool | None = None) -> None:
        """pool: where the memory of our own layout comes from."""
        if self.weight is None:
            return
        if compiled := product_kernels(self.weight):
            self.compiled, self.packed = compiled, kernels.pack_words(self._in_packed_order(self.weight), pool)
        elif can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        else:
            return
        self.weight = None

    def _in_packed_order(self, columns: Tensor) -> Tensor:
        """What has an entry a column, in the order of our own layout."""
        return columns

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled.linear(x, self.packed, self.outputs, self.bias)
        if self.weight is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.outputs}{', packed' if self.packed is not None else ''}"


class ActivatedLinear(Linear):
    """The linear that an MLP without a gate begins with, up: x [rows, inputs] -> [rows, width]."""

    def __init__(
        self, inputs: int, width: int, *, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
    ):
        super().__init__(inputs, width, bias=bias, dtype=dtype, device=device)
        self.activate = ACTIVATIONS[activation]

    def activated(self, x: Tensor) -> Tensor:
        """activation(up) [rows, width]"""
        return self.activate(self(x))


class GatedLinear(Linear):
    """The two linears of a gated MLP, gate and up, side by side: x [rows, inputs] -> [rows, 2 * width].

    `activated`, packed in our layout, makes no copy of gate and up in memory.
    """

    def __init__(
        self, inputs: int, width: int, *, activation: str, bias: bool, dtype: torch.dtype, device: torch.device
    ):
        super().__init__(inputs, 2 * width, bias=bias, dtype=dtype, device=device)
        self.width, self.activation, self.activate = width, activation, GATES[activation]
        self.mixes = width % LANES == 0  # gate and up can lie in turn

    def activated(self, x: Tensor) -> Tensor:
        """activation(gate) * up [rows, width]"""
        if self.compiled is None or not self.mixes:
            return self.activate(self(x))
        bias = None if self.bias is None else self._in_packed_order(self.bias)
        return self.compiled.gated_linear(x, self.packed, self.width, bias, self.activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled is None or not self.mixes:
            return super().forward(x)
        out = self.compiled.linear(x, self.packed, self.outputs)
        out = out.view(len(x), self.width // LANES, 2, LANES).transpose(1, 2).reshape(len(x), self.outputs)
        return out if self.bias is None else out + self.bias

    def _in_packed_order(self, columns: Tensor) -> Tensor:
        if not self.mixes:
            return columns
        return columns.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with such a weight natively on this CPU.

    Measured on two AVX-512 bf16 cores, at 512 and more rows: 2 to 7 % faster in bfloat16, 11 to 25 % in float32;
    at 1 to 16 rows mostly 1.3 to 3 times.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return computes_bf16()
    return weight.dtype == torch.float32


def product_kernels(weight: Tensor) -> kernels.Kernels | None:
    """Our own kernels where they multiply with such a weight at least as fast as oneDNN.

    On AVX-512, beside oneDNN's packed linears: 2 to 2.3 times at 1 to 4 rows, 1.4 at 16, 1.1 at 64, 1 to 1.05 at
    256 and more. Not where there is AMX, which oneDNN has for bfloat16 and we have not.
    """
    if weight.device.type != "cpu" or not kernels.can_pack_words(weight):
        return None
    if weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return None
    compiled = kernels.load()
    return compiled if compiled and compiled.has_products(weight.dtype) else None
