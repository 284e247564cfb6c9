"""Loads a checkpoint's tower: checks names, shapes and memory first, then reads once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from ...checkpoint import Checkpoint
from ...checkpoint.gguf import GGUFFile
from ...errors import CheckpointError, UnsupportedModelError
from ...model.checks import check_tensors
from ...model.config import ModelConfig
from ...model.layers import HeldWeight, Norm, linear_weights
from ...model.names import Names
from ...model.sources import RandomSource, SafetensorsSource, TensorSource, put
from ...model.weights import check_memory, fill_all, wanted_shapes
from .config import TOWER, TowerConfig
from .families import tower_of
from .tower import Tower, TowerLayer


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
    source: TensorSource
    if checkpoint.format == "dummy":
        source = _RandomTower(wanted_shapes(weights), seed)
    elif checkpoint.mmproj is not None:
        source = _of_gguf(checkpoint.mmproj, settings)
    else:
        source = _of_folder(checkpoint)
    check_tensors(checkpoint, wanted_shapes(weights), source)
    check_memory(checkpoint, weights, device, dtype)
    fill_all(weights, source, device, pack=pack)
    return tower.eval()


def tower_weights(tower: Tower) -> Iterator[HeldWeight]:
    """Yields every parameter of the tower with the names of its tensors."""
    config: TowerConfig = tower.config
    hidden = config.hidden
    yield from linear_weights(tower.patch, ("embeddings.patch_embedding", hidden))
    yield HeldWeight(tower, "positions", (("embeddings.position_embedding.weight", config.patches),))
    for number, layer in enumerate(tower.layers):
        yield from _layer(cast(TowerLayer, layer), f"layers.{number}.", config)
    yield from _norm(tower.norm, "post_layernorm", hidden)
    if tower.projector_norm is not None:
        yield HeldWeight(tower.projector_norm, "weight", ((PROJECTOR_NORM, hidden),), offset=1.0)
    yield HeldWeight(tower.projector, "weight", ((PROJECTION[config.kind], config.output),))


def _layer(layer: TowerLayer, prefix: str, config: TowerConfig) -> Iterator[HeldWeight]:
    hidden, attention, mlp = config.hidden, prefix + "self_attn.", prefix + "mlp."
    yield from _norm(layer.input_norm, prefix + "layer_norm1", hidden)
    yield from linear_weights(layer.qkv, *((f"{attention}{name}_proj", hidden) for name in "qkv"))
    yield from linear_weights(layer.o, (attention + "out_proj", hidden))
    yield from _norm(layer.post_norm, prefix + "layer_norm2", hidden)
    yield from linear_weights(layer.up, (mlp + "fc1", config.intermediate))
    yield from linear_weights(layer.down, (mlp + "fc2", hidden))


def _norm(norm: Norm, name: str, hidden: int) -> Iterator[HeldWeight]:
    yield HeldWeight(norm, "weight", ((name + ".weight", hidden),))
    yield HeldWeight(norm, "bias", ((name + ".bias", hidden),))


PROJECTOR_NORM = "mm_soft_emb_norm.weight"
# By TowerConfig.kind. That of Gemma 3 is stored as [inputs, outputs], in folders and in GGUF files.
PROJECTION = {"gemma3": "mm_input_projection_weight", "idefics3": "modality_projection.proj.weight"}


class _RandomTower(RandomSource):
    """A _RandomTower gives random weights, with norms that change nothing."""

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        if name == PROJECTOR_NORM:
            target.fill(0)  # stored less one
        elif re.search(r"norm\d?\.weight$", name):
            target.fill(1)
        else:
            super().read_into(name, target, part)


class _StoredTower:
    """A _StoredTower has the tensors of a tower out of files."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, Callable[[], np.ndarray]] = {}

    def add(self, name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> None:
        """Adds a tensor. shape: as it is stored; read: returns it"""
        if len(shape) > 2:  # what multiplies patches: all inputs of an output are in one row
            shape = shape[0], math.prod(shape[1:])
        self.shapes[name] = shape[::-1] if name == PROJECTION["gemma3"] else shape
        self._reads[name] = read

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        values = self._reads[name]()
        values = (values.T if name == PROJECTION["gemma3"] else values).reshape(self.shapes[name])
        return values[part] if part else values

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        put(target, self.read(name, part))


# The head that SigLIP pools with, which these models have and do not use, and positions that are no weights.
IGNORED = re.compile(r"head\..*|embeddings\.position_ids")


def _of_folder(checkpoint: Checkpoint) -> _StoredTower:
    """Returns the tower in a Hugging Face folder, where the text model's tensors lie too."""
    tensors = _StoredTower()
    for file in SafetensorsSource.opened(checkpoint):
        for stored, tensor in file.tensors.items():
            before = re.match(TOWER, stored)
            name = stored[before.end() :] if before else ""
            if not before or IGNORED.fullmatch(name):
                continue
            if name in tensors.shapes:
                raise CheckpointError(f"{file.path} has the tensor {stored!r} twice")
            tensors.add(name, tensor.shape, partial(file.array, stored))
    return tensors


# What llama.cpp calls these things in a GGUF file of architecture "clip", and the projectors' tensors.
GGUF = Names(
    prefix="v.",
    lists={"blk": 0},
    parts={
        "patch_embd": ("embeddings.patch_embedding",),
        "position_embd": ("embeddings.position_embedding",),
        "post_ln": ("post_layernorm",),
        "attn_q": ("self_attn.q_proj",),
        "attn_k": ("self_attn.k_proj",),
        "attn_v": ("self_attn.v_proj",),
        "attn_out": ("self_attn.out_proj",),
        "ln1": ("layer_norm1",),
        "ln2": ("layer_norm2",),
        "ffn_up": ("mlp.fc1",),
        "ffn_down": ("mlp.fc2",),
    },
)
GGUF_PROJECTORS = {
    "mm.input_projection.weight": PROJECTION["gemma3"],
    "mm.soft_emb_norm.weight": PROJECTOR_NORM,
    "mm.model.fc.weight": PROJECTION["idefics3"],
}


def _of_gguf(file: GGUFFile, config: TowerConfig) -> _StoredTower:
    tensors, names = _StoredTower(), GGUF
    # Files of older converters have them the other way round, which shows in how long the biases are.
    first = file.tensors.get("v.blk.0.ffn_up.bias")
    if first is not None and first.shape == (config.hidden,) and config.hidden != config.intermediate:
        names = replace(GGUF, parts={**GGUF.parts, "ffn_up": ("mlp.fc2",), "ffn_down": ("mlp.fc1",)})

    def read(stored: str) -> np.ndarray:
        values = file.dequantize(stored)
        return values - 1 if GGUF_PROJECTORS.get(stored) == PROJECTOR_NORM else values  # one is added to what is stored

    for stored, tensor in file.tensors.items():
        name = GGUF_PROJECTORS.get(stored) or names.of_tensor(stored)[0]
        tensors.add(name, tensor.shape, partial(read, stored))
    return tensors
