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
_TOWERS = r"vision_tower(\.vision_model)?|vision_model|multi_modal_projector|connector|embed_vision"
TOWER = rf"(model\.)?({_TOWERS})\.(encoder\.)?"

# Settings of transformers' towers that change what a tower gives, and the one value that works.
FIXED: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
    "use_resampler": False,
    "qk_layer_norms": False,
}


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A TowerConfig describes a vision transformer and the projector behind it.

    kind        the projector. "gemma3": squares of patches are averaged, RMS normed and projected. "idefics3": squares
                of patches are put side by side (pixel shuffle) and projected. Both have SigLIP before them. "gemma4":
                as "gemma3", behind a transformer of its own
    image_size  height and width of a tile, the image that the tower sees; 0: each image is a tile of a size of its own
    patch_size  height and width of a patch, which is one row inside the tower
    merge       patches along one side of the square that becomes one row of the model
    output      the width of such a row: the model's hidden size

    Of "gemma4" alone:

    most_rows   the most rows of the model that an image becomes
    head_size   numbers of a head
    places      rows of the table of positions, for each axis
    theta       the base of the rotary positions, of which each axis has half of a head
    clips       whether what linears read and give is kept within bounds
    shifts      whether rows are shifted and scaled before the projector
    both_ways   whether the rows of an image see each other in both directions, in layers with a sliding window
    """

    kind: Literal["gemma3", "idefics3", "gemma4"]
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
    most_rows: int = 0
    head_size: int = 0
    places: int = 0
    theta: float = 0.0
    clips: bool = False
    shifts: bool = False
    both_ways: bool = False

    def __post_init__(self) -> None:
        if not self.head_size and self.hidden % self.heads:
            raise UnsupportedModelError(f"the tower's {self.heads} heads cannot share {self.hidden} numbers evenly")
        if self.kind == "gemma4":
            return
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
        """Returns how many patches a tile has, or at most has."""
        return self.side**2 if self.image_size else self.most_rows * self.merge**2

    @property
    def rows(self) -> int:
        """Returns how many rows of the model one tile becomes, or at most becomes."""
        return (self.side // self.merge) ** 2 if self.image_size else self.most_rows

    @property
    def span(self) -> bool:
        """Returns whether the rows of one tile see each other in both directions, so that they are one span."""
        return self.kind == "gemma3" or self.both_ways

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def q_size(self) -> int:
        """Returns how many numbers the queries of a patch are, and the keys, and the values."""
        return self.heads * self.head_dim

    @property
    def patch_inputs(self) -> int:
        """Returns how many numbers a patch has: those of three colours."""
        return 3 * self.patch_size**2

    @property
    def merged(self) -> int:
        """Returns how many numbers the projector reads for a row."""
        return self.hidden * self.merge**2 if self.kind == "idefics3" else self.hidden

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many patches a tile of this size has from top to bottom, and across. Raises ValueError for a size
        that tiles do not have."""
        size, square = self.image_size, self.merge * self.patch_size
        if size and (height, width) != (size, size):
            raise ValueError(f"tiles are {height} x {width} pixels; they must be {size} x {size}")
        down, across = height // self.patch_size, width // self.patch_size
        if not size and (height % square or width % square or not 0 < down * across <= self.patches):
            raise ValueError(
                f"a tile is {height} x {width} pixels; it must be {square} x {square} times at most {self.rows}"
            )
        return down, across

    def tiles_of(self, rows: int) -> tuple[int, int]:
        """Returns how many tiles an image of so many rows of the model has, and how many patches each has."""
        return (rows // self.rows, self.patches) if self.image_size else (1, rows * self.merge**2)

    def pieces(self, tiles: int, patches: int | None = None) -> np.ndarray:
        """Returns the floating-point operations of each piece of work that so many tiles make in one layer, in order,
        float64 [pieces]. patches: of each tile; None: of tiles that are all of one size

        A layer has two stages, and all rows go through the first before any goes through the second: queries, keys and
        values; attention, and all that follows. A piece is PIECE_ROWS rows in one stage, or what is left of them.
        """
        patches = self.patches if patches is None else patches
        rows, h, q, linears = tiles * patches, self.hidden, self.q_size, 3 if self.kind == "gemma4" else 2
        sizes = np.diff(np.append(np.arange(0, rows, PIECE_ROWS), rows)).astype(np.float64)
        behind = 4 * patches * q + 2 * h * q + 2 * linears * h * self.intermediate
        return np.concatenate((sizes * (6 * h * q), sizes * behind))


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


def gemma4_tower(hf: Settings, output: int, *, both_ways: bool) -> TowerConfig:
    """Returns the tower of Gemma 4's config. output, both_ways: as of TowerConfig

    Raises UnsupportedModelError for settings that do not work.
    """
    vision = hf.settings("vision_config")
    heads, rope = vision.size("num_attention_heads", 12), vision.settings("rope_parameters")
    fixed = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "num_key_value_heads": heads}
    for key, value in fixed.items():
        if vision.get(key, 12 if key == "num_key_value_heads" else None) not in (None, value):
            raise UnsupportedModelError(
                f"{vision.file}: {vision.prefix}{key} is {vision[key]!r}; only {value!r} is supported"
            )
    if (kind := rope.text("rope_type", "axial")) != "axial":
        raise UnsupportedModelError(f"{rope.file}: {rope.prefix}rope_type is {kind!r}; only 'axial' is supported")
    head_size = vision.size("head_dim", 64)
    if head_size % 4:
        raise vision.wrong("head_dim", "a multiple of 4")
    # Its name is that of the files: transformers reads how many rows there are from the settings of images alone.
    most, merge = hf.size("vision_soft_tokens_per_image", 280), vision.size("pooling_kernel_size", 3)
    places = vision.size("position_embedding_size", 10 * 1024)
    if places < most * merge:
        raise vision.wrong("position_embedding_size", f"at least {most * merge}, for images of {most} rows")
    eps = float(vision.number("rms_norm_eps", 1e-6, zero=True))
    return TowerConfig(
        kind="gemma4",
        hidden=vision.size("hidden_size", 768),
        layers=vision.size("num_hidden_layers", 16, most=MOST_LAYERS),
        heads=heads,
        intermediate=vision.size("intermediate_size", 3072),
        image_size=0,
        patch_size=vision.size("patch_size", 16),
        merge=merge,
        output=output,
        norm_eps=eps,
        projector_eps=eps,
        most_rows=most,
        head_size=head_size,
        places=places,
        theta=float(rope.number("rope_theta", 100.0)),
        clips=vision.flag("use_clipped_linears"),
        shifts=vision.flag("standardize"),
        both_ways=both_ways,
    )


