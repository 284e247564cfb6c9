"""The gated delta rule, in chunks (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule").

A row decays the state S [key dim, value dim] and corrects what S gives for its key k to its value v:

    S = exp(decay) S;  S = S + beta k (v - S^T k)^T;  o = S^T q
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of a chunk, within which all is products of matrices.
CHUNK = 64


def unit(x: Tensor) -> Tensor:
    """Returns vectors [..., dim] of length 1, but for a small number under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o [runs, rows, heads, value dim], and the states at the ends of the runs.

    q, k         float32 [runs, rows, key heads, key dim]: each key head is that of some neighbouring heads; q is scaled
                 by the root of the key dim here. Rows of zeros change nothing
    v            float32 [runs, rows, heads, value dim]
    decay, beta  float32 [runs, rows, heads]
    start        float32 [runs, heads, key dim, value dim]
    """
    rows, shared = q.shape[1], v.shape[2] // k.shape[2]
    q = q * q.shape[-1] ** -0.5
    if rows == 1:
        return _one_row(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], start, shared)
    # Powers of two: few shapes, and little that is padded.
    chunk = min(CHUNK, 1 << (rows - 1).bit_length())
    more = -rows % chunk
    if more:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
        decay, beta = (F.pad(x, (0, 0, 0, more)) for x in (decay, beta))
    # [runs, heads, chunks, chunk, ...]
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v))
    decay, beta = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (decay, beta))
    kk, qk = k @ k.mT, q @ k.mT
    q, k, kk, qk = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (q, k, kk, qk))
    total = decay.cumsum(-1)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
    # What each row adds to the state depends on what the rows before it in the chunk added: a triangular system, whose
    # unknowns are linear in the state at the chunk's beginning.
    system = kk.mul_(between).mul_(beta[..., None])
    grown = total.exp()
    known = torch.cat((v * beta[..., None], k * (beta * grown)[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    inner = qk.mul_(between)
    q = q * grown[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    left = grown[..., -1, None, None]
    out, state = torch.empty_like(values), start
    for at in range(q.shape[2]):
        added = values[:, :, at] - keys[:, :, at] @ state
        out[:, :, at] = q[:, :, at] @ state + inner[:, :, at] @ added
        state = state * left[:, :, at] + k[:, :, at].mT @ added
    return out.flatten(2, 3)[:, :, :rows].transpose(1, 2), state


def _one_row(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    """Returns what `gated_delta` does for runs of one row; the arguments are those without the dimension of rows."""
    if shared > 1:
        q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
    state = start * decay.exp()[..., None, None]
    added = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state.addcmul_(k[..., :, None], added[..., None, :])
    return (q[..., None, :] @ state).transpose(1, 2), state
