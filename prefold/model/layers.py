"""The linear layer, with its weight packed where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels

__all__ = ["Linear", "can_pack", "product_kernels"]


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
            self.compiled, self.packed = compiled, kernels.pack_words(self.weight, pool)
        elif can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        else:
            return
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled.linear(x, self.packed, self.outputs, self.bias)
        if self.weight is not None:
            return nn.functional.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.outputs}{', packed' if self.packed is not None else ''}"


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with such a weight natively on this CPU.

    Measured on two AVX-512 bf16 cores, at 512 and more rows: 2 to 7 % faster in bfloat16, 11 to 25 % in float32;
    at 1 to 16 rows mostly 1.3 to 3 times.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
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
