"""The operations of recurrent layers, by tensors: layers that carry a state along the sequence in place of attention.

Gated DeltaNet computes the gated delta rule in chunks (Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with
Delta Rule"). Mamba-2 is the recurrent layer of Granite 4, Nemotron-H and Falcon-H1 (Dao and Gu 2024, "Transformers are
SSMs").
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UnsupportedModelError
from ...model.program import GatedDelta, Mamba2, ShortConv
from ...worker.torch.operations import Rows, Weights
from ...worker.torch.ops import PYTORCH
from .carry import Carry, Group, LayerStates

# Rows of a chunk. A chunk is computed by matrix products.
CHUNK = 64


def unit(x: Tensor) -> Tensor:
    """Return `x / sqrt(|x|^2 + 1e-6)` of vectors [..., dim]."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor, tiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (outputs [runs, rows, heads, value dim], the states after the runs).

    Args:
        q: float32 [runs, rows, key heads, key dim], unscaled; it is divided by sqrt(key dim) here. Several heads share
            a key head. Rows of zeros change nothing
        k: float32, shaped as q
        v: float32 [runs, rows, heads, value dim]
        decay: float32 [runs, rows, heads]
        beta: float32 [runs, rows, heads]
        start: float32 [runs, heads, key dim, value dim]
        tiled: how heads share key heads, as in GatedDelta
    """
    runs, rows, heads = v.shape[:3]
    q = q * q.shape[-1] ** -0.5
    if (shared := heads // k.shape[2]) > 1:
        q, k = (x.repeat(1, 1, shared, 1) if tiled else x.repeat_interleave(shared, 2) for x in (q, k))
    if rows == 1:
        return _one_row(q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0], start)
    # One matrix per run and head.
    q, k, v, decay, beta = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v, decay, beta))
    out, state = torch.empty_like(v), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        out[:, chunk], state = _chunk(q[:, chunk], k[:, chunk], v[:, chunk], decay[:, chunk], beta[:, chunk], state)
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the outputs of a chunk's rows [matrices, rows, value dim], the state after them).

    Arguments are as in `gated_delta`, with one matrix per run and head.
    """
    total = decay.cumsum(1)
    between = power(total[:, :, None] - total[:, None, :]).tril_()
    grown = power(total)
    # Each row's change of the state depends on the changes by earlier rows of the chunk: a triangular system. Its right
    # side includes the part that is linear in the state at the start of the chunk.
    system = torch.bmm(k, k.mT).mul_(between).mul_(beta[..., None])
    prediction = torch.bmm(k, state).mul_(grown[..., None]).neg_().add_(v).mul_(beta[..., None])
    added = torch.linalg.solve_triangular(system, prediction, upper=False, unitriangular=True)
    inner = torch.bmm(q, k.mT).mul_(between)
    out = torch.bmm(q, state).mul_(grown[..., None]).baddbmm_(inner, added)
    remaining = power(total[:, -1:] - total)[..., None]
    return out, (state * grown[:, -1:, None]).baddbmm_((k * remaining).mT, added)


def power(exponent: Tensor) -> Tensor:
    """Return `exp(exponent)` for sums of decays, clamped to [-60, 0].

    Positive exponents occur only above the diagonal, which is not used. Values below exp(-60) are far below rounding
    errors, and denormal numbers would be slow.
    """
    return exponent.clamp(-60, 0).exp_()


