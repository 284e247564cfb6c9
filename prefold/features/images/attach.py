"""Register images in the core's tables. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checkpoint.checkpoint import TOWERS
from ...engine.schedule.parts import EnginePart, add_engine_part
from ...model.families import add_families
from ...spec.requests import FeatureCounter, add_counter
from ...worker.parts import WorkerPart, add_part
from .config import config_with_tower
from .families import REFUSED, SeeingConfig, gemma3_images, gemma4_images, idefics3_images
from .steps import ImageFacts

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ...worker.native.model import NativeModel
    from ...worker.torch.model import CausalLM

add_families(
    {
        "Gemma3ForConditionalGeneration": gemma3_images,
        "Gemma4ForConditionalGeneration": gemma4_images,
        "Idefics3ForConditionalGeneration": idefics3_images,
        "SmolVLMForConditionalGeneration": idefics3_images,
    },
    model_types={
        "gemma3": "Gemma3ForConditionalGeneration",
        "idefics3": "Idefics3ForConditionalGeneration",
        "smolvlm": "SmolVLMForConditionalGeneration",
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    },
    refused=REFUSED,
)
TOWERS["clip"] = config_with_tower
add_counter(
    FeatureCounter(
        "tower_runs",
        title="images",
        text=lambda count: f"{count:,} images encoded",
        is_brief=True,
        metric="Images that were encoded.",
    )
)


def _part(model: CausalLM, checkpoint: Checkpoint | None, seed: int) -> WorkerPart | None:
    if checkpoint is None or not isinstance(model.config, SeeingConfig):
        return None
    from .tensors import load_tower
    from .worker import image_part

    # Each rank encodes whole images, because each needs all of their rows.
    return image_part(load_tower(checkpoint, model.config, dtype=model.dtype, device=model.device, seed=seed))


def _native_part(model: NativeModel, checkpoint: Checkpoint | None, seed: int) -> WorkerPart | None:
    if checkpoint is None:
        return None
    from .native import load_tower
    from .worker import image_part

    return image_part(load_tower(checkpoint, model, seed))


add_part(_part, native=_native_part, concerns=lambda config: isinstance(config, SeeingConfig))


@add_engine_part
def _engine_part(worker: Any, options: Any, meter: Any, resources: Any) -> EnginePart | None:
    if worker.facts.of(ImageFacts) is None:
        return None
    from .scheduler import ImageScheduler
    from .table import MediaTable

    table = next((resource for resource in resources if isinstance(resource, MediaTable)), None)
    return ImageScheduler(worker, MediaTable() if table is None else table, options.images.media_memory, meter)
