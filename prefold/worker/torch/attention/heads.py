"""The heads that attention is over, and which kernels take them.

Kernels take everything they can, for they are faster than PyTorch's. benchmarks/gpu.py --sections kernels measures
them beside others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .... import kernels
from ....model.config import KVSizes
from ..device import TRITON_DTYPES, runs_triton
from ..tensors import ARRAY_DTYPES

# Of the kernels in Triton.
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads say what attention is over.

    heads  of queries
    dtype  of q, k and v
    cap    scores s become cap * tanh(s / cap) before their softmax, which Triton's kernels do not compute; None: they
           stay
    kept   the dtype of keys and values in a KV store; None: dtype
    values   numbers of a value; None: head_dim
    in_keys  whether a value is the first numbers of its key, and a KV store keeps it once
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cap: float | None = None
    kept: torch.dtype | None = None
    values: int | None = None
    in_keys: bool = False

    @property
    def value_dim(self) -> int:
        """Return how many numbers a value has."""
        return self.head_dim if self.values is None else self.values

    @property
    def sizes(self) -> KVSizes:
        """Return the sizes of keys and values."""
        return KVSizes(self.kv_heads, self.head_dim, self.value_dim, self.in_keys)

    @property
    def group(self) -> int:
        """Returns how many query heads share a KV head."""
        return self.heads // self.kv_heads

    def compiled(self, device: torch.device) -> kernels.Kernels | None:
        """Returns the compiled kernels where they are there and take such heads on this device, else None."""
        fits = device.type == "cpu" and self.dtype in ARRAY_DTYPES and 1 <= self.head_dim <= kernels.MAX_HEAD_DIM
        return kernels.load() if fits else None

    def fits(self, device: torch.device) -> bool:
        """Returns whether Triton's kernels take such heads on this device."""
        fits = self.head_dim <= MAX_HEAD_DIM and self.dtype in TRITON_DTYPES and self.cap is None
        fits = fits and self.values in (None, self.head_dim)
        return fits and runs_triton(device)


def check_sinks(sinks: Tensor | None, heads: Heads) -> None:
    """Raises ValueError where there are sinks, and not one for each query head."""
    if sinks is not None and sinks.shape != (heads.heads,):
        raise ValueError(f"sinks {list(sinks.shape)} do not fit {heads.heads} heads; pass a number for each")
