"""A tower on PyTorch's executor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ...checkpoint import Checkpoint
from ...model.config import ModelConfig
from ...model.program import DELTA, Add, Buffer, X
from ...worker.attention import RowPlan
from ...worker.torch.arrays import TorchArrays
from ...worker.torch.attention.heads import Heads
from ...worker.torch.attention.row_attention import RowAttention
from ...worker.torch.layer import Layer
from ...worker.torch.layers import HeldWeight
from ...worker.torch.load import check_memory, fill_all
from ...worker.torch.lora import NO_ADAPTERS
from ...worker.torch.operations import Place, Rows
from ...worker.torch.ops import choose_ops
from ...worker.torch.parallel import ALONE
from .families import TowerModel
from .tower import Tower, TowerExecutor, parts_of
from .tower_weights import open_tower


class TowerWeights(nn.Module):
    """The weights of a tower, uninitialized: the embedding of places, and a Layer for each part of the program."""

    def __init__(self, model: TowerModel, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        place, program = Place(dtype, device, ALONE), model.program()
        self.embed = program.embed
        self.table = place.empty(program.embed.table)
        self.parts = nn.ModuleList(Layer(operations, place) for operations in parts_of(program))
        self.beside = nn.ParameterList(place.empty(weight) for weight in program.beside)
        self._beside_parts = [weight.parts for weight in program.beside]

    @property
    def held(self) -> list[HeldWeight]:
        """Return every parameter with the names of its tensors."""
        table = HeldWeight(self, "table", self.embed.table.parts)
        beside = [HeldWeight(self.beside, str(number), parts) for number, parts in enumerate(self._beside_parts)]
        return [table, *beside, *(weight for part in self.layers for weight in part.held)]

    @property
    def layers(self) -> list[Layer]:
        """Return the parts of the program."""
        return [part for part in self.parts if isinstance(part, Layer)]


class TorchTower(TowerExecutor[Tensor]):
    """A tower that runs its operations on tensors."""

    def __init__(self, model: TowerModel, weights: TowerWeights):
        table, heads = weights.table, (model.heads, model.kv_heads, model.head_dim)
        self.model, self.weights, self.table = model, weights, table
        self.arrays, self.dtype = TorchArrays(table.device), str(table.dtype).removeprefix("torch.")
        self._attention = RowAttention(Heads(*heads, table.dtype), table.device)
        self._parts, self.beside = weights.layers, list(weights.beside)
        # By part: the part before it has left a sum that is not yet added to the residual stream.
        self._adds = [False, *(_leaves_sum(part) for part in self._parts[:-1])]

    def run(self, part: int, buffers: Mapping[Buffer, Tensor]) -> None:
        ops = choose_ops(self.table.dtype, self.table.device)
        delta = buffers[DELTA] if self._adds[part] else None
        rows = Rows(dict(buffers), delta, None, None, None, NO_ADAPTERS, ops, ALONE, False)
        self._parts[part].run(rows)
        for name, target in buffers.items():
            # A sum that is not yet added to the residual stream stays separate.
            if (found := rows.buffers[name] if name == X else rows.get(name)) is not target:
                target.copy_(found)

    def plan(self, end: np.ndarray, query_rows: np.ndarray, first: np.ndarray) -> RowPlan:
        return self._attention.plan(end, query_rows, first=first)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: RowPlan) -> Tensor:
        return self._attention.attend(q, k, v, plan, scale=self.model.scale)

    def wait(self) -> None:
        if self.table.device.type == "cuda":
            torch.cuda.synchronize(self.table.device)


def _leaves_sum(part: Layer) -> bool:
    """Return whether the last operation adds to the residual stream. The following norm does the addition."""
    last = part.operations[-1]
    return isinstance(last, Add) and last.source == X


def load_tower(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    pack: bool = True,
    seed: int = 0,
) -> Tower[Tensor]:
    """Return the tower of a checkpoint. Other arguments are as for `load_model`.

    Raise the errors of `open_tower`, and OutOfMemoryError before anything is read.

    Args:
        config: The config of the whole model.
    """
    device = torch.device(device)
    model, source = open_tower(checkpoint, config, seed)
    weights = TowerWeights(model, dtype=dtype, device=torch.device("meta"))
    check_memory(checkpoint, weights.held, device, dtype)
    fill_all(weights.held, source, device, pack=pack)
    return Tower(TorchTower(model, weights.eval()))
