"""The gated delta rule, in chunks (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule").

A row decays the state S [key dim, value dim] and corrects what S gives for its key k to its value v:

    S = exp(decay) S;  S = S + beta k (v - S^T k)^T;  o = S^T q
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    runs, rows, heads = v.shape[:3]
    shared = heads // k.shape[2]
    q = q * q.shape[-1] ** -0.5
    if rows == 1:
        return _one_row(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], start, shared)
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x for x in (q, k, v))
    # A matrix for each run and head.
    q, k, v, decay, beta = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v, decay, beta))
    out, state = torch.empty_like(v), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        out[:, chunk], state = _chunk(q[:, chunk], k[:, chunk], v[:, chunk], decay[:, chunk], beta[:, chunk], state)
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o [matrices, rows, value dim] of the rows of a chunk, and the state behind them; the arguments are those
    of `gated_delta` by matrices."""
    total = decay.cumsum(1)
    between = power(total[:, :, None] - total[:, None, :]).tril_()
    grown = power(total)
    # What each row adds to the state depends on what the rows before it in the chunk added: a triangular system, whose
    # right side has the part that is linear in the state at the chunk's beginning.
    system = torch.bmm(k, k.mT).mul_(between).mul_(beta[..., None])
    prediction = torch.bmm(k, state).mul_(grown[..., None]).neg_().add_(v).mul_(beta[..., None])
    added = torch.linalg.solve_triangular(system, prediction, upper=False, unitriangular=True)
    inner = torch.bmm(q, k.mT).mul_(between)
    out = torch.bmm(q, state).mul_(grown[..., None]).baddbmm_(inner, added)
    remaining = power(total[:, -1:] - total)[..., None]
    return out, (state * grown[:, -1:, None]).baddbmm_((k * remaining).mT, added)


def power(exponent: Tensor) -> Tensor:
    """Returns e to the power of sums of decays, which are no more than 0. What lies above is not used; what decays to
    less than e ** -60 is far below what rounding loses, and smaller numbers would be slow."""
    return exponent.clamp(-60, 0).exp_()


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
