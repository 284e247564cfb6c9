"""Models as functions of rows.

`config` and `families` say what a model is, and never import torch; the tensors come with the first
use of CausalLM, load_model or load_adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import ModelConfig, Plane, RopeConfig
from .families import config_from, register_family, supported_architectures
from .loop import Loop

if TYPE_CHECKING:
    from .looped import LoopedLM
    from .lora import NO_ADAPTERS, Adapter, RowAdapters, load_adapter
    from .transformer import CausalLM
    from .weights import load_model

__all__ = [
    "NO_ADAPTERS",
    "Adapter",
    "CausalLM",
    "Loop",
    "LoopedLM",
    "ModelConfig",
    "Plane",
    "RopeConfig",
    "RowAdapters",
    "config_from",
    "load_adapter",
    "load_model",
    "register_family",
    "supported_architectures",
]


def __getattr__(name: str):
    if name == "CausalLM":
        from .transformer import CausalLM

        return CausalLM
    if name == "LoopedLM":
        from .looped import LoopedLM

        return LoopedLM
    if name == "load_model":
        from .weights import load_model

        return load_model
    if name in ("NO_ADAPTERS", "Adapter", "RowAdapters", "load_adapter"):
        from . import lora

        return getattr(lora, name)
    raise AttributeError(f"module 'prefold.model' has no attribute {name!r}")
