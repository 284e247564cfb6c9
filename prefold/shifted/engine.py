"""Rows that are reused at other positions: what the worker is told of them, and what their requests are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.meter import Meter
from ..engine.options import GenerateOptions
from ..engine.requests import NumberReader, OpenRequest
from ..errors import InputError
from ..schedule.generate_step import Held
from ..schedule.kinds import over_store
from ..types import Sharing
from ..worker.protocol import Facts, Worker
from .scheduler import ShiftingScheduler
from .steps import ShiftedFacts

__all__ = ["check_shifted", "may_shift", "send_moves", "shifting_scheduler"]


def shifting_scheduler(
    worker: Worker, options: GenerateOptions, max_batch_rows: int, held: Held | None = None
) -> ShiftingScheduler | None:
    """Returns the scheduler that reuses chunks of other prompts; None where reuse is exact."""
    if options.cache is None or options.cache.shifted is None:
        return None
    return over_store(ShiftingScheduler, worker, options, max_batch_rows, held)


def check_shifted(facts: Facts, options: GenerateOptions, sharing: Sharing) -> None:
    """Raises InputError where chunks should be reused at other positions, and cannot be."""
    if options.cache is None or options.cache.shifted is None:
        return
    field = "cache_reuse_shifted"
    shifted = facts.of(ShiftedFacts)
    if shifted is not None and shifted.fixed is not None:
        message = f"rows of this model cannot be reused at other positions: {shifted.fixed}"
        raise InputError(message, field=field, remedy="leave it out", code="fixed_rows")
    if sharing != "full":
        message = f"chunks of other prompts cannot be reused with sharing {sharing!r}"
        raise InputError(message, field=field, remedy='leave it out, or give sharing="full"', code="fixed_rows")


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
