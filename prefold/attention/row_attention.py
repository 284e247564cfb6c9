"""Attention on rows as they lie: one entry for the compiled kernel, for Triton's and for the PyTorch form."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..errors import InputError
from . import gpu
from .row_plan import RowPlan
from .row_torch import blocked_attention

__all__ = ["interval_attention"]


def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    path_k: Tensor | None = None,
    path_v: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v, each query over the keys that `plan` makes visible to it.

    q [queries, heads, dim]; k, v [rows, kv_heads, dim], heads a multiple of kv_heads; path_k, path_v
    [path, kv_heads, dim] are the carried keys that come before them. All of one dtype and device; any
    strides. Returns [queries, heads, dim]. InputError where the shapes do not fit the plan.
    """
    _check(q, k, v, plan, path_k, path_v)
    tensors = (q, k, v, path_k, path_v)
    if plan.lists is not None and q.device.type == "cpu" and scale > 0 and not _needs_grad(*tensors):
        compiled = kernels.load()
        if compiled and compiled.can_attend(*tensors):
            return compiled.attention(q, k, v, plan.lists, scale=scale, path_k=path_k, path_v=path_v)
    if gpu.can_attend(*tensors):
        return gpu.attend_rows(q, k, v, plan, scale=scale, path_k=path_k, path_v=path_v)
    keys = k if path_k is None else torch.cat((path_k, k))
    values = v if path_v is None else torch.cat((path_v, v))
    return blocked_attention(q, keys, values, plan, scale=scale)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, path_k: Tensor | None, path_v: Tensor | None) -> None:
    path_rows = 0 if path_k is None else len(path_k)
    if len(q) != plan.num_queries or path_rows + len(k) != plan.num_keys:
        raise InputError(
            f"{len(q)} queries and {path_rows} + {len(k)} keys, in place of {plan.num_queries} and {plan.num_keys}",
            field="plan",
            remedy="pass the plan of this step",
        )
    if v.shape != k.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise InputError(
            f"shapes q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit together",
            field="q",
            remedy="q [queries, heads, dim], k and v [rows, kv_heads, dim], heads a multiple of kv_heads",
        )
    if (path_k is None) != (path_v is None) or (path_k is not None and path_k.shape != path_v.shape):
        raise InputError("path keys and path values do not fit together", field="path_k", remedy="pass both or none")
