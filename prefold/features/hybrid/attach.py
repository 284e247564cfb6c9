"""Enters hybrids in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ...checkpoint import gguf_config
from ...engine.schedule.parts import EnginePart, add_engine_part
from ...model.families import add_families, with_heads
from ...model.names import GGUF_OF
from ...worker.parts import WorkerPart, add_part
from . import gguf
from .config import HybridConfig, granite4, lfm2, qwen3_5, qwen3_5_with_images

_MIXTURE = "its layers are mixtures of experts beside layers of states; its dense relatives are supported"

_STATES = "its layers keep recurrent states that prefold does not compute; Qwen3.5, LFM2 and Granite 4 hybrids work"
_WITH_STATES = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "falcon_mamba": "FalconMamba",
    "jamba": "Jamba",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "nemotron_h": "NemotronH",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv": "Rwkv",
    "xlstm": "xLSTM",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
}

add_families(
    with_heads("GraniteMoeHybridForCausalLM", "GraniteMoeHybrid", granite4, classified=False)
    | {
        "Lfm2ForCausalLM": lfm2,
        "Qwen3_5ForCausalLM": qwen3_5,
        "Qwen3_5ForConditionalGeneration": qwen3_5_with_images,
    },
    model_types={
        "lfm2": "Lfm2ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        **{model_type: f"{name}ForCausalLM" for model_type, name in _WITH_STATES.items()},
    },
    refused={
        **{
            f"{name}For{head}": _STATES
            for name in _WITH_STATES.values()
            for head in ("CausalLM", "SequenceClassification")
        },
        **{f"{name}Model": _STATES for name in _WITH_STATES.values()},
        "Lfm2MoeForCausalLM": _MIXTURE,
        "Qwen3NextForCausalLM": _MIXTURE,
        "Qwen3_5MoeForCausalLM": _MIXTURE,
        "Qwen3_5MoeForConditionalGeneration": _MIXTURE,
    },
)

gguf_config.ARCHITECTURES.update(gguf.ARCHITECTURES)
gguf_config.OF_ARCHITECTURE.update(gguf.OF_ARCHITECTURE)
GGUF_OF.update(gguf.NAMES)


@add_part
def _part(model: Any, checkpoint: Any, seed: int) -> WorkerPart | None:
    if not isinstance(model.config, HybridConfig):
        return None
    from .worker import state_part

    return state_part(model)


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    from .engine import engine_part

    return engine_part(worker, options, meter)
