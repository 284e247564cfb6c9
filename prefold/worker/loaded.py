"""The input and the result of loading a model with an executor. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..engine.worker import Worker
from ..model import ModelConfig
from ..spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Which model to load, and with which executor. Rank 0 sends it to the other ranks of a split model."""

    checkpoint: Checkpoint
    config: ModelConfig  # read by rank 0, because only its process has the families that the caller registered
    options: ModelSpec
    executor: str  # "native" or "torch"
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, ready to run."""

    worker: Worker
    config: ModelConfig  # corrected by the tensors that the checkpoint really has
    model: Any  # the executor's model
    executor: str  # "native" or "torch"
    passes: str  # for people: the code that computes a forward pass
    ranks: int = 1  # number of processes that hold the model
    close: Callable[[], None] = lambda: None  # ends the other processes
