"""Scheduling: which rows of the stream a step computes. Plain Python and NumPy, never torch."""

from .prefill import PrefillScheduler, Step

__all__ = ["PrefillScheduler", "Step"]
