"""Multiply each expert's rows with its matrix, in Triton.

Only the device has the number of rows per expert. So the host never waits for it, and one captured graph serves all
steps of a size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Block sizes; not measured on a GPU yet.
ROWS, COLUMNS, STEP = 16, 64, 32


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Compute `experts.grouped`. No gradients."""
    (rows, inputs), (experts, outputs, _) = x.shape, matrices.shape
    x, matrices = x.contiguous(), matrices.contiguous()
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # Each block has rows of one expert. The number of blocks is an upper bound: the last blocks may have no rows.
    counts = ends.diff(prepend=ends.new_zeros(1))
    last = ((counts + ROWS - 1) // ROWS).cumsum(0)
    block = torch.arange(-(-rows // ROWS) + experts, device=x.device)
    expert = torch.searchsorted(last, block, right=True).clamp(max=experts - 1)
    stop = ends[expert]
    first = stop - counts[expert] + ROWS * (block - last[expert] + (counts[expert] + ROWS - 1) // ROWS)
    if rows:
        _grouped[(len(block), triton.cdiv(outputs, COLUMNS))](
            x, matrices, out, expert, first, stop, inputs, outputs, ROWS=ROWS, COLUMNS=COLUMNS, STEP=STEP,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _grouped(
    X, MATRICES, OUT, EXPERT, FIRST, STOP, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.load(FIRST + tl.program_id(0))
    stop = tl.load(STOP + tl.program_id(0))
    if first >= stop:
        return
    row = first + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    weights = MATRICES + tl.load(EXPERT + tl.program_id(0)) * outputs * inputs + column[None, :] * inputs
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, inputs, STEP):
        at = begin + tl.arange(0, STEP)
        x = tl.load(
            X + row[:, None] * inputs + at[None, :], mask=(row < stop)[:, None] & (at < inputs)[None, :], other=0.0
        )
        w = tl.load(weights + at[:, None], mask=(column < outputs)[None, :] & (at < inputs)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    mask = (row < stop)[:, None] & (column < outputs)[None, :]
    tl.store(OUT + row[:, None] * outputs + column[None, :], acc.to(OUT.dtype.element_ty), mask=mask)
