"""Register reuse at other positions in the core's tables. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...engine.schedule.parts import SETTLERS, EnginePart, add_engine_part
from ...errors import not_invariant
from ...spec.requests import FeatureCounter, add_counter
from ...worker.parts import WorkerPart, add_part

add_counter(
    FeatureCounter(
        "copied_rows",
        title="copied",
        text=lambda count: f"{count:,} rows of prompts, from other positions: approximate answers",
        row="rows of prompts copied from other positions",
    )
)


@SETTLERS.append
def _settled(options: Any, identity: Mapping[str, Any]) -> Any:
    if options.cache is None or options.cache.shifted is None:
        return options
    if identity.get("invariant"):
        raise not_invariant("keys and values that are copied from other positions")
    from .measured import permitted

    return replace(options, cache=permitted(options.cache, identity))


def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .worker import shifted_part

    return shifted_part(model)


def _native_part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .native import shifted_part

    return shifted_part(model)


add_part(_part, native=_native_part)


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    from .scheduler import engine_part

    return engine_part(worker, options, meter)
