"""The engine: steps to tensors, the forward pass, read-outs, and the loops over them."""

from .engine import Engine, StepInfo
from .generate import GenerateOptions, Generator

__all__ = ["Engine", "GenerateOptions", "Generator", "StepInfo"]
