"""Models as functions of rows.

`config` and `families` say what a model is, and never import torch; the tensors come with the first
use of CausalLM or load_model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import ModelConfig, Plane, RopeConfig
from .families import config_from, register_family, supported_architectures

if TYPE_CHECKING:
    from .transformer import CausalLM
    from .weights import load_model

__all__ = [
    "CausalLM",
    "ModelConfig",
    "Plane",
    "RopeConfig",
    "config_from",
    "load_model",
    "register_family",
    "supported_architectures",
]


def __getattr__(name: str):
    if name == "CausalLM":
        from .transformer import CausalLM

        return CausalLM
    if name == "load_model":
        from .weights import load_model

        return load_model
    raise AttributeError(f"module 'prefold.model' has no attribute {name!r}")
