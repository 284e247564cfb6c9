"""What reuse at other positions adds to an engine. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ..engine.meter import Meter
from ..engine.options import EngineOptions, GenerateOptions
from ..engine.requests import NumberReader
from ..errors import InputError
from ..schedule.generate_step import Held
from ..schedule.parts import EnginePart, over_store
from ..worker.protocol import Worker
from .scheduler import ShiftingScheduler
from .steps import ShiftedFacts


class Shifting(EnginePart):
    """A Shifting is the part of an engine that reuses chunks of other prompts."""

    def __init__(self, worker: Worker, options: GenerateOptions, meter: Meter):
        self._worker, self._options, self._meter = worker, options, meter

    def scheduler(self, max_batch_rows: int, held: Held | None) -> ShiftingScheduler:
        return over_store(ShiftingScheduler, self._worker, self._options, max_batch_rows, held)

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Returns whether chunks may be reused for a request: it makes text, and has made none yet. Numbers are read of
        exact rows only; an answer that was begun goes on from rows that are computed."""
        if any(isinstance(reader, NumberReader) or reader.tokens for reader in request.readers):
            return {"shifts": False}
        request.approximate_tokens = 0
        return {"shifts": True}

    def before_plan(self, scheduler: ShiftingScheduler, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Gives the worker the copies that were decided on, and notes them with the requests. No step is planned
        between the decision and this, so whatever a copy reads is still there."""
        for moved in scheduler.moves:
            self._worker.start(moved.message).result()
            if moved.key in requests:
                requests[moved.key].approximate_tokens = len(moved)
            self._meter.add(unique_tokens=len(moved))  # they would have been computed
        scheduler.moves.clear()
        return {}


def engine_part(worker: Worker, options: EngineOptions, meter: Meter) -> Shifting | None:
    """Returns the part of an engine; None where reuse is exact. Raises InputError where chunks should be reused at
    other positions, and cannot be."""
    cache, field = options.generation.cache, "cache_reuse_shifted"
    if cache is None or cache.shifted is None:
        return None
    shifted = worker.facts.of(ShiftedFacts)
    if shifted is not None and shifted.fixed is not None:
        message = f"rows of this model cannot be reused at other positions: {shifted.fixed}"
        raise InputError(message, field=field, remedy="leave it out", code="fixed_rows")
    if options.sharing != "full":
        message = f"chunks of other prompts cannot be reused with sharing {options.sharing!r}"
        raise InputError(message, field=field, remedy='leave it out, or give sharing="full"', code="fixed_rows")
    return Shifting(worker, options.generation, meter)
