"""The LM head's product, with its weight packed where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from .layers import can_pack
from .memory import available_memory

__all__ = ["PackedHead", "pack_head"]


class PackedHead:
    """x [rows, hidden] -> float32 [rows, vocabulary]; a packed copy of a weight [vocabulary, hidden].

    In bfloat16 our own kernel, for want of a product in PyTorch that keeps its float32 sums; in float32
    oneDNN's. No gradients.
    """

    def __init__(self, weight: Tensor, compiled: kernels.Kernels | None):
        self.vocab = len(weight)
        self.dtype = weight.dtype
        self.compiled = compiled
        if compiled is not None:
            self.packed = kernels.pack_pairs(weight)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled.head(x.to(self.dtype), self.packed, self.vocab)
        return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, None, "none", [], "")


def pack_head(weight: Tensor) -> PackedHead | None:
    """The packed copy of an LM head, or None where there is no faster product, or no room for a copy."""
    weight = weight.detach()
    if weight.device.type != "cpu" or 2 * weight.nbytes > available_memory(weight.device):
        return None
    if weight.dtype == torch.bfloat16:
        compiled = kernels.load()
        return PackedHead(weight, compiled) if compiled and weight.shape[1] % 2 == 0 else None
    return PackedHead(weight, None) if can_pack(weight) else None
