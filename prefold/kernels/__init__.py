"""The compiled CPU kernels: C++ built on first use with the machine's own compiler, or None.

`load()` returns the kernels, or None where there is no compiler or PREFOLD_KERNELS=0; everything they do
has a PyTorch form elsewhere. `status()` says which, and why.
"""

from __future__ import annotations

from .attention import MAX_HEAD_DIM
from .experts import pack_experts
from .interface import DTYPES, RowLists, SlotLists, SlotPlane, TileCall
from .loader import Kernels, load, status
from .products import COLUMNS, PanelPool, can_pack_words, pack_words
from .program import Kind, LowRank, Operation, PathPlane, ProgramCall
from .states import ConvPlaces, RunOrder

__all__ = [
    "COLUMNS",
    "DTYPES",
    "MAX_HEAD_DIM",
    "ConvPlaces",
    "Kernels",
    "Kind",
    "LowRank",
    "Operation",
    "PanelPool",
    "PathPlane",
    "ProgramCall",
    "RowLists",
    "RunOrder",
    "SlotLists",
    "SlotPlane",
    "TileCall",
    "can_pack_words",
    "load",
    "pack_experts",
    "pack_words",
    "status",
]
