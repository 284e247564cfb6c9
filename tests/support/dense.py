"""Attention by its definition, one query at a time: slow, obvious, for tests and for checking."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: np.ndarray | Tensor,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
    path_k: Tensor | None = None,
    path_v: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q k^T * scale) v over the visible keys only, in float64, rounded to q's dtype at the end.

    q [queries, heads, dim]; k, v [rows, kv_heads, dim]; path_k, path_v [path, kv_heads, dim] come before
    them. visible bool [queries, path + rows], any mask in which each query sees a key. A key that a query
    does not see takes no part in its sums, so a NaN there does no harm. The result is
    [queries, heads, dim]. cap: scores s become cap * tanh(s / cap). sinks [heads]: numbers beside the scores in the
    softmax, which have no value.
    """
    keys = k if path_k is None else torch.cat((path_k, k))
    values = v if path_v is None else torch.cat((path_v, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    visible = torch.as_tensor(visible, device=q.device)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for i in range(len(q)):
        seen = visible[i].nonzero()[:, 0]
        scores = torch.einsum("hd,jhd->hj", q[i].double(), keys[seen]) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), -1)
        out[i] = torch.einsum("hj,jhd->hd", scores.softmax(-1)[:, : len(seen)], values[seen])
    return out.to(q.dtype)
