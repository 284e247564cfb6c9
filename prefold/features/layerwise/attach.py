"""Register the layer-by-layer pass in the core's tables. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engine.meter import Meter
from ...engine.protocol import EngineOptions
from ...engine.schedule.parts import EnginePart, add_engine_part
from ...engine.worker import Worker
from ...spec.requests import FeatureCounter, add_counter
from ...worker.parts import WorkerPart, add_part

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ...worker.native.model import NativeModel
    from ...worker.torch.model import CausalLM


def _windows(count: int) -> str:
    return f"{count:,} window{'s' * (count != 1)} went through the model layer by layer"


def _bytes(count: int) -> str:
    from ...jobs.report.progress import format_bytes

    return f"{format_bytes(count)} of weights, once a window"


add_counter(FeatureCounter("weight_reads", title="layerwise", text=_windows, is_brief=True))
add_counter(FeatureCounter("weight_bytes", title="read", text=_bytes, is_brief=True))


def _part(model: CausalLM, checkpoint: Checkpoint | None, seed: int) -> None:
    """Return None: PyTorch's executor always has all weights in memory."""


def _native_part(model: NativeModel, checkpoint: Checkpoint | None, seed: int) -> WorkerPart | None:
    if model.loader is None:
        return None
    from .native import layerwise_part

    return layerwise_part(model, model.loader)


add_part(_part, native=_native_part)


@add_engine_part
def _engine_part(
    worker: Worker, options: EngineOptions, meter: Meter, resources: Sequence[object]
) -> EnginePart | None:
    from .engine import LayerwiseFacts, LayerwisePart

    facts = worker.facts.of(LayerwiseFacts)
    return None if facts is None else LayerwisePart(facts, meter)
