"""`attend` for a step of the row stream, and the K/V of the path that a step hands to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention import Heads
from ..model import CausalLM
from ..model.config import Plane
from .batch import Batch

__all__ = ["Path", "StepAttend", "heads_of"]


def heads_of(model: CausalLM) -> Heads:
    """Of what attention of this model is over; of a model that is split over ranks, this rank's."""
    local = model.local
    return Heads(local.heads, local.kv_heads, local.head_dim, model.dtype)


@dataclass(frozen=True, slots=True)
class Path:
    """What is held between two steps: the K/V of one path, and for mean pooling its hidden states.

    keys, values  one tensor a plane, [path, kv_heads, head_dim]
    hidden        float32 [path, hidden], or None
    """

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    hidden: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def truncate(self, rows: int) -> Path:
        """The first `rows` rows: the next window shares no more than these with the last one."""
        if rows == self.rows:
            return self
        return Path(
            tuple(k[:rows] for k in self.keys),
            tuple(v[:rows] for v in self.values),
            None if self.hidden is None else self.hidden[:rows],
        )


@dataclass(slots=True)
class StepAttend:
    """Attention of one step: queries of its rows over the carried path and its own rows.

    Called once a plane by the model; afterwards `next_keys` and `next_values` hold the K/V of the
    path above the next step.
    """

    batch: Batch
    path: Path
    planes: Sequence[Plane]
    scale: float
    next_keys: list[Tensor] = field(default_factory=list)
    next_values: list[Tensor] = field(default_factory=list)

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows or read rows, heads, dim], k, v [rows, kv_heads, dim] -> o, shaped as q."""
        batch, window = self.batch, self.planes[plane].window
        read_only = len(q) < len(k)
        path_k = self.path.keys[plane] if self.path.keys else None
        path_v = self.path.values[plane] if self.path.values else None
        unfolded_q = q
        if batch.scatter is not None:
            k, v = k.index_select(0, batch.scatter), v.index_select(0, batch.scatter)
            unfolded_q = q.index_select(0, batch.read_order if read_only else batch.scatter)
        plan = (batch.read_plans if read_only else batch.plans)[window]
        o = batch.attention.attend(unfolded_q, k, v, plan, scale=self.scale, path_k=path_k, path_v=path_v)
        if batch.scatter is not None:
            o = (
                torch.empty_like(o).index_copy_(0, batch.read_order, o)
                if read_only
                else o.index_select(0, batch.gather)
            )
        self.next_keys.append(join(path_k, k, batch))
        self.next_values.append(join(path_v, v, batch))
        return o

    def next_path(self, hidden: Tensor | None = None) -> Path:
        return Path(tuple(self.next_keys), tuple(self.next_values), hidden)


def join(path: Tensor | None, new: Tensor, batch: Batch) -> Tensor:
    """The rows of `path` and `new` that the next step needs; copies, so that the step's memory can go."""
    kept = new.index_select(0, batch.keep_new)
    if path is None or not len(batch.keep_path):
        return kept
    return torch.cat((path.index_select(0, batch.keep_path), kept))
