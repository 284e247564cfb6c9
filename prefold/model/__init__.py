"""Models as functions of rows.

`config`, `families` and `program` say what a model is. The executors of `worker` hold its weights and run it.
"""

from __future__ import annotations

from .builders import MlpKind, add_mlp
from .config import ModelConfig, Plane, RopeConfig
from .decoders import decoder
from .families import config_from, fallbacks, register_family, supported_architectures
from .names import Names
from .program import MediaRows, add_operation

__all__ = [
    "MediaRows",
    "MlpKind",
    "ModelConfig",
    "Names",
    "Plane",
    "RopeConfig",
    "add_mlp",
    "add_operation",
    "config_from",
    "decoder",
    "fallbacks",
    "register_family",
    "supported_architectures",
]
