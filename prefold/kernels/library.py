"""The compiled kernels as Python functions over tensors and arrays."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from .attention import AttentionKernels
from .elementwise import ElementwiseKernels
from .interface import bind
from .logits import LogitKernels
from .products import ProductKernels

__all__ = ["Kernels"]


class Kernels(AttentionKernels, ElementwiseKernels, ProductKernels, LogitKernels):
    """It has the functions of one compiled library. Calls release the GIL and use torch's number of threads."""

    def __init__(self, path: Path):
        """Loads the library; raises OSError or AttributeError where the file is no such one."""
        # torch is imported above, so that the library finds torch's OpenMP pool and makes none of its own.
        self._calls = bind(ctypes.CDLL(str(path)))
        # Where products are oneDNN's, on OpenMP's threads, a second pool would be in the way of the first.
        ours = self.has_products(torch.bfloat16) and not torch.cpu._is_amx_tile_supported()
        self.use_own_threads(ours and os.environ.get("PREFOLD_THREADS") != "openmp")
        self._calls["calm_openmp"]()

    def use_own_threads(self, own: bool) -> None:
        """Runs parallel loops on threads of the kernels' own (`src/pool.h`), or on OpenMP's, which torch uses too."""
        self.own_threads = own
        self._calls["use_own_threads"](own)
