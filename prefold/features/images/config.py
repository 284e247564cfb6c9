"""Describes the tower of a model, the part that makes rows of images, as data. No torch.

It is read from a Hugging Face config, or from the metadata of a GGUF file (llama.cpp's mmproj, architecture "clip").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...checkpoint.gguf import GGUFFile
from ...checkpoint.settings import MOST_LAYERS, Settings
from ...errors import CheckpointError, UnsupportedModelError

# Rows of a piece of the tower's work: with fewer rows linears lose speed, with more rows steps wait for longer.
PIECE_ROWS = 512

# What checkpoints put before the names of the text model, and before those of the tower; versions of transformers
# wrote both in several ways.
TEXT = r"(model\.)?(language_model|text_model)\.(model\.)?"
TOWER = r"(model\.)?(vision_tower(\.vision_model)?|vision_model|multi_modal_projector|connector)\.(encoder\.)?"

# Settings of transformers' towers that change what a tower gives, and the one value that works.
FIXED: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
    "use_resampler": False,
    "qk_layer_norms": False,
}


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A TowerConfig describes a vision transformer (SigLIP) and the projector behind it.

    kind        the projector. "gemma3": squares of patches are averaged, RMS normed and projected. "idefics3": squares
                of patches are put side by side (pixel shuffle) and projected
    image_size  height and width of a tile, the image that the tower sees
    patch_size  height and width of a patch, which is one row inside the tower
    merge       patches along one side of the square that becomes one row of the model
    output      the width of such a row: the model's hidden size
    """

    kind: Literal["gemma3", "idefics3"]
    hidden: int
    layers: int
    heads: int
    intermediate: int
    image_size: int
    patch_size: int
    merge: int
    output: int
    norm_eps: float = 1e-6
    projector_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UnsupportedModelError(f"the tower's {self.heads} heads cannot share {self.hidden} numbers evenly")
        if self.side < 1 or self.side // self.merge < 1:
            raise UnsupportedModelError(
                f"a tile of {self.image_size} pixels has {self.side} patches of {self.patch_size} a side, which do not "
                f"make a square of {self.merge} patches a side"
            )

    @property
    def side(self) -> int:
        """Returns how many patches lie along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Returns how many patches a tile has."""
        return self.side**2

    @property
    def rows(self) -> int:
        """Returns how many rows of the model one tile becomes."""
        return (self.side // self.merge) ** 2

    @property
    def span(self) -> bool:
        """Returns whether the rows of one tile see each other in both directions, so that they are one span."""
        return self.kind == "gemma3"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_inputs(self) -> int:
        """Returns how many numbers a patch has: those of three colours."""
        return 3 * self.patch_size**2

    @property
    def merged(self) -> int:
        """Returns how many numbers the projector reads for a row."""
        return self.hidden if self.kind == "gemma3" else self.hidden * self.merge**2

    def pieces(self, tiles: int) -> np.ndarray:
        """Returns the floating-point operations of each piece of work that so many tiles make in one layer, in order,
        float64 [pieces].

        A layer has two stages, and all rows go through the first before any goes through the second: queries, keys and
        values; attention, and all that follows. A piece is PIECE_ROWS rows in one stage, or what is left of them.
        """
        rows, h = tiles * self.patches, self.hidden
        sizes = np.diff(np.append(np.arange(0, rows, PIECE_ROWS), rows)).astype(np.float64)
        behind = 4 * self.patches * h + 2 * h * h + 4 * h * self.intermediate
        return np.concatenate((sizes * (6 * h * h), sizes * behind))


# transformers' defaults for what a vision_config leaves out, by a tower's kind.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"patch_size": 16, "hidden_size": 768, "num_attention_heads": 12},
    "idefics3": {"patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16},
}


def tower_config(kind: Literal["gemma3", "idefics3"], hf: Settings, output: int) -> TowerConfig:
    """Returns the tower of a model's config. output: the text model's hidden size.

    Raises UnsupportedModelError for settings that do not work.
    """
    vision, default = hf.settings("vision_config"), DEFAULTS[kind]
    for key, value in FIXED.items():
        if vision.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"{vision.file}: {vision.prefix}{key} is {vision[key]!r}; only {value!r} is supported"
            )
    image_size = _square(vision, "image_size", 224)
    patch_size = _square(vision, "patch_size", default["patch_size"])
    side = image_size // patch_size
    if kind == "gemma3":
        rows = hf.size("mm_tokens_per_image", 256)
        across = int(rows**0.5)
        if across**2 != rows or across > side or side // (side // across) != across:
            squares = f"{side} x {side} patches cannot be averaged to as many squares"
            raise CheckpointError(f"{hf.file}: mm_tokens_per_image is {rows}; {squares}")
        merge = side // across
    else:
        merge = hf.size("scale_factor", 2)
        if side % merge:
            raise CheckpointError(f"{hf.file}: scale_factor is {merge}; it must divide the {side} patches of a side")
    eps = float(vision.number("layer_norm_eps", 1e-6, zero=True))
    return TowerConfig(
        kind=kind,
        hidden=vision.size("hidden_size", default["hidden_size"]),
        layers=vision.size("num_hidden_layers", 12, most=MOST_LAYERS),
        heads=vision.size("num_attention_heads", default["num_attention_heads"]),
        intermediate=vision.size("intermediate_size", 3072),
        image_size=image_size,
        patch_size=patch_size,
        merge=merge,
        output=output,
        norm_eps=eps,
        projector_eps=eps,
    )


