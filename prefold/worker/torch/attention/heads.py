"""The shapes of attention heads, and the kernels that support them.

Kernels are used whenever they support the heads, because they are faster than PyTorch. `benchmarks/gpu.py --sections
kernels` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .... import kernels
from ....model.config import KVSizes
from ..device import TRITON_DTYPES, runs_triton
from ..tensors import ARRAY_DTYPES

# Maximum of the Triton kernels.
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """The shapes and dtypes of attention heads."""

    heads: int  # query heads
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of q, k and v
    # Scores s become cap * tanh(s / cap) before the softmax; Triton's kernels do not support this. None: no cap.
    cap: float | None = None
    kept: torch.dtype | None = None  # KV dtype of the store; None: dtype
    values: int | None = None  # numbers per value; None: head_dim
    in_keys: bool = False  # a value is the first numbers of its key, so a KV store holds it once

    @property
    def value_dim(self) -> int:
        """Return the numbers per value."""
        return self.head_dim if self.values is None else self.values

    @property
    def sizes(self) -> KVSizes:
        """Return the sizes of keys and values."""
        return KVSizes(self.kv_heads, self.head_dim, self.value_dim, self.in_keys)

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head."""
        return self.heads // self.kv_heads

    def compiled(self, device: torch.device) -> kernels.Kernels | None:
        """Return the compiled kernels if they are available and support these heads on this device, else None."""
        fits = device.type == "cpu" and self.dtype in ARRAY_DTYPES and 1 <= self.head_dim <= kernels.MAX_HEAD_DIM
        return kernels.load() if fits else None

    def fits(self, device: torch.device) -> bool:
        """Return True if the Triton kernels support these heads on this device."""
        fits = self.head_dim <= MAX_HEAD_DIM and self.dtype in TRITON_DTYPES and self.cap is None
        fits = fits and self.values in (None, self.head_dim)
        return fits and runs_triton(device)


def check_sinks(sinks: Tensor | None, heads: Heads) -> None:
    """Raise ValueError if sinks are given and there is not exactly one per query head."""
    if sinks is not None and sinks.shape != (heads.heads,):
        raise ValueError(f"sinks {list(sinks.shape)} do not fit {heads.heads} heads; pass one number per query head")
