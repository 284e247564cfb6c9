"""The engine: steps to tensors, the forward pass, and read-outs."""

from .engine import Engine, StepInfo

__all__ = ["Engine", "StepInfo"]
