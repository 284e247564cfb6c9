"""Attention with capped products or with sinks, which no kernel here computes: by PyTorch, over the same rows or
slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import KVStore, RowPlan, SlotPlan
from ..attention.row_attention import blocks_of, finite
from ..attention.slot_torch import DeviceBlock, slot_blocks
from ..errors import UnsupportedModelError
from ..model.transformer import Attend
from ..worker.rows import StepAttend
from ..worker.slots import SlotAttend


def weighed(attend: Attend, cap: float | None, sinks: Tensor | None) -> Attend:
    """Returns `attend` with products capped at cap * tanh(product / cap), and sinks [heads] beside the products in the
    softmax, which have no value."""
    how: Any = _Weighing(cap, sinks)
    if isinstance(attend, StepAttend):
        return replace(attend, batch=replace(attend.batch, attention=how))  # it leaves K/V where `attend` does
    if isinstance(attend, SlotAttend):
        store: Any = _Store(attend.store, how)
        return replace(attend, store=store)
    raise UnsupportedModelError(
        f"caps and sinks of attention are computed over rows and slots of a step, not by {type(attend).__name__}"
    )


@dataclass(frozen=True, slots=True)
class _Weighing:
    """A _Weighing stands in the place of a RowAttention."""

    cap: float | None
    sinks: Tensor | None

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
        keys, values, bad = finite(
            k if path_k is None else torch.cat((path_k, k)), v if path_v is None else torch.cat((path_v, v))
        )
        out = torch.empty_like(q)
        for rows, index, visible in blocks_of(plan, q.device):
            out[rows] = self.block(q[rows], keys[index], values[index], bad[index], visible, scale)
        return out

    def block(self, q: Tensor, k: Tensor, v: Tensor, bad: Tensor, visible: Tensor, scale: float) -> Tensor:
        """Returns attention of q [queries, heads, dim] over what `finite` gives, as far as visible bool [queries,
        keys]."""
        queries, heads, dim = q.shape
        group = heads // k.shape[1]
        stacked = q.reshape(queries, -1, group, dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (stacked @ k.permute(1, 2, 0)).float().view(-1, group, queries, len(k)) * scale
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(~visible, -torch.inf)
        most = scores.amax(-1, keepdim=True)
        if self.sinks is not None:
            sinks = self.sinks.float().view(-1, group, 1, 1)
            most = torch.maximum(most, sinks)
        weights = (scores - most).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + (sinks - most).exp()
        weights = (weights / total).to(v.dtype).flatten(1, 2)
        out = (weights @ v.transpose(0, 1)).view(-1, group, queries, dim).permute(2, 0, 1, 3).reshape(q.shape)
        poisoned = (visible.to(q.dtype) @ bad.to(q.dtype)) > 0
        return out.masked_fill(poisoned.repeat_interleave(group, 1)[..., None], torch.nan)


@dataclass(frozen=True, slots=True)
class _Store:
    """A _Store stands in the place of a KVStore."""

    store: KVStore
    how: _Weighing

    def write(self, *rows: Any) -> None:
        self.store.write(*rows)

    def attend(self, plane: int, q: Tensor, plan: SlotPlan, scale: float) -> Tensor:
        key = ("gathers", q.device)
        gathers = plan.kept(key, lambda: [DeviceBlock.of(block, plan, q.device) for block in slot_blocks(plan)])
        out, read = torch.empty_like(q), partial(self.store.read, plane)
        for gather in gathers:
            block = slice(gather.start, gather.stop)
            out[block] = self.how.block(q[block], *finite(*read(gather.slots)), gather.visible, scale)
        return out
