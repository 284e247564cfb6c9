"""Attention by its definition, one query at a time: slow, obvious, for tests and for checking."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["dense_attention", "visibility"]


def visibility(
    end: np.ndarray,
    query_rows: np.ndarray,
    positions: np.ndarray | None = None,
    window: int | None = None,
    first: np.ndarray | None = None,
) -> np.ndarray:
    """Returns which keys each query sees, bool [queries, keys]: first[j] <= i < end[j], and no more than `window` - 1
    positions before it (the sliding window; None: at any distance).

    end int64 [keys]; query_rows int64 [queries], the key row of each query; positions int64 [keys]; first int64 [keys],
    of a row in a span the span's first row, of others the row itself; None: there are no spans.
    """
    end, rows = np.asarray(end), np.asarray(query_rows)[:, None]
    visible = ((np.arange(len(end)) if first is None else np.asarray(first)) <= rows) & (rows < end)
    if window is not None:
        positions = np.asarray(positions)
        visible &= positions[rows] - positions < window
    return visible


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: np.ndarray | Tensor,
    *,
    scale: float,
    path_k: Tensor | None = None,
    path_v: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q k^T * scale) v over the visible keys only, in float64, rounded to q's dtype at the end.

    q [queries, heads, dim]; k, v [rows, kv_heads, dim]; path_k, path_v [path, kv_heads, dim] come before
    them. visible bool [queries, path + rows], any mask in which each query sees a key. A key that a query
    does not see takes no part in its sums, so a NaN there does no harm. The result is
    [queries, heads, dim].
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
        out[i] = torch.einsum("hj,jhd->hd", scores.softmax(-1), values[seen])
    return out.to(q.dtype)
