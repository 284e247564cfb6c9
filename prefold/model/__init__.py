"""Models as functions of rows.

`config`, `families` and `program` describe a model as data. The executors in `worker` hold its weights and run it.
"""

from __future__ import annotations

from .builders import MixerKind, MlpKind, add_mixer, add_mlp
from .config import KVSizes, Mixture, ModelConfig, Plane, RopeConfig, StateShape
from .decoders import decoder
from .families import config_from, fallbacks, register_family, supported_architectures
from .hybrids import hybrid
from .mixtures import mixture
from .names import Names
from .program import MediaRows, add_operation

__all__ = [
    "KVSizes",
    "MediaRows",
    "MixerKind",
    "Mixture",
    "MlpKind",
    "ModelConfig",
    "Names",
    "Plane",
    "RopeConfig",
    "StateShape",
    "add_mixer",
    "add_mlp",
    "add_operation",
    "config_from",
    "decoder",
    "fallbacks",
    "hybrid",
    "mixture",
    "register_family",
    "supported_architectures",
]
