"""Enters reuse at other positions in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..schedule.kinds import add_scheduler
from ..worker.protocol import WorkerPart, add_part


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .worker import shifted_part

    return shifted_part(model)


def _make(*given: Any) -> Any:
    from .engine import shifting_scheduler

    return shifting_scheduler(*given)


def _check(*given: Any) -> None:
    from .engine import check_shifted

    check_shifted(*given)


add_scheduler(_make, _check)
