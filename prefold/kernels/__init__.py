"""The compiled CPU kernels: C++ that is compiled when prefold is installed or first used.

`load()` returns the kernels, or None if there is no compiler or PREFOLD_KERNELS=0. Without kernels, PyTorch does the
same work. `status()` returns which kernels are in use, or why none are. `foreseen()` predicts this without loading
them. The kernels process NumPy arrays, and nothing here imports PyTorch.

Each name is imported on first use. So `foreseen`, and setup.py, which compiles the kernels, import only the standard
library.
"""

from __future__ import annotations

from importlib import import_module

from .threads import set_threads, threads

TYPE_CHECKING = False  # importing `typing` would take most of the import time
if TYPE_CHECKING:
    from .abi import (
        Activation,
        Kind,
        LowRank,
        Operation,
        PathPlane,
        ProgramCall,
        RanksView,
        RowLow,
        SlotPlane,
        TileCall,
    )
    from .attention import MAX_HEAD_DIM
    from .installed import foreseen
    from .interface import BFLOAT16, DTYPES, FLOAT32, RowLists, SlotLists, address
    from .loader import Kernels, calm_openmp, load, status
    from .products import (
        BLOCK_TYPES,
        COLUMNS,
        LANES,
        WHOLE_TYPES,
        Arena,
        Blocks,
        PanelPool,
        StoredRows,
        can_pack_words,
        matrix_addresses,
    )
    from .program import CollectiveError

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
    "Arena",
    "Blocks",
    "CollectiveError",
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
    "SlotLists",
    "SlotPlane",
    "StoredRows",
    "TileCall",
    "address",
    "calm_openmp",
    "can_pack_words",
    "foreseen",
    "load",
    "matrix_addresses",
    "set_threads",
    "status",
    "threads",
]

_MODULES = {
    "abi": "Activation Kind LowRank Operation PathPlane ProgramCall RanksView RowLow SlotPlane TileCall",
    "attention": "MAX_HEAD_DIM",
    "installed": "foreseen",
    "interface": "BFLOAT16 DTYPES FLOAT32 RowLists SlotLists address",
    "loader": "Kernels calm_openmp load status",
    "products": "BLOCK_TYPES COLUMNS LANES WHOLE_TYPES Arena Blocks PanelPool StoredRows can_pack_words"
    " matrix_addresses",
    "program": "CollectiveError",
}


def __getattr__(name: str) -> object:
    module = next((module for module, names in _MODULES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value
