"""The engine: who waits for what, and the steps that bring it. No torch: a worker computes."""

from .engine import ModelEngine
from .meter import StepInfo
from .protocol import Engine, EngineOptions, GenerateOptions

__all__ = ["Engine", "EngineOptions", "GenerateOptions", "ModelEngine", "StepInfo"]
