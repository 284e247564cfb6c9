"""Loading the kernels once a process, and saying why where they cannot be had."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass

from .build import BuildError, build
from .library import Kernels

__all__ = ["load", "status"]


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
