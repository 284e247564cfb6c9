"""The compiled CPU kernels: C++ built on first use with the machine's own compiler, or None.

`load()` returns the kernels, or None where there is no compiler or PREFOLD_KERNELS=0; everything they do
has a PyTorch form elsewhere. `status()` says which, and why.
"""

from __future__ import annotations

from .calls import SlotPlane, SlotTiles, Tiles
from .library import MAX_HEAD_DIM, Kernels
from .loader import load, status
from .panels import Pool, can_pack_words, pack_words

__all__ = [
    "MAX_HEAD_DIM",
    "Kernels",
    "Pool",
    "SlotPlane",
    "SlotTiles",
    "Tiles",
    "can_pack_words",
    "load",
    "pack_words",
    "status",
]
