"""Register looped models in the core's tables. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine.schedule.parts import EnginePart, add_engine_part
from ...model.families import add_families
from ...worker.parts import WorkerPart, add_part
from .config import LoopedConfig, dory, huginn, looped, ouro

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ...worker.native.model import NativeModel
    from ...worker.torch.model import CausalLM

_PREFIX_LM = (
    "it is a prefix-LM (prefix_lm): the tokens of a prompt see the tokens behind them, so no two prompts share the "
    "computation of a prefix; causal models work"
)
_INKLING = (
    "its loops mix messages of the previous loop into queries, keys, values and MLPs, and its layers have attention to "
    "blocks of earlier layers, biases of relative positions and short convolutions, which prefold does not compute; "
    "supported looped models are Dory, Huginn and Ouro"
)
_REFUSED = {f"HrmText{end}": _PREFIX_LM for end in ("ForCausalLM", "Model")}
_REFUSED |= {
    f"Inkling2Loop{end}": _INKLING for end in ("ForCausalLM", "ForConditionalGeneration", "Model", "TextModel")
}

add_families(
    {
        "DoryForCausalLM": dory,
        "OuroForCausalLM": ouro,
        "RavenForCausalLM": huginn,
        "PrefoldLoopedForCausalLM": looped,
    },
    model_types={
        "dory": "DoryForCausalLM",
        "hrm_text": "HrmTextForCausalLM",
        "inkling2_loop": "Inkling2LoopForConditionalGeneration",
        "inkling2_loop_text": "Inkling2LoopForCausalLM",
        "ouro": "OuroForCausalLM",
        "huginn_raven": "RavenForCausalLM",
        "prefold_looped": "PrefoldLoopedForCausalLM",
    },
    own_code=("DoryForCausalLM", "OuroForCausalLM", "RavenForCausalLM"),
    refused=_REFUSED,
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
