"""Find a model's files: local folders, GGUF files, built-in names, hub ids. Imports no torch."""

from . import gguf_dense, gguf_gemmas, gguf_hybrids, gguf_mixtures
from .builtin import BUILT_IN, BuiltIn
from .checkpoint import GEOMETRIES, Checkpoint, read_json, read_object, resolve, served_name
from .gguf import GGUFFile

__all__ = [
    "BUILT_IN",
    "GEOMETRIES",
    "BuiltIn",
    "Checkpoint",
    "GGUFFile",
    "read_json",
    "read_object",
    "resolve",
    "served_name",
]