def _square(vision: Settings, key: str, default: int) -> int:
    """Returns a size of the tower, which may be written as a list of two equal ones."""
    value = vision.get(key)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return (vision | {key: value[0]}).size(key, default)
    return vision.size(key, default)


# By TowerConfig.kind: the architectures of the whole model and of its text model.
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaForCausalLM"),
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
}
# What GGUF files call the projector of each kind.
PROJECTORS: Mapping[str, str] = {"gemma3": "gemma3", "idefics3": "idefics3", "gemma4v": "gemma4"}
# The `merge` of Gemma 3 and of Gemma 4, where the file does not say.
GEMMA3_MERGE, GEMMA4_MERGE = 4, 3


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
        if kind != "gemma4" and read.flag(key):
            raise UnsupportedModelError(f"{tower.path}: {key} is true, which is not supported")
    hidden = config.size("hidden_size")
    output = read.size(prefix + "projection_dim", hidden)
    if output != hidden:
        raise CheckpointError(f"{tower.path} makes rows of {output} numbers; {config.file} has a width of {hidden}")
    image_size, patch_size = read.size(prefix + "image_size"), read.size(prefix + "patch_size")
    if kind == "gemma4":
        return _gemma4_keys(config, tower, read, prefix)
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


def _gemma4_keys(config: Settings, tower: GGUFFile, read: Settings, prefix: str) -> Settings:
    """Returns what `config_with_tower` does, of Gemma 4. A tower for sound in the same file is left out."""
    hidden, heads = read.size(prefix + "embedding_length"), read.size(prefix + "attention.head_count")
    table = tower.tensors.get("v.position_embd.weight")
    if table is None or len(table.shape) != 3:
        raise CheckpointError(f"{tower.path} has no tensor v.position_embd.weight of two axes")
    vision = {
        "patch_size": read.size(prefix + "patch_size"),
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": read.size(prefix + "feed_forward_length"),
        "num_hidden_layers": read.size(prefix + "block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": read.number(prefix + "attention.layer_norm_epsilon", 1e-6, zero=True),
        "pooling_kernel_size": read.size(prefix + "projector.scale_factor", GEMMA4_MERGE),
        "position_embedding_size": table.shape[1],
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in tower.tensors,
        "standardize": "v.std_bias" in tower.tensors,
    }
    # No file says so: images of the models without embeddings of layers see themselves both ways (26B-A4B, 31B).
    both_ways = {} if config.get("hidden_size_per_layer_input") else {"use_bidirectional_attention": "vision"}
    keys = {
        "architectures": [ARCHITECTURES["gemma4"][0]],
        "model_type": "gemma4",
        "text_config": {**config, **both_ways},
        "vision_config": vision,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "torch_dtype": config["torch_dtype"],
    }
    return Settings(keys, str(tower.path))


def tower_settings(tower: GGUFFile) -> Settings:
    """Returns the settings of the image processor that a tower's GGUF file has."""
    read = Settings(tower.metadata, str(tower.path))
    if _kind(tower) == "gemma4":
        merge = read.size("clip.vision.projector.scale_factor", GEMMA4_MERGE)
        sizes = {"patch_size": read.size("clip.vision.patch_size"), "pooling_kernel_size": merge}
        return Settings(sizes, str(tower.path))
    size = read.size("clip.vision.image_size")
    colours = {key: read.get(f"clip.vision.{key}", [0.5] * 3) for key in ("image_mean", "image_std")}
    sizes = tile_settings(_kind(tower), size, read.size("clip.vision.preproc_image_size", 4 * size))
    return Settings(colours | sizes, str(tower.path))


def tile_settings(kind: str, size: int, longest: int) -> dict[str, Any]:
    """Returns the settings of an image processor that make tiles of this size. longest: the longest side of an image
    that is cut"""
    if kind == "gemma4":
        return {}
    if kind == "gemma3":
        return {"size": {"height": size, "width": size}}
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}


def _kind(tower: GGUFFile) -> str:
    """Returns the type of the tower's projector. Raises UnsupportedModelError for one that is not known."""
    metadata = tower.metadata
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if kind not in PROJECTORS:
        supported = ", ".join(PROJECTORS)
        raise UnsupportedModelError(f"{tower.path}: the projector {kind!r} is not supported; these are: {supported}")
    return PROJECTORS[str(kind)]


def _intermediate(tower: GGUFFile) -> int:
    """Returns the width of the MLP, from its first bias: the metadata of some files says 0."""
    biases = [tower.tensors.get(f"v.blk.0.{name}.bias") for name in ("ffn_up", "ffn_down")]
    sizes = [bias.shape[0] for bias in biases if bias is not None and len(bias.shape) == 1]
    if not sizes:
        raise CheckpointError(f"{tower.path} has no tensor v.blk.0.ffn_up.bias")
    return max(sizes)
