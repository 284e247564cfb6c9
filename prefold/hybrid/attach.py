"""Enters hybrids in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..model.families import add_families
from ..schedule.parts import EnginePart, add_engine_part
from ..worker.protocol import WorkerPart, add_part
from .config import HybridConfig, lfm2

add_families({"Lfm2ForCausalLM": lfm2}, model_types={"lfm2": "Lfm2ForCausalLM"})


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart | None:
    if not isinstance(model.config, HybridConfig):
        return None
    from .worker import state_part

    return state_part(model)


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, beside: Any) -> EnginePart | None:
    from .engine import engine_part

    return engine_part(worker, options, meter)
