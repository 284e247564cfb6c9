"""Scheduling: which rows a step computes, and the messages that say so. Plain Python and NumPy, never torch."""

from .prefill import PlannedStep, PrefillScheduler
from .steps import EndStream, MakeStore, Message, SlotStep, StepResult, StreamStep

__all__ = [
    "EndStream",
    "MakeStore",
    "Message",
    "PlannedStep",
    "PrefillScheduler",
    "SlotStep",
    "StepResult",
    "StreamStep",
]