def _one_row(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gated_delta` for runs of one row. Arguments lack the dimension of rows; q and k have all heads."""
    state = start * decay.exp()[..., None, None]
    added = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state.addcmul_(k[..., :, None], added[..., None, :])
    return (q[..., None, :] @ state).transpose(1, 2), state


def states_of(rows: Rows, layer: int) -> LayerStates:
    """Return the states of a layer. Raise UnsupportedModelError without states, or if gradients are enabled."""
    if rows.states is None or torch.is_grad_enabled():
        raise UnsupportedModelError("a model with recurrent layers runs only in an engine, and cannot be trained")
    return cast(Carry, rows.states).of(layer)


def short_conv(operation: ShortConv, weights: Weights, rows: Rows) -> None:
    """The gated short convolution of LFM2."""
    x, states = rows.get(operation.source), states_of(rows, operation.layer)
    read = rows.read if operation.picked else None
    b, c, x = x.chunk(3, -1)
    y = states.conv(0, b * x, weights.taps[:, 0], weights.bias)
    rows.put(operation.out, c * y if read is None else c[read] * y[read])


def gated_delta_net(operation: GatedDelta, weights: Weights, rows: Rows) -> None:
    """The linear attention of Qwen3.5 (Yang et al. 2024, "Gated Delta Networks").

    Queries, keys and values pass a short convolution. Each row decays and corrects the state of each head.
    Source: modeling_qwen3_5.py of transformers.
    """
    x, states = rows.get(operation.source), states_of(rows, operation.layer)
    read = rows.read if operation.picked else None
    carry, heads, dim = states.carry, operation.heads, operation.value_dim
    keys, values = operation.key_heads * operation.key_dim, heads * dim
    qkv, z, b, a = x.split([2 * keys + values, values, heads, heads], -1)
    qkv = F.silu(states.conv(0, qkv, weights.taps[:, 0]))
    beta = operation.beta_scale * b.sigmoid().float()
    decay = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias)
    qkv, beta, decay = carry.unfold(qkv), carry.unfold(beta), carry.unfold(decay)
    q, k, v = qkv.split([keys, keys, values], -1)
    q, k = (unit(x.unflatten(-1, (operation.key_heads, -1)).float()) for x in (q, k))
    v = v.unflatten(-1, (heads, -1)).float()

    def scan(start: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        by_runs = group.pick
        o, end = gated_delta(by_runs(q), by_runs(k), by_runs(v), by_runs(decay), by_runs(beta), start, operation.tiled)
        return o.flatten(2), end

    o = states.scan(1, scan, values, torch.float32)
    if read is not None:
        o, z = o[read], z[read]
    o = o.to(x.dtype).unflatten(-1, (heads, dim))
    o = PYTORCH.add_rms_norm(o, None, weights.norm, operation.eps)[1]
    o = (o.float() * F.silu(z.unflatten(-1, (heads, dim)).float())).to(x.dtype)
    rows.put(operation.out, o.flatten(1))


def mamba2(operation: Mamba2, weights: Weights, rows: Rows) -> None:
    """Mamba-2: x, keys b and queries c pass a short convolution; the heads of a group share b and c.

    Source: modeling_granitemoehybrid.py of transformers.
    """
    h, states = rows.get(operation.source), states_of(rows, operation.layer)
    read, carry, heads = rows.read if operation.picked else None, states.carry, operation.heads
    inner, channels, groups = heads * operation.dim, len(weights.taps), operation.groups
    scales, sizes = zip(*operation.section_scales, strict=True)
    gate, xbc, dt = h.split([inner, channels, heads], -1)
    taps = weights.taps[:, 0]
    if operation.scales != (1.0,) * 5:  # a factor of a convolution's input can be applied to its taps
        taps = torch.cat([scale * part for part, scale in zip(taps.split(sizes), scales, strict=True)])
    xbc = F.silu(states.conv(0, xbc, taps, weights.conv_bias))
    gate_scale, step_scale = operation.scales[0], operation.scales[-1]
    step = F.softplus(step_scale * dt.float() + weights.dt_bias.float()).clamp(*operation.limits)
    # In a folded step (sharing="mlp"), x has one row per row of the stream from here on.
    parts = carry.unfold(xbc).float().split(sizes, -1)
    x, b, c = (part.unflatten(-1, (number, -1)) for part, number in zip(parts, (heads, groups, groups), strict=True))
    step = carry.unfold(step)
    decay = -weights.a_log.float().exp() * step

    def scan(start: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        by_runs = group.pick
        y, end = state_space(by_runs(c), by_runs(b), by_runs(x), by_runs(decay), by_runs(step), start)
        return y.flatten(2), end

    y = states.scan(1, scan, inner, torch.float32)
    y = y + (carry.fold(x) * weights.d.float()[:, None]).flatten(1)
    if read is not None:
        y, gate = y[read], gate[read]
    y, gate = y.to(h.dtype).float(), F.silu(gate_scale * gate.float())
    y = y if operation.norm_first else y * gate
    if weights.norm is not None:
        y = y.unflatten(-1, (groups, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + operation.eps)).flatten(1)
        y = weights.norm * y.to(h.dtype)
    rows.put(operation.out, (y * gate if operation.norm_first else y).to(h.dtype))


def state_space(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, step: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y [runs, rows, heads, head dim], the states after the runs), computed in chunks.

    Args:
        c: float32 [runs, rows, groups, state size]; neighbouring heads share a group
        b: float32, shaped as c
        x: float32 [runs, rows, heads, head dim]. Rows of zeros change nothing
        decay: float32 [runs, rows, heads], at most 0
        step: float32 [runs, rows, heads]
        start: float32 [runs, heads, state size, head dim]
    """
    runs, rows, heads = x.shape[:3]
    c, b = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (c, b))
    # One matrix per run and head.
    c, b, x, decay, step = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (c, b, x, decay, step))
    out, state = torch.empty_like(x), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        total = decay[:, chunk].cumsum(1)
        inner = torch.bmm(c[:, chunk], b[:, chunk].mT) * power(total[:, :, None] - total[:, None, :]).tril_()
        out[:, chunk] = torch.bmm(c[:, chunk], state) * power(total)[..., None]
        out[:, chunk] += torch.bmm(inner * step[:, None, chunk], x[:, chunk])
        remaining = power(total[:, -1:] - total) * step[:, chunk]
        state = state * power(total[:, -1:])[..., None] + torch.bmm(
            (b[:, chunk] * remaining[..., None]).mT, x[:, chunk]
        )
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))
