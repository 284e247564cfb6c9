"""Register hybrids in the core's tables: their operations, the workers' states and their scheduler. No torch."""

from __future__ import annotations

from typing import Any

from ...engine.schedule.parts import EnginePart, add_engine_part
from ...model.program import GatedDelta, Mamba2, ShortConv, add_operation
from ...spec.requests import FeatureCounter, add_counter
from ...worker.parts import WorkerPart, add_part


def _held(count: int) -> str:
    from ...jobs.report.progress import format_bytes

    return f"{format_bytes(count)} held at peak"


add_counter(FeatureCounter("state_bytes_peak", title="states", text=_held))


def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart | None:
    if not model.config.has_states:
        return None
    from .worker import state_part

    return state_part(model)


def _native_part(model: Any, checkpoint: Any, seed: int) -> WorkerPart:
    from .native import state_part

    return state_part(model)


add_part(_part, native=_native_part, concerns=lambda config: config.has_states)


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    from .steps import StateFacts

    if worker.facts.of(StateFacts) is None:
        return None
    from .stream import engine_part

    return engine_part(worker, options, meter)


for _kind, _function in ((ShortConv, "short_conv"), (GatedDelta, "gated_delta_net"), (Mamba2, "mamba2")):
    add_operation(_kind, f"prefold.features.hybrid.layers:{_function}")
