"""Makes the processor of a checkpoint's images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoint import Checkpoint, read_object
from ..checkpoint.settings import Settings
from ..errors import CheckpointError
from .gemma3 import Gemma3Processor
from .gguf import tower_settings
from .idefics3 import Idefics3Processor
from .processor import Processor
from .tower_config import TowerConfig

if TYPE_CHECKING:
    from ..text import Tokenizer


KINDS: dict[str, type[Processor]] = {"gemma3": Gemma3Processor, "idefics3": Idefics3Processor}
# Where transformers keeps the settings: since version 5 inside the first file, before in the second.
NESTED, ALONE = "processor_config.json", "preprocessor_config.json"


def load_processor(checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None) -> Processor:
    """Returns what makes tiles of images for the tower of this checkpoint.

    tokenizer: the checkpoint's. Without one there are no prompts in which an image could stand, so only the tiles of
    the processor work. Raises CheckpointError where the tokenizer has no image token, or where the settings do not fit
    the tower.
    """
    kind = KINDS[tower.kind]
    image_token_id = 0 if tokenizer is None else tokenizer.token_id(kind.image_token)
    if image_token_id is None:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} has no token {kind.image_token!r}, by which prompts show images; "
            "use the tokenizer that belongs to the tower"
        )
    settings = _settings(checkpoint, tower)
    processor = kind(tower, settings, image_token_id)
    size = tower.image_size
    made = processor.tile_size
    if made != (size, size):
        raise CheckpointError(
            f"{settings.file} makes tiles of {made[0]} x {made[1]} pixels; the tower of {checkpoint.name} takes "
            f"{size} x {size}"
        )
    return processor


def _settings(checkpoint: Checkpoint, tower: TowerConfig) -> Settings:
    """Returns the settings of the checkpoint's images; without a file of them those that fit the tower."""
    size = tower.image_size
    if checkpoint.mmproj is not None:
        return tower_settings(checkpoint.mmproj)
    nested = read_object(checkpoint, NESTED)
    if isinstance(nested.get("image_processor"), dict):
        return Settings(nested["image_processor"], str(checkpoint.file(NESTED)), "image_processor.")
    alone = read_object(checkpoint, ALONE)
    if alone:
        return Settings(alone, str(checkpoint.file(ALONE)))
    sizes = {"size": {"height": size, "width": size}}
    if tower.kind == "idefics3":
        sizes = {"size": {"longest_edge": 4 * size}, "max_image_size": {"longest_edge": size}}
    return Settings(sizes, str(checkpoint.path or checkpoint.name))
