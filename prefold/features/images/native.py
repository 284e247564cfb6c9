"""A tower on the native executor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...checkpoint import Checkpoint
from ...model.program import Buffer
from ...worker.attention import RowPlan, plan_rows
from ...worker.native.arrays import NumpyArrays
from ...worker.native.load import check_memory, fill
from ...worker.native.model import NativeModel
from ...worker.native.program import ProgramParts
from .families import TowerModel
from .tower import Tower, TowerExecutor, parts_of
from .tower_weights import open_tower


class NativeTower(TowerExecutor[np.ndarray]):
    """A tower that runs its operations by the compiled kernels.

    Args:
        weights: The weights of the tower, in the kernels' form.
    """

    def __init__(self, model: TowerModel, weights: NativeModel):
        table = weights.memory.tables[weights.program.embed.table]
        assert isinstance(table, np.ndarray)
        self.model, self.arrays, self.table = model, NumpyArrays(weights.kernels), table
        self.dtype = weights.dtype.name
        self.beside = [weights.memory.arrays[weight] for weight in weights.program.beside]
        self._kernels, self._parts = weights.kernels, ProgramParts(weights, parts_of(weights.program))

    def run(self, part: int, buffers: Mapping[Buffer, np.ndarray]) -> None:
        self._parts.run(part, buffers)

    def plan(self, end: np.ndarray, query_rows: np.ndarray, first: np.ndarray) -> RowPlan:
        return plan_rows(end, query_rows, first=first)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: RowPlan) -> np.ndarray:
        assert plan.lists is not None
        return self._kernels.row_attention(q, k, v, plan.lists, scale=self.model.scale)

    def wait(self) -> None:
        pass  # calls are synchronous


def load_tower(checkpoint: Checkpoint, text: NativeModel, seed: int = 0) -> Tower[np.ndarray]:
    """Return the tower of a checkpoint, in the dtype of its text model.

    Raise the errors of `open_tower`, and OutOfMemoryError before anything is read.
    """
    model, source = open_tower(checkpoint, text.config, seed)
    program = model.program()
    check_memory(checkpoint, program, text.dtype)
    weights = NativeModel(model, text.dtype, text.kernels)
    fill(weights, source)
    return Tower(NativeTower(model, weights))
