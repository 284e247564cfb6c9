"""The tensors of a tower by the names of its program, from a folder, from a GGUF file, or random. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ...checkpoint import Checkpoint
from ...checkpoint.gguf import GGUFFile
from ...checkpoint.mapped import Extent
from ...errors import CheckpointError, UnsupportedModelError
from ...kernels import StoredRows
from ...model.checks import check_tensors
from ...model.config import ModelConfig
from ...model.names import Names
from ...model.sources import RandomSource, SafetensorsSource, StoredSource, put
from .config import TOWER, TowerConfig
from .families import PROJECTION, PROJECTOR_NORM, TowerModel, tower_model, tower_of
from .gemma4 import FACTOR, PATCH, POSITIONS, SHIFT


def open_tower(checkpoint: Checkpoint, config: ModelConfig, seed: int) -> tuple[TowerModel, StoredSource]:
    """Return (the tower of a model, the source of its tensors).

    Raise UnsupportedModelError for a model without a tower, and CheckpointError with the names of tensors that are
    missing, unexpected or misshapen.
    """
    settings = tower_of(config)
    if settings is None:
        raise UnsupportedModelError(f"{checkpoint.name} has no tower, so it takes text alone")
    model = tower_model(settings)
    shapes = {name: shape for weight in model.program().weights for name, shape in weight.shapes.items()}
    source: StoredSource
    if checkpoint.format == "dummy":
        source = _RandomTower(shapes, seed, {PROJECTOR_NORM: 1.0})
    elif checkpoint.mmproj is not None:
        source = _of_gguf(checkpoint.mmproj, settings)
    else:
        source = _of_folder(checkpoint)
    check_tensors(checkpoint, shapes, source)
    return model, source


class _RandomTower(RandomSource):
    """Random weights, with norms and bounds that change nothing."""

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        if name == FACTOR or re.search(r"layer_norm\d\.weight$", name):
            target.fill(1)
        elif bound := re.search(r"_(min|max)$", name):
            target.fill(-np.inf if bound[1] == "min" else np.inf)
        else:
            super().read_into(name, target, part)


class _StoredTower:
    """The tensors of a tower, from files."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, Callable[[], np.ndarray]] = {}

    def add(self, name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> None:
        """Add a tensor.

        Args:
            shape: As stored.
            read: Returns the tensor.
        """
        if name == POSITIONS:  # the axes one after the other
            shape = math.prod(shape[:-1]), shape[-1]
        elif len(shape) > 2:  # the patch embedding: one row per output
            shape = shape[0], math.prod(shape[1:])
        shape = shape or (1,)
        self.shapes[name] = shape[::-1] if name == PROJECTION["gemma3"] else shape
        self._reads[name] = read

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        values = self._reads[name]()
        values = (values.T if name == PROJECTION["gemma3"] else values).reshape(self.shapes[name])
        return values[part] if part else values

    def read_into(self, name: str, target: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        put(target, self.read(name, part))

    def extent(self, name: str) -> Extent:
        return Extent(None, 0, self.read(name).nbytes)

    def stored_type(self, name: str) -> tuple[str, int]:
        return "", 0

    def stored(self, name: str) -> StoredRows | None:
        return None


# SigLIP's pooling head, which these models have but do not use, and position numbers, which are no weights.
IGNORED = re.compile(r"head\..*|embeddings\.position_ids")


def _of_folder(checkpoint: Checkpoint) -> _StoredTower:
    """Return the tower in a Hugging Face folder, which also has the text model's tensors."""
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


# llama.cpp's names in a GGUF file of architecture "clip", and its names of the projectors' tensors.
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


GEMMA4_GGUF = Names(
    prefix="v.",
    lists={"blk": 0},
    parts={
        "patch_embd.weight": (PATCH,),
        "position_embd.weight": (POSITIONS,),
        SHIFT: (SHIFT,),
        FACTOR: (FACTOR,),
        "ln1": ("input_layernorm",),
        "attn_q": ("self_attn.q_proj.linear",),
        "attn_k": ("self_attn.k_proj.linear",),
        "attn_v": ("self_attn.v_proj.linear",),
        "attn_q_norm": ("self_attn.q_norm",),
        "attn_k_norm": ("self_attn.k_norm",),
        "attn_out": ("self_attn.o_proj.linear",),
        "attn_post_norm": ("post_attention_layernorm",),
        "ln2": ("pre_feedforward_layernorm",),
        "ffn_gate": ("mlp.gate_proj.linear",),
        "ffn_up": ("mlp.up_proj.linear",),
        "ffn_down": ("mlp.down_proj.linear",),
        "ffn_post_norm": ("post_feedforward_layernorm",),
    },
)


def _of_gemma4_gguf(file: GGUFFile, config: TowerConfig) -> _StoredTower:
    """Return the tower of Gemma 4 in a GGUF file, which may have an audio tower too."""
    tensors, size = _StoredTower(), config.patch_size

    def patch(stored: str) -> np.ndarray:  # the file stores colours first
        return file.dequantize(stored).reshape(-1, 3, size, size).transpose(0, 2, 3, 1)

    for stored, tensor in file.tensors.items():
        if stored.startswith(("a.", "mm.a.")):
            continue
        name = "embedding_projection.weight"
        if stored != "mm.input_projection.weight":
            # Bounds belong to the module around a linear.
            name = re.sub(r"\.linear\.(?!weight)", ".", GEMMA4_GGUF.of_tensor(stored)[0])
        tensors.add(name, tensor.shape, partial(patch if name == PATCH else file.dequantize, stored))
    return tensors


def _of_gguf(file: GGUFFile, config: TowerConfig) -> _StoredTower:
    if config.kind == "gemma4":
        return _of_gemma4_gguf(file, config)
    tensors, names = _StoredTower(), GGUF
    # Older converters swapped the two names, which shows in the sizes of the biases.
    first = file.tensors.get("v.blk.0.ffn_up.bias")
    if first is not None and first.shape == (config.hidden,) and config.hidden != config.intermediate:
        names = replace(GGUF, parts={**GGUF.parts, "ffn_up": ("mlp.fc2",), "ffn_down": ("mlp.fc1",)})

    def read(stored: str) -> np.ndarray:
        values = file.dequantize(stored)
        return values - 1 if GGUF_PROJECTORS.get(stored) == PROJECTOR_NORM else values  # the program adds 1

    for stored, tensor in file.tensors.items():
        name = GGUF_PROJECTORS.get(stored) or names.of_tensor(stored)[0]
        tensors.add(name, tensor.shape, partial(read, stored))
    return tensors
