"""What a device affords: how many rows a step may have where nobody says, and what its kernels took to compile."""

from __future__ import annotations

import torch

from ..kernels.gpu import compile_seconds, runs_triton
from ..model import CausalLM
from ..model.memory import available_memory
from ..types import Stats

__all__ = ["batch_rows", "count_compiling", "free_cached"]

# On a CPU larger steps hardly gain, and their intermediates are held in memory.
ROWS_ON_CPU = 4096
# A GPU is at its best from some thousand rows on; beyond these only the baselines gain, which share within a step.
MOST_ROWS, LEAST_ROWS = 65_536, 1024
# Of the memory that is free: the rest is for K/V, and for what the allocator cannot use.
SHARE = 0.25


def batch_rows(model: CausalLM) -> int:
    """Rows of one step of this model, on the memory that its device has free now."""
    if model.device.type == "cpu":
        return ROWS_ON_CPU
    local = model.local
    # At its fullest in the MLP: the residual stream, its norm, gate and up, and their product.
    row = model.dtype.itemsize * (2 * local.hidden + 3 * local.intermediate + local.q_size + 2 * local.kv_size)
    rows = int(available_memory(model.device) * SHARE) // row
    return max(LEAST_ROWS, min(MOST_ROWS, rows // 1024 * 1024))


def free_cached(device: torch.device) -> None:
    """Give back what torch keeps for later, after memory has run out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def count_compiling(stats: Stats, device: torch.device) -> None:
    """Add what compiling kernels took since this was last called, as the part "compile", which lies within "model"."""
    if runs_triton(device) and (seconds := compile_seconds()):
        stats.add_seconds("compile", seconds)
