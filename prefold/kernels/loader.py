"""Loading the kernels once a process, and saying why where they cannot be had."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .attention import AttentionKernels
from .build import BuildError, build
from .elementwise import ElementwiseKernels
from .experts import ExpertKernels
from .interface import bind
from .logits import LogitKernels
from .products import ProductKernels
from .program import ProgramKernels


class Kernels(AttentionKernels, ElementwiseKernels, ProductKernels, LogitKernels, ProgramKernels, ExpertKernels):
    """It has the functions of one compiled library. Calls release the GIL and use torch's number of threads."""

    def __init__(self, path: Path):
        """Loads the library; raises OSError or AttributeError where the file is no such one."""
        # torch is imported above, so that the library finds torch's OpenMP pool and makes none of its own.
        self._calls = bind(ctypes.CDLL(str(path)))
        # Where products are oneDNN's, on OpenMP's threads, a second pool would be in the way of the first.
        ours = self.has_products(torch.bfloat16)
        self.use_own_threads(ours and os.environ.get("PREFOLD_THREADS") != "openmp")
        self._calls["calm_openmp"]()

    def use_own_threads(self, own: bool) -> None:
        """Runs parallel loops on threads of the kernels' own (`src/pool.h`), or on OpenMP's, which torch uses too."""
        self.own_threads = own
        self._calls["use_own_threads"](own)


@dataclass(slots=True)
class Loaded:
    kernels: Kernels | None
    status: str


_lock = threading.Lock()
_loaded: Loaded | None = None


def load() -> Kernels | None:
    """Returns the compiled kernels, or None; compiles at the first call (a few seconds, once a machine).

    Warns once where they should be there and are not. PREFOLD_KERNELS=0 switches them off; it is
    looked at in the first call.
    """
    return _load().kernels


def status() -> str:
    """Returns one line for people: that the kernels are in use, or why not."""
    return _load().status


def _load() -> Loaded:
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _attempt()
    return _loaded


def _attempt() -> Loaded:
    if os.environ.get("PREFOLD_KERNELS", "1") == "0":
        return Loaded(None, "PyTorch: compiled kernels are switched off by PREFOLD_KERNELS=0")
    try:
        path = build()
        try:
            return Loaded(Kernels(path), f"compiled: {path}")
        except (OSError, AttributeError):
            # Damaged in the cache, or made against another C library: once more.
            path = build(again=True)
            return Loaded(Kernels(path), f"compiled: {path}")
    except (BuildError, OSError, AttributeError) as error:
        warnings.warn(f"prefold runs without its compiled kernels, more slowly: {error}", RuntimeWarning, stacklevel=3)
        return Loaded(None, f"PyTorch: {error}")
