"""Enters looped models in the tables of the core. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine.schedule.parts import EnginePart, add_engine_part
from ...model.families import add_families
from ...worker.parts import WorkerPart, add_part
from .config import LoopedConfig, huginn, looped, ouro

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ...worker.native.model import NativeModel
    from ...worker.torch.model import CausalLM

add_families(
    {"OuroForCausalLM": ouro, "RavenForCausalLM": huginn, "PrefoldLoopedForCausalLM": looped},
    model_types={
        "ouro": "OuroForCausalLM",
        "huginn_raven": "RavenForCausalLM",
        "prefold_looped": "PrefoldLoopedForCausalLM",
    },
    own_code=("OuroForCausalLM", "RavenForCausalLM"),
)


def _part(model: CausalLM, checkpoint: Checkpoint | None, seed: int) -> WorkerPart | None:
    if not isinstance(model.config, LoopedConfig):
        return None
    from .model import LoopedLM
    from .worker import looped_part

    assert isinstance(model, LoopedLM)
    return looped_part(model)


def _native_part(model: NativeModel, checkpoint: Checkpoint | None, seed: int) -> WorkerPart:
    from .native import looped_part

    return looped_part(model)


add_part(_part, native=_native_part, concerns=lambda config: isinstance(config, LoopedConfig))


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    from .engine import engine_part

    return engine_part(worker, options)
