"""The compiled CPU kernels: C++ that a wheel has or that is compiled on first use, or None.

`load()` returns the kernels, or None where there is no compiler or PREFOLD_KERNELS=0; everything they do
has a PyTorch form elsewhere. `status()` says which, and why. They take and return NumPy arrays: nothing here imports
PyTorch.
"""

from __future__ import annotations

from .abi import Activation, Kind, LowRank, Operation, PathPlane, ProgramCall, RanksView, RowLow, SlotPlane, TileCall
from .attention import MAX_HEAD_DIM
from .interface import BFLOAT16, DTYPES, FLOAT32, RowLists, SlotLists, address
from .loader import Kernels, calm_openmp, load, status
from .operations import ConvPlaces, RunOrder
from .products import (
    BLOCK_TYPES,
    COLUMNS,
    LANES,
    WHOLE_TYPES,
    Blocks,
    PanelPool,
    StoredRows,
    can_pack_words,
    matrix_addresses,
)
from .program import CollectiveError
from .threads import set_threads, threads

__all__ = [
    "BFLOAT16",
    "BLOCK_TYPES",
    "COLUMNS",
    "DTYPES",
    "FLOAT32",
    "LANES",
    "MAX_HEAD_DIM",
    "WHOLE_TYPES",
    "Activation",
    "Blocks",
    "CollectiveError",
    "ConvPlaces",
    "Kernels",
    "Kind",
    "LowRank",
    "Operation",
    "PanelPool",
    "PathPlane",
    "ProgramCall",
    "RanksView",
    "RowLists",
    "RowLow",
    "RunOrder",
    "SlotLists",
    "SlotPlane",
    "StoredRows",
    "TileCall",
    "address",
    "calm_openmp",
    "can_pack_words",
    "load",
    "matrix_addresses",
    "set_threads",
    "status",
    "threads",
]
