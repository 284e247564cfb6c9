"""Enters looped models in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..model.families import add_families
from ..schedule.kinds import add_scheduler
from ..worker.protocol import WorkerPart, add_part
from .config import LoopedConfig
from .families import huginn, looped, ouro

add_families(
    {"OuroForCausalLM": ouro, "RavenForCausalLM": huginn, "PrefoldLoopedForCausalLM": looped},
    model_types={
        "ouro": "OuroForCausalLM",
        "huginn_raven": "RavenForCausalLM",
        "prefold_looped": "PrefoldLoopedForCausalLM",
    },
    own_code=("OuroForCausalLM", "RavenForCausalLM"),
)


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart | None:
    if not isinstance(model.config, LoopedConfig):
        return None
    from .worker import looped_part

    return looped_part(model)


@add_scheduler
def _make(*given: Any) -> Any:
    from .engine import visit_scheduler

    return visit_scheduler(*given)
