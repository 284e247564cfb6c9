"""Which attention kernels take what: everything they can, for they are faster than PyTorch's.

benchmarks/attention.py and benchmarks/gpu.py --sections kernels measure them beside others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from ..device import TRITON_DTYPES, runs_triton

__all__ = ["Heads"]

# Of the kernels in Triton.
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads say what attention is over. heads: of queries; dtype: of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Returns how many query heads share a KV head."""
        return self.heads // self.kv_heads

    def compiled(self, device: torch.device) -> kernels.Kernels | None:
        """Returns the compiled kernels where they are there and take such heads on this device, else None."""
        fits = device.type == "cpu" and self.dtype in kernels.DTYPES and 1 <= self.head_dim <= kernels.MAX_HEAD_DIM
        return kernels.load() if fits else None

    def fits(self, device: torch.device) -> bool:
        """Returns whether Triton's kernels take such heads on this device."""
        return self.head_dim <= MAX_HEAD_DIM and self.dtype in TRITON_DTYPES and runs_triton(device)
