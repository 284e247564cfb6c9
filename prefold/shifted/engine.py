"""Rows that are reused at other positions: what the worker is told of them, and what their requests are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.meter import Meter
from ..engine.requests import NumberReader, OpenRequest
from ..worker.protocol import Worker
from .scheduler import ShiftingScheduler

__all__ = ["may_shift", "send_moves"]


def may_shift(one: OpenRequest) -> bool:
    """Returns whether chunks may be reused for a request that is submitted: it makes text, and has made none yet.

    Numbers are read of exact rows only. An answer that was begun goes on from rows that are computed.
    """
    if any(isinstance(reader, NumberReader) or reader.tokens for reader in one.readers):
        return False
    one.approximate_tokens = 0
    return True


def send_moves(worker: Worker, scheduler: ShiftingScheduler, requests: Mapping[Any, OpenRequest], meter: Meter) -> None:
    """Gives the worker the copies that were decided on, and notes them with the requests. No step is planned between
    the decision and this, so whatever a copy reads is still there."""
    for moved in scheduler.moves:
        worker.start(moved.message).result()
        if moved.key in requests:
            requests[moved.key].approximate_tokens = len(moved)
        meter.add(unique_tokens=len(moved))  # they would have been computed
    scheduler.moves.clear()
