"""What an executor is asked to load, and what it gives when it has loaded a model. No torch."""

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
    """A Load says which model is loaded, and by which executor. It is sent to the ranks of a split model.

    config    as rank 0 reads the checkpoint, for families may be the caller's own
    executor  "native" or "torch"
    """

    checkpoint: Checkpoint
    config: ModelConfig
    options: ModelSpec
    executor: str
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Loaded is a model that is ready to run.

    worker    runs its steps
    config    the model's, as its checkpoint has it in fact
    model     the executor's model
    executor  "native" or "torch"
    passes    in words, what computes a forward pass
    ranks     processes that hold the model
    close     ends what runs beside this process
    """

    worker: Worker
    config: ModelConfig
    model: Any
    executor: str
    passes: str
    ranks: int = 1
    close: Callable[[], None] = lambda: None
