"""Loads a checkpoint's tower: checks names, shapes and memory first, then reads once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from ..checkpoint import Checkpoint
from ..errors import UnsupportedModelError
from ..model.config import ModelConfig
from ..model.layers import Norm, Weight, linear_weights
from ..model.weights import check_memory, check_tensors, fill_all, wanted_shapes
from .config import tower_of
from .tower import Tower, TowerLayer
from .tower_config import TowerConfig
from .tower_sources import PROJECTION, PROJECTOR_NORM, open_tower_source


def load_tower(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    pack: bool = True,
    seed: int = 0,
) -> Tower:
    """Returns the tower of `checkpoint`, in evaluation mode. config: of the whole model; the others as of `load_model`.

    Raises UnsupportedModelError for a model without a tower, OutOfMemoryError (before anything is read), and
    CheckpointError, naming every tensor that is missing, unexpected or misshapen.
    """
    device = torch.device(device)
    settings = tower_of(config)
    if settings is None:
        raise UnsupportedModelError(f"{checkpoint.name} has no tower: it takes text alone")
    tower = Tower(settings, dtype=dtype, device=torch.device("meta"))
    weights = list(tower_weights(tower))
    source = open_tower_source(checkpoint, settings, wanted_shapes(weights), seed)
    check_tensors(checkpoint, weights, source)
    check_memory(checkpoint, weights, device, dtype)
    fill_all(weights, source, device, pack=pack)
    return tower.eval()


def tower_weights(tower: Tower) -> Iterator[Weight]:
    """Yields every parameter of the tower with the names of its tensors."""
    config: TowerConfig = tower.config
    hidden = config.hidden
    yield from linear_weights(tower.patch, ("embeddings.patch_embedding", hidden))
    yield Weight(tower, "positions", (("embeddings.position_embedding.weight", config.patches),))
    for number, layer in enumerate(tower.layers):
        yield from _layer(cast(TowerLayer, layer), f"layers.{number}.", config)
    yield from _norm(tower.norm, "post_layernorm", hidden)
    if tower.projector_norm is not None:
        yield Weight(tower.projector_norm, "weight", ((PROJECTOR_NORM, hidden),), offset=1.0)
    yield Weight(tower.projector, "weight", ((PROJECTION[config.kind], config.output),))


def _layer(layer: TowerLayer, prefix: str, config: TowerConfig) -> Iterator[Weight]:
    hidden, attention, mlp = config.hidden, prefix + "self_attn.", prefix + "mlp."
    yield from _norm(layer.input_norm, prefix + "layer_norm1", hidden)
    yield from linear_weights(layer.qkv, *((f"{attention}{name}_proj", hidden) for name in "qkv"))
    yield from linear_weights(layer.o, (attention + "out_proj", hidden))
    yield from _norm(layer.post_norm, prefix + "layer_norm2", hidden)
    yield from linear_weights(layer.up, (mlp + "fc1", config.intermediate))
    yield from linear_weights(layer.down, (mlp + "fc2", hidden))


def _norm(norm: Norm, name: str, hidden: int) -> Iterator[Weight]:
    yield Weight(norm, "weight", ((name + ".weight", hidden),))
    yield Weight(norm, "bias", ((name + ".bias", hidden),))
