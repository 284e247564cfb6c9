"""The engine: who waits for what, and the steps that bring it. No torch: a worker computes."""

from .engine import Engine
from .meter import StepInfo
from .options import EngineOptions, GenerateOptions

__all__ = ["Engine", "EngineOptions", "GenerateOptions", "StepInfo"]
