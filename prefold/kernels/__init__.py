"""The compiled CPU kernels: C++ that a wheel has or that is compiled on first use, or None.

`load()` returns the kernels, or None where there is no compiler or PREFOLD_KERNELS=0; everything they do
has a PyTorch form elsewhere. `status()` says which, and why.
"""

from __future__ import annotations

from .abi import Activation, Kind, LowRank, Operation, PathPlane, ProgramCall, RanksView, RowLow, SlotPlane, TileCall
from .attention import MAX_HEAD_DIM
from .interface import DTYPES, RowLists, SlotLists
from .loader import Kernels, load, status
from .operations import ConvPlaces, RunOrder, pack_experts
from .products import (
    BLOCK_TYPES,
    COLUMNS,
    WHOLE_TYPES,
    Blocks,
    PanelPool,
    StoredRows,
    can_pack_words,
    matrix_addresses,
    pack_words,
)
from .program import CollectiveError

__all__ = [
    "BLOCK_TYPES",
    "COLUMNS",
    "DTYPES",
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
    "can_pack_words",
    "load",
    "matrix_addresses",
    "pack_experts",
    "pack_words",
    "status",
]
