"""Models as functions of rows.

`config` and `families` say what a model is, and never import torch; the tensors come with the first
use of CausalLM, load_model or load_adapter.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .builders import MlpKind, add_mlp
from .config import ModelConfig, Plane, RopeConfig
from .decoders import decoder
from .families import config_from, fallbacks, register_family, supported_architectures
from .names import Names
from .program import MediaRows, add_operation

if TYPE_CHECKING:
    from .lora import NO_ADAPTERS, Adapter, RowAdapters, load_adapter
    from .transformer import CausalLM
    from .weights import load_model

__all__ = [
    "NO_ADAPTERS",
    "Adapter",
    "CausalLM",
    "MediaRows",
    "MlpKind",
    "ModelConfig",
    "Names",
    "Plane",
    "RopeConfig",
    "RowAdapters",
    "add_mlp",
    "add_operation",
    "config_from",
    "decoder",
    "fallbacks",
    "load_adapter",
    "load_model",
    "register_family",
    "supported_architectures",
]

_LATE = {"CausalLM": "transformer", "load_model": "weights"}
_LATE |= dict.fromkeys(("NO_ADAPTERS", "Adapter", "RowAdapters", "load_adapter"), "lora")


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATE[name]}", __name__), name)
