"""Models as functions of rows.

`config` and `families` say what a model is, and never import torch; the tensors come with the first
use of CausalLM, Tower, load_model, load_tower or load_adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import ModelConfig, Plane, RopeConfig
from .decoders import decoder
from .families import config_from, register_family, supported_architectures
from .loop import Loop
from .names import Names

if TYPE_CHECKING:
    from .looped import LoopedLM
    from .lora import NO_ADAPTERS, Adapter, RowAdapters, load_adapter
    from .tower import Tower
    from .tower_weights import load_tower
    from .transformer import CausalLM, MediaRows
    from .weights import load_model

__all__ = [
    "NO_ADAPTERS",
    "Adapter",
    "CausalLM",
    "Loop",
    "LoopedLM",
    "MediaRows",
    "ModelConfig",
    "Names",
    "Plane",
    "RopeConfig",
    "RowAdapters",
    "Tower",
    "config_from",
    "decoder",
    "load_adapter",
    "load_model",
    "load_tower",
    "register_family",
    "supported_architectures",
]


def __getattr__(name: str):
    if name in ("CausalLM", "MediaRows"):
        from . import transformer

        return getattr(transformer, name)
    if name == "Tower":
        from .tower import Tower

        return Tower
    if name == "load_tower":
        from .tower_weights import load_tower

        return load_tower
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
