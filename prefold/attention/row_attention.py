"""Attention on rows as they lie: by the compiled kernel, by Triton's or by PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import gpu
from .heads import Heads
from .row_plan import RowPlan, plan_rows
from .row_torch import blocked_attention

__all__ = ["RowAttention"]


class RowAttention:
    """Computes interval attention of a model's heads on a device, by what is chosen when this is made.

    It is the compiled kernel on a CPU, Triton's on a GPU, and otherwise the form in PyTorch, which takes any device
    and dtype. Where gradients are wanted, PyTorch takes the place of the compiled kernel.
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
        """Returns the plan of a step with what kernels read of it; arguments and errors as of `plan_rows`.

        path: how many of the keys, the first ones, are those of the carried path.
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
    ) -> Tensor:
        """Returns softmax(q k^T * scale) v, each query over the keys that `plan` makes visible to it; differentiable.

        q [queries, heads, dim]; k, v [rows, kv_heads, dim]; path_k, path_v [path, kv_heads, dim] are the carried keys
        that come before them; any strides. The result is [queries, heads, dim]. Raises ValueError where the tensors do
        not fit the plan, or the heads that this was made for.
        """
        self._check(q, k, v, plan, path_k, path_v)
        tensors = (q, k, v, path_k, path_v)
        if self._fused:
            return gpu.attend_rows(*tensors, plan, self.heads, scale=scale)
        if self._compiled and plan.lists is not None and scale > 0 and not gpu.wants_gradient(*tensors):
            q, k, v, path_k, path_v = (None if t is None else gpu.dense(t) for t in tensors)
            return self._compiled.row_attention(q, k, v, plan.lists, scale=scale, path_k=path_k, path_v=path_v)
        keys = k if path_k is None else torch.cat((path_k, k))
        values = v if path_v is None else torch.cat((path_v, v))
        return blocked_attention(q, keys, values, plan, scale=scale)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, path_k: Tensor | None, path_v: Tensor | None
    ) -> None:
        path_rows = 0 if path_k is None else len(path_k)
        if len(q) != plan.num_queries or path_rows + len(k) != plan.num_keys:
            raise ValueError(
                f"{len(q)} queries and {path_rows} + {len(k)} keys, in place of {plan.num_queries} and {plan.num_keys}"
                "; pass the plan of this step"
            )
        heads = self.heads
        of_keys = (heads.kv_heads, heads.head_dim)
        fits = q.shape[1:] == (heads.heads, heads.head_dim) and k.shape[1:] == of_keys and k.shape == v.shape
        if not fits or not q.dtype == k.dtype == v.dtype == heads.dtype:
            raise ValueError(
                f"q {list(q.shape)} ({q.dtype}), k {list(k.shape)} ({k.dtype}) and v {list(v.shape)} ({v.dtype}) do "
                f"not fit {heads.heads} heads and {heads.kv_heads} KV heads of {heads.head_dim} ({heads.dtype})"
                "; q [queries, heads, dim], k and v [rows, kv_heads, dim]"
            )
        if (path_k is None) != (path_v is None) or (path_k is not None and path_k.shape != path_v.shape):
            raise ValueError("path keys and path values do not fit together; pass both or none")
