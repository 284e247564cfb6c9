"""Enters hybrids in the tables of the core. No torch."""

from __future__ import annotations

from typing import Any

from ..checkpoint import gguf_config
from ..model.families import add_families, with_heads
from ..model.names import GGUF_OF
from ..schedule.parts import EnginePart, add_engine_part
from ..worker.protocol import WorkerPart, add_part
from . import gguf
from .config import HybridConfig, granite4, lfm2, qwen3_5, qwen3_5_with_images

_MIXTURE = "its layers are mixtures of experts beside layers of states; its dense relatives are supported"

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
    },
    refused={
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