def _square(vision: Settings, key: str, default: int) -> int:
    """Returns a size of the tower, which may be written as a list of two equal ones."""
    value = vision.get(key)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return (vision | {key: value[0]}).size(key, default)
    return vision.size(key, default)


# By the projector's type: the architectures of the whole model and of its text model.
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaForCausalLM"),
}
# The `merge` of Gemma 3, where its file does not say.
GEMMA3_MERGE = 4


def config_with_tower(config: Settings, tower: GGUFFile) -> Settings:
    """Returns the config.json keys of a model of text and images. config: those of its text model.

    Raises UnsupportedModelError for a tower that prefold does not know, and CheckpointError for one of another model.
    """
    kind = _kind(tower)
    architecture, text = ARCHITECTURES[kind]
    if config.get("architectures") != [text]:
        raise CheckpointError(f"{tower.path} is the tower of a {kind} model; {config.file} is no {text}")
    read = Settings(tower.metadata, str(tower.path))
    prefix = "clip.vision."
    for key in ("clip.use_silu", "clip.has_audio_encoder"):
        if read.flag(key):
            raise UnsupportedModelError(f"{tower.path}: {key} is true, which is not supported")
    hidden = config.size("hidden_size")
    output = read.size(prefix + "projection_dim", hidden)
    if output != hidden:
        raise CheckpointError(f"{tower.path} makes rows of {output} numbers; {config.file} has a width of {hidden}")
    image_size, patch_size = read.size(prefix + "image_size"), read.size(prefix + "patch_size")
    vision = {
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": read.size(prefix + "embedding_length"),
        "intermediate_size": _intermediate(tower),
        "num_hidden_layers": read.size(prefix + "block_count", most=MOST_LAYERS),
        "num_attention_heads": read.size(prefix + "attention.head_count"),
        "layer_norm_eps": read.number(prefix + "attention.layer_norm_epsilon", 1e-6, zero=True),
    }
    keys: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {**config, "model_type": "llama"} if kind == "idefics3" else dict(config),
        "vision_config": vision,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "torch_dtype": config["torch_dtype"],
    }
    if kind == "idefics3":
        keys["scale_factor"] = read.size(prefix + "projector.scale_factor")
    else:
        merge = read.size(prefix + "projector.scale_factor", GEMMA3_MERGE)
        keys["mm_tokens_per_image"] = (image_size // patch_size // merge) ** 2
    return Settings(keys, str(tower.path))


def tower_settings(tower: GGUFFile) -> Settings:
    """Returns the settings of the image processor that a tower's GGUF file has."""
    read = Settings(tower.metadata, str(tower.path))
    size = read.size("clip.vision.image_size")
    colours = {key: read.get(f"clip.vision.{key}", [0.5] * 3) for key in ("image_mean", "image_std")}
    sizes = tile_settings(_kind(tower), size, read.size("clip.vision.preproc_image_size", 4 * size))
    return Settings(colours | sizes, str(tower.path))


def tile_settings(kind: str, size: int, longest: int) -> dict[str, Any]:
    """Returns the settings of an image processor that make tiles of this size. longest: the longest side of an image
    that is cut"""
    if kind == "gemma3":
        return {"size": {"height": size, "width": size}}
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}


def _kind(tower: GGUFFile) -> str:
    """Returns the type of the tower's projector. Raises UnsupportedModelError for one that is not known."""
    metadata = tower.metadata
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if kind not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{tower.path}: the projector {kind!r} is not supported; these are: {supported}")
    return str(kind)


def _intermediate(tower: GGUFFile) -> int:
    """Returns the width of the MLP, from its first bias: the metadata of some files says 0."""
    biases = [tower.tensors.get(f"v.blk.0.{name}.bias") for name in ("ffn_up", "ffn_down")]
    sizes = [bias.shape[0] for bias in biases if bias is not None and len(bias.shape) == 1]
    if not sizes:
        raise CheckpointError(f"{tower.path} has no tensor v.blk.0.ffn_up.bias")
    return max(sizes)
