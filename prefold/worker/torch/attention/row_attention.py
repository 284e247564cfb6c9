"""Attention over rows: with the compiled kernel, with Triton, or in PyTorch.

The PyTorch code gathers keys for blocks of queries. It runs on any device and float dtype, and is differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from ...attention.row_plan import RowPlan, plan_rows
from ..tensors import array_of, tensor_of
from . import gpu
from .heads import Heads, check_sinks


def blocked_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of q [queries, heads, dim] over keys and values [keys, kv_heads, dim], shaped like q.

    Each block of queries is one scaled_dot_product_attention, so memory grows with the block, not with the square of
    the step. A key or value that is not finite makes exactly the rows that see it NaN.

    Args:
        cap: As in Heads.
        sinks: As in `RowAttention.attend`.
    """
    return _BlockedAttention.apply(q, keys, values, sinks, plan, scale, cap)


class _BlockedAttention(torch.autograd.Function):
    """Attention that saves only q, keys, values and sinks for the backward pass, which recomputes each block.

    Plain autograd would save every block's gathered keys and its mask: a fifth of the saved memory of a layer, for
    SmolLM2 with 16 completions of one prompt. It would also make gradients of all keys for each block, and add them up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        plan: RowPlan,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        values = values.contiguous()  # a copy that does not keep the fused q, k and v in memory
        ctx.save_for_backward(q, keys, values, sinks)
        ctx.plan, ctx.scale, ctx.cap = plan, scale, cap
        keys, values, bad = finite(keys, values)
        out = torch.empty_like(q)
        for rows, index, visible in blocks_of(plan, q.device):
            out[rows] = attend_block(q[rows], keys[index], values[index], bad[index], visible, scale, cap, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, sinks = ctx.saved_tensors
        q_grad = torch.empty_like(q)
        # Many blocks contribute to a key of a long shared prompt: sum in at least float32, and round once.
        sums = torch.promote_types(keys.dtype, torch.float32)
        keys_grad, values_grad = (torch.zeros_like(of, dtype=sums) for of in (keys, values))
        sinks_grad = None if sinks is None else torch.zeros_like(sinks)
        for rows, index, visible in blocks_of(ctx.plan, q.device):
            every = (q[rows], keys[index], values[index], *(() if sinks is None else (sinks,)))
            block = [x.detach().requires_grad_() for x in every]
            with torch.enable_grad():
                out = _attend(block[0], block[1], block[2], visible, ctx.scale, ctx.cap, *block[3:])
            q_grad[rows], *of_keys = torch.autograd.grad(out, block, grad[rows])
            if sinks_grad is not None:
                sinks_grad += of_keys.pop()
            for whole, part in zip((keys_grad, values_grad), of_keys, strict=True):
                if isinstance(index, slice):
                    whole[index] += part
                else:
                    whole.index_add_(0, index, part.to(sums))
        return q_grad, keys_grad.to(keys.dtype), values_grad.to(values.dtype), sinks_grad, None, None, None


def blocks_of(plan: RowPlan, device: torch.device) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
    """Yield blocks of queries: the rows, the keys that any of them sees, and the visibility, bool [queries, keys]."""
    end = torch.from_numpy(plan.end).to(device)
    rows = torch.from_numpy(plan.query_rows).to(device)
    positions = None if plan.window is None else torch.from_numpy(plan.positions).to(device)
    first = torch.arange(len(end), device=device) if plan.first is None else torch.from_numpy(plan.first).to(device)
    for block in plan.blocks:
        index = block.keys()
        if not isinstance(index, slice):
            index = torch.from_numpy(index).to(device)
        query = rows[block.start : block.stop, None]
        visible = (first[index] <= query) & (query < end[index])
        if positions is not None:
            visible &= positions[query] - positions[index] < plan.window
        yield slice(block.start, block.stop), index, visible


def finite(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [keys, kv_heads, dim] with zeros for non-finite ones, and a mask, bool [keys, kv_heads].

    SDPA multiplies hidden values by zero, and zero times infinity is NaN. `attend_block` puts NaN back for the rows
    that see them.
    """
    bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))
    return torch.where(bad[..., None], 0, keys), torch.where(bad[..., None], 0, values), bad


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, bad: Tensor, visible: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return attention of q [queries, heads, dim] over the results of `finite`, restricted to visible keys.

    Args:
        visible: bool [queries, keys].
        cap: As in Heads.
        sinks: As in `RowAttention.attend`.
    """
    poisoned = (visible.to(q.dtype) @ bad.to(q.dtype)) > 0
    group = q.shape[1] // k.shape[1]
    out = _attend(q, k, v, visible, scale, cap, sinks)
    return out.masked_fill(poisoned.repeat_interleave(group, 1)[..., None], torch.nan)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Return attention. Heads of a group are stacked as more queries of their KV head, so no key is repeated."""
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    stacked = q.reshape(queries, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * queries, dim)
    mask, k, v = visible.repeat(group, 1), k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if cap is None and sinks is None:
        out = scaled_dot_product_attention(stacked, k, v, attn_mask=mask, scale=scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = stacked.to(wide) @ k.mT.to(wide) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:  # an extra key with value zero
            column = sinks.to(wide).view(kv_heads, group, 1).expand(-1, -1, queries).reshape(1, kv_heads, -1, 1)
            scores = torch.cat((scores, column), -1)
        out = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
    return out.reshape(kv_heads, group, queries, -1).permute(2, 0, 1, 3).reshape(queries, heads, -1)


class RowAttention:
    """Interval attention over rows, for given heads on a device.

    The implementation is chosen at construction: the compiled kernel on a CPU, Triton on a GPU, else PyTorch. If
    gradients are needed, PyTorch replaces the compiled kernel.
    """

    def __init__(self, heads: Heads, device: torch.device):
        self.heads, self.device = heads, device
        self._compiled = heads.compiled(device)
        self._fused = heads.fits(device) and not self._compiled

    def plan(
        self,
        end: np.ndarray,
        query_rows: np.ndarray,
        positions: np.ndarray | None = None,
        window: int | None = None,
        *,
        path: int = 0,
        first: np.ndarray | None = None,
    ) -> RowPlan:
        """Return the plan of a step with the kernels' tables. Arguments and errors are as in `plan_rows`.

        Args:
            path: Number of keys in the carried path, which come first.
        """
        plan = plan_rows(end, query_rows, positions, window, first=first, compiled=self._compiled is not None)
        if self._fused:
            gpu.place_rows(plan, path, self.heads, self.device)
        return plan

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RowPlan,
        *,
        scale: float,
        path_k: Tensor | None = None,
        path_v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(q k^T * scale) v; each query attends over its visible keys in `plan`. Differentiable.

        Tensors may be strided.

        Args:
            q: [queries, heads, dim].
            k: [rows, kv_heads, dim].
            v: [rows, kv_heads, value dim].
            path_k: [path, kv_heads, dim], the carried keys, which come before k.
            path_v: [path, kv_heads, value dim], the carried values.
            sinks: [heads], an extra score of each head in the softmax, without a value.

        Returns:
            [queries, heads, value dim].

        Raises:
            ValueError: The tensors do not fit the plan or the heads.
        """
        self._check(q, k, v, plan, path_k, path_v, sinks)
        tensors = (q, k, v, path_k, path_v)
        if self._fused:
            return gpu.attend_rows(*tensors, plan, self.heads, scale=scale, sinks=sinks)
        if self._compiled and plan.lists is not None and scale > 0 and not gpu.wants_gradient(*tensors, sinks):
            q, k, v = (array_of(gpu.dense(t)) for t in (q, k, v))
            path_k, path_v = (None if t is None else array_of(gpu.dense(t)) for t in (path_k, path_v))
            more = {"path_k": path_k, "path_v": path_v, "sinks": array_of(sinks)}
            return tensor_of(self._compiled.row_attention(q, k, v, plan.lists, scale=scale, cap=self.heads.cap, **more))
        keys = k if path_k is None else torch.cat((path_k, k))
        values = v if path_v is None else torch.cat((path_v, v))
        return blocked_attention(q, keys, values, plan, scale=scale, cap=self.heads.cap, sinks=sinks)

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RowPlan,
        path_k: Tensor | None,
        path_v: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        path_rows = 0 if path_k is None else len(path_k)
        if len(q) != plan.num_queries or path_rows + len(k) != plan.num_keys:
            raise ValueError(
                f"got {len(q)} queries and {path_rows} + {len(k)} keys, the plan has {plan.num_queries} and "
                f"{plan.num_keys}; pass the plan of this step"
            )
        heads = self.heads
        of_keys = (heads.kv_heads, heads.head_dim)
        fits = q.shape[1:] == (heads.heads, heads.head_dim) and k.shape[1:] == of_keys
        fits = fits and v.shape == (*k.shape[:2], heads.value_dim)
        if not fits or not q.dtype == k.dtype == v.dtype == heads.dtype:
            raise ValueError(
                f"q {list(q.shape)} ({q.dtype}), k {list(k.shape)} ({k.dtype}) and v {list(v.shape)} ({v.dtype}) do "
                f"not fit {heads.heads} heads and {heads.kv_heads} KV heads of {heads.head_dim} ({heads.dtype})"
                "; pass q [queries, heads, dim], k and v [rows, kv_heads, dim]"
            )
        check_sinks(sinks, heads)
        if getattr(path_k, "shape", [])[:2] != getattr(path_v, "shape", [])[:2]:
            raise ValueError("path keys and path values do not fit together; pass both or none")
