"""Loads a checkpoint's tower: checks names, shapes and memory first, then reads once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoint import Checkpoint
from ..checkpoint.gguf import GGUFFile
from ..errors import CheckpointError, UnsupportedModelError
from ..model.config import ModelConfig
from ..model.layers import Norm, Weight, linear_weights
from ..model.names import tower_name
from ..model.sources import RandomSource, SafetensorsSource, TensorSource
from ..model.weights import check_memory, check_tensors, fill_all, wanted_shapes
from .config import TowerConfig
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


PROJECTOR_NORM = "mm_soft_emb_norm.weight"
# By TowerConfig.kind. That of Gemma 3 is stored as [inputs, outputs], in folders and in GGUF files.
PROJECTION = {"gemma3": "mm_input_projection_weight", "idefics3": "modality_projection.proj.weight"}


def open_tower_source(
    checkpoint: Checkpoint, config: TowerConfig, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> TensorSource:
    """Returns the source of a tower's tensors. shapes: what the tower wants, for random weights."""
    if checkpoint.format == "dummy":
        return _RandomTower(shapes, seed)
    if checkpoint.mmproj is not None:
        return _GGUFTower(checkpoint.mmproj, config)
    return _FolderTower(checkpoint)


class _RandomTower(RandomSource):
    """A _RandomTower gives random weights, with norms that change nothing."""

    def read_into(self, name: str, target: Tensor, where: tuple[slice, ...] = ()) -> None:
        if name == PROJECTOR_NORM:
            target.fill_(0)  # stored less one
        elif re.search(r"norm\d?\.weight$", name):
            target.fill_(1)
        else:
            super().read_into(name, target, where)


class _FolderTower:
    """A _FolderTower reads the tower's tensors out of a Hugging Face folder, where the text model's lie too."""

    # The head that SigLIP pools with, which these models have and do not use, and positions that are no weights.
    IGNORED = re.compile(r"head\..*|embeddings\.position_ids")

    def __init__(self, checkpoint: Checkpoint):
        self._where: dict[str, tuple[safe_open, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, file in SafetensorsSource.opened(checkpoint):
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                name = tower_name(stored)
                if name is None or self.IGNORED.fullmatch(name):
                    continue
                if name in self._where:
                    raise CheckpointError(f"{path} has the tensor {stored!r} twice")
                shape = tuple(file.get_slice(stored).get_shape())
                self._where[name] = file, stored
                self.shapes[name] = shape[::-1] if name == PROJECTION["gemma3"] else _matrix(shape)

    def read_into(self, name: str, target: Tensor, where: tuple[slice, ...] = ()) -> None:
        file, stored = self._where[name]
        values = file.get_tensor(stored)
        values = values.T if name == PROJECTION["gemma3"] else values
        target.copy_(values.reshape(self.shapes[name])[where])


class _GGUFTower:
    """A _GGUFTower reads the tower's tensors out of a GGUF file of architecture "clip", as llama.cpp writes it."""

    TOP: ClassVar = {
        "v.patch_embd": "embeddings.patch_embedding",
        "v.position_embd": "embeddings.position_embedding",
        "v.post_ln": "post_layernorm",
    }
    # The projectors' tensors, with ".weight".
    PROJECTORS: ClassVar = {
        "mm.input_projection.weight": PROJECTION["gemma3"],
        "mm.soft_emb_norm.weight": PROJECTOR_NORM,
        "mm.model.fc.weight": PROJECTION["idefics3"],
    }
    LAYER: ClassVar = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }

    def __init__(self, file: GGUFFile, config: TowerConfig):
        self.file = file
        self.roles = dict(self.LAYER)
        # Files of older converters have them the other way round, which shows in how long the biases are.
        first = file.tensors.get("v.blk.0.ffn_up.bias")
        if first is not None and first.shape == (config.hidden,) and config.hidden != config.intermediate:
            self.roles |= {"ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}
        self._stored = {self._name(stored): stored for stored in file.tensors}
        self.shapes = {name: _matrix(file.tensors[stored].shape) for name, stored in self._stored.items()}
        if projection := self.shapes.get(PROJECTION["gemma3"]):
            self.shapes[PROJECTION["gemma3"]] = projection[::-1]

    def _name(self, stored: str) -> str:
        if stored in self.PROJECTORS:
            return self.PROJECTORS[stored]
        part, _, kind = stored.rpartition(".")
        if part in self.TOP:
            return f"{self.TOP[part]}.{kind}"
        if (match := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", part)) and match[2] in self.roles:
            return f"layers.{match[1]}.{self.roles[match[2]]}.{kind}"
        return stored  # unknown: reported under its own name

    def read_into(self, name: str, target: Tensor, where: tuple[slice, ...] = ()) -> None:
        values = torch.from_numpy(self.file.dequantize(self._stored[name]).copy())
        if name == PROJECTOR_NORM:
            values -= 1  # one is added already to what is stored
        values = values.T if name == PROJECTION["gemma3"] else values
        target.copy_(values.reshape(self.shapes[name])[where])
        self.file.let_go()


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape as a matrix has it that multiplies patches: what is stored as [outputs, 3, size, size] has all
    inputs of an output in one row."""
    if len(shape) < 3:
        return shape
    return shape[0], math.prod(shape[1:])
