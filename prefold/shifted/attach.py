"""Enters reuse at other positions in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..schedule.parts import EnginePart, add_engine_part
from ..worker.protocol import WorkerPart, add_part


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .worker import shifted_part

    return shifted_part(model)


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, beside: Any) -> EnginePart | None:
    from .engine import engine_part

    return engine_part(worker, options, meter)
