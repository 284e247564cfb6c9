"""What an executor gives when it has loaded a model. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.worker import Worker
from ..model import ModelConfig


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
