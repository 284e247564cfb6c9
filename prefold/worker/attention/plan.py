"""What attention over rows and over slots have in common: heads, and which kernels take them, and plans.

Kernels take everything they can, for they are faster than PyTorch's. benchmarks/gpu.py --sections kernels measures
them beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...model.arrays import ARRAY_DTYPES
from ...model.device import TRITON_DTYPES, runs_triton

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
    invariant  whether the result of a query is the same, bit for bit, whatever other queries a step has
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cap: float | None = None
    kept: torch.dtype | None = None
    invariant: bool = False

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
        return fits and runs_triton(device)


@dataclass(frozen=True)
class Plan:
    """A plan of attention keeps what has been made of it for a device, so that each plane of a step finds it there."""

    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what `make` gives, made once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def check_sinks(sinks: Tensor | None, heads: Heads) -> None:
    """Raises ValueError where there are sinks, and not one for each query head."""
    if sinks is not None and sinks.shape != (heads.heads,):
        raise ValueError(f"sinks {list(sinks.shape)} do not fit {heads.heads} heads; pass a number for each")


def window_positions(window: int | None, positions: np.ndarray | None, count: int) -> np.ndarray | None:
    """Returns positions as contiguous int64 [count] where there is a sliding window, else None.

    Raises ValueError for a window below 1, and where positions are missing or not `count`.
    """
    if window is None:
        return None
    if window < 1 or positions is None or len(positions) != count:
        raise ValueError(
            f"a sliding window of {window} with {0 if positions is None else len(positions)} positions of {count} rows"
            "; pass a window of at least 1, and the position of each row"
        )
    return np.ascontiguousarray(positions, dtype=np.int64)
