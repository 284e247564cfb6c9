"""`attend` for a step of the row stream, and the K/V of the path that a step hands to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention import Heads
from ..model import CausalLM
from ..model.config import Plane
from .batch import Batch


def heads_of(model: CausalLM) -> Heads:
    """Returns the heads that attention of this model is over; of a model that is split over ranks, this rank's."""
    local = model.local
    return Heads(local.heads, local.kv_heads, local.head_dim, model.dtype)


@dataclass(frozen=True, slots=True)
class Path:
    """A path is what is held between two steps: the K/V of its rows, and for mean pooling their hidden states.

    kv      by plane: keys and values, [path, kv_heads, head_dim] each
    hidden  float32 [path, hidden], or None
    """

    kv: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hidden: Tensor | None = None

    @property
    def rows(self) -> int:
        """Returns how many rows the path has."""
        return next((len(keys) for keys, _ in self.kv.values()), 0)

    def truncate(self, rows: int) -> Path:
        """Returns the first `rows` rows: the next window shares no more than these with the last one."""
        if rows == self.rows:
            return self
        kv = {plane: (keys[:rows], values[:rows]) for plane, (keys, values) in self.kv.items()}
        return Path(kv, None if self.hidden is None else self.hidden[:rows])


@dataclass(slots=True)
class StepAttend:
    """`attend` of one step: queries of its rows over the carried path and its own rows.

    The model calls it once for each plane; after that `next_kv` holds the K/V of the path above the next step.
    """

    batch: Batch
    path: Path
    planes: Sequence[Plane]
    scale: float
    next_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of q [rows or read rows, heads, dim] over k, v [rows, kv_heads, dim], shaped as q."""
        batch, window = self.batch, self.planes[plane].window
        read_only = len(q) < len(k)
        path_k, path_v = self.path.kv.get(plane, (None, None))
        if batch.scatter is not None:
            k, v = k.index_select(0, batch.scatter), v.index_select(0, batch.scatter)
            q = q.index_select(0, batch.read_order if read_only else batch.scatter)
        plan = (batch.read_plans if read_only else batch.plans)[window]
        o = batch.attention.attend(q, k, v, plan, scale=self.scale, path_k=path_k, path_v=path_v)
        if batch.scatter is not None:
            o = (
                torch.empty_like(o).index_copy_(0, batch.read_order, o)
                if read_only
                else o.index_select(0, batch.gather)
            )
        self.next_kv[plane] = join(path_k, k, batch), join(path_v, v, batch)
        return o

    def next_path(self, hidden: Tensor | None = None) -> Path:
        """Returns the path above the next step, once all planes have been called for. hidden: its hidden states."""
        return Path(self.next_kv, hidden)


def join(path: Tensor | None, new: Tensor, batch: Batch) -> Tensor:
    """Returns the rows of `path` and `new` that the next step needs: copies, so that the step's memory can go."""
    kept = new.index_select(0, batch.keep_new)
    if path is None or not len(batch.keep_path):
        return kept
    return torch.cat((path.index_select(0, batch.keep_path), kept))
