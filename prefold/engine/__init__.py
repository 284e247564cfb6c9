"""The engine: schedules requests, plans steps, and collects results. Workers compute; this package imports no torch."""

from .engine import ModelEngine
from .meter import StepInfo
from .protocol import Engine, EngineOptions, GenerateOptions

__all__ = ["Engine", "EngineOptions", "GenerateOptions", "ModelEngine", "StepInfo"]
