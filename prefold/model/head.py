"""The LM head's product, with its weight packed where that is faster."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..device import available_memory
from .layers import can_pack, product_kernels

__all__ = ["PackedHead", "pack_head"]


class PackedHead:
    """x [rows, hidden] -> float32 [rows, vocabulary]; a packed copy of a weight [vocabulary, hidden].

    compiled: our own kernels, which in bfloat16 keep their float32 sums, as no product of PyTorch does; None:
    oneDNN, for float32. No gradients.
    """

    def __init__(self, weight: Tensor, compiled: kernels.Kernels | None):
        self.vocab = len(weight)
        self.compiled = compiled
        self.memory = np.empty(0, np.float32)
        self.references = sys.getrefcount(self.memory)  # while nobody else holds it
        if compiled is not None:
            self.packed = kernels.pack_words(weight)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled.linear(x, self.packed, self.vocab, out=self.take(len(x)))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")

    def take(self, rows: int) -> Tensor:
        """Memory for logits: the last call's, once nobody holds those any more. Fresh pages would cost as much again
        as a tenth to a third of the product."""
        size = rows * self.vocab
        if len(self.memory) < size or sys.getrefcount(self.memory) > self.references:
            self.memory = np.empty(size, np.float32)
        return torch.from_numpy(self.memory)[:size].view(rows, self.vocab)


def pack_head(weight: Tensor) -> PackedHead | None:
    """The packed copy of an LM head, or None where there is no faster product, or no room for a copy."""
    weight = weight.detach()
    if weight.device.type != "cpu" or 2 * weight.nbytes > available_memory(weight.device):
        return None
    if compiled := product_kernels(weight):
        return PackedHead(weight, compiled)
    if weight.dtype == torch.bfloat16:  # slower kernels are still faster than widening the weight in every call
        compiled = kernels.load()
        return PackedHead(weight, compiled) if compiled and kernels.can_pack_words(weight) else None
    return PackedHead(weight, None) if can_pack(weight) else None
