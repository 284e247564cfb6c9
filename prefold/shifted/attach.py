"""Enters reuse at other positions in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..worker.protocol import WorkerPart, add_part


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .worker import shifted_part

    return shifted_part(model)
