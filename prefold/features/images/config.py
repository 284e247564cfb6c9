"""The description of a tower, the part of a model that computes the rows of images. No torch.

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

# Rows of one piece of the tower's work. Fewer rows make linears slow; more rows make decode steps wait longer.
PIECE_ROWS = 512

# Prefixes of tensor names: of the text model, and of the tower. Versions of transformers have written several forms.
TEXT = r"(model\.)?(language_model|text_model)\.(model\.)?"
_TOWERS = r"vision_tower(\.vision_model)?|vision_model|multi_modal_projector|connector|embed_vision"
TOWER = rf"(model\.)?({_TOWERS})\.(encoder\.)?"

# Settings of transformers' towers that change results, with the only supported value.
FIXED: Mapping[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
    "use_resampler": False,
    "qk_layer_norms": False,
}


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A vision transformer and its projector.

    Attributes:
        kind: the projector. "gemma3": squares of patches are averaged, RMS normed and projected. "idefics3": squares
            of patches are concatenated (pixel shuffle) and projected. Both follow a SigLIP. "gemma4": as "gemma3",
            after its own kind of transformer
        image_size: height and width of a tile, the image that the tower sees; 0: each image is one tile of its own size
        patch_size: height and width of a patch, which is one row inside the tower
        merge: a square of merge x merge patches becomes one row of the model
        output: width of such a row, the model's hidden size
        most_rows: maximum rows of one image ("gemma4" only, as all that follow)
        head_size: size of a head
        places: rows of the position table, for each axis
        theta: base of the rotary positions; each axis has half of a head
        clips: the inputs and outputs of linears are clamped
        shifts: rows are shifted and scaled before the projector
        both_ways: in sliding-window layers, the rows of an image see each other in both directions
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
            raise UnsupportedModelError(
                f"the tower's hidden size {self.hidden} is no multiple of its {self.heads} heads"
            )
        if self.kind == "gemma4":
            return
        if self.side < 1 or self.side // self.merge < 1:
            raise UnsupportedModelError(
                f"a tile of {self.image_size} pixels has {self.side} patches of {self.patch_size} pixels along a side, "
                f"too few for a square of {self.merge} x {self.merge} patches"
            )

    @property
    def side(self) -> int:
        """Return the number of patches along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Return the number of patches of a tile, or the maximum if tiles differ in size."""
        return self.side**2 if self.image_size else self.most_rows * self.merge**2

    @property
    def rows(self) -> int:
        """Return the number of the model's rows per tile, or the maximum if tiles differ in size."""
        return (self.side // self.merge) ** 2 if self.image_size else self.most_rows

    @property
    def span(self) -> bool:
        """Return whether the rows of a tile see each other in both directions, and so form one span."""
        return self.kind == "gemma3" or self.both_ways

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def q_size(self) -> int:
        """Return the size of a patch's queries in all heads. Keys and values have the same size."""
        return self.heads * self.head_dim

    @property
    def patch_inputs(self) -> int:
        """Return the number of values of a patch, in three colours."""
        return 3 * self.patch_size**2

    @property
    def merged(self) -> int:
        """Return the number of values that the projector reads for one row."""
        return self.hidden * self.merge**2 if self.kind == "idefics3" else self.hidden

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return a tile's patches (from top to bottom, from left to right). Raise ValueError for a wrong size."""
        size, square = self.image_size, self.merge * self.patch_size
        if size and (height, width) != (size, size):
            raise ValueError(f"tiles are {height} x {width} pixels; they must be {size} x {size}")
        down, across = height // self.patch_size, width // self.patch_size
        if not size and (height % square or width % square or not 0 < down * across <= self.patches):
            raise ValueError(
                f"a tile is {height} x {width} pixels; its sides must be multiples of {square} pixels, and it may "
                f"become at most {self.rows} rows"
            )
        return down, across

    def tiles_of(self, rows: int) -> tuple[int, int]:
        """Return (tiles, patches per tile) of an image with this number of rows in the model."""
        return (rows // self.rows, self.patches) if self.image_size else (1, rows * self.merge**2)

    def pieces(self, tiles: int, patches: int | None = None) -> np.ndarray:
        """Return the floating-point operations of each piece of one layer's work, in order, float64 [pieces].

        A layer has two stages: queries, keys and values; then attention and the rest. All rows finish the first stage
        before any row starts the second. A piece is at most PIECE_ROWS rows in one stage.

        Args:
            tiles: number of tiles
            patches: patches per tile; None for tiles of one fixed size
        """
        patches = self.patches if patches is None else patches
        rows, h, q, linears = tiles * patches, self.hidden, self.q_size, 3 if self.kind == "gemma4" else 2
        sizes = np.diff(np.append(np.arange(0, rows, PIECE_ROWS), rows)).astype(np.float64)
        behind = 4 * patches * q + 2 * h * q + 2 * linears * h * self.intermediate
        return np.concatenate((sizes * (6 * h * q), sizes * behind))


# transformers' defaults for keys that a vision_config lacks, by the tower's kind.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"patch_size": 16, "hidden_size": 768, "num_attention_heads": 12},
    "idefics3": {"patch_size": 32, "hidden_size": 1152, "num_attention_heads": 16},
}


def tower_config(kind: Literal["gemma3", "idefics3"], hf: Settings, output: int) -> TowerConfig:
    """Return the tower of a model's config. Raise UnsupportedModelError for unsupported settings.

    Args:
        output: the text model's hidden size
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
            squares = f"{side} x {side} patches cannot be averaged into this number of equal squares"
            raise CheckpointError(f"{hf.file}: mm_tokens_per_image is {rows}; {squares}")
        merge = side // across
    else:
        merge = hf.size("scale_factor", 2)
        if side % merge:
            raise CheckpointError(f"{hf.file}: scale_factor is {merge}; it must divide the {side} patches along a side")
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
    """Return the tower of Gemma 4's config. Raise UnsupportedModelError for unsupported settings.

    Arguments are as in TowerConfig.
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
    # The key of the checkpoints. transformers ignores it, and reads the number of rows from the image processor's file.
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
    """Return a size of the tower. It may be stored as a list of two equal numbers."""
    value = vision.get(key)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return (vision | {key: value[0]}).size(key, default)
    return vision.size(key, default)


# By TowerConfig.kind: (architecture of the whole model, architecture of its text model).
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaForCausalLM"),
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
}
# Kinds of projectors by their names in GGUF files.
PROJECTORS: Mapping[str, str] = {"gemma3": "gemma3", "idefics3": "idefics3", "gemma4v": "gemma4"}
# Defaults of `merge` for GGUF files that lack it.
GEMMA3_MERGE, GEMMA4_MERGE = 4, 3


def config_with_tower(config: Settings, tower: GGUFFile) -> Settings:
    """Return the config.json keys of a model with text and images, from its text model's config and a tower's file.

    Raise UnsupportedModelError for an unknown kind of tower, and CheckpointError for another model's tower.
    """
    kind = _kind(tower)
    architecture, text = ARCHITECTURES[kind]
    if config.get("architectures") != [text]:
        raise CheckpointError(f"{tower.path} is the tower of a {kind} model, but {config.file} is not a {text}")
    read = Settings(tower.metadata, str(tower.path))
    prefix = "clip.vision."
    for key in ("clip.use_silu", "clip.has_audio_encoder"):
        if kind != "gemma4" and read.flag(key):
            raise UnsupportedModelError(f"{tower.path}: {key} is true, which is not supported")
    hidden = config.size("hidden_size")
    output = read.size(prefix + "projection_dim", hidden)
    if output != hidden:
        raise CheckpointError(
            f"{tower.path} makes rows of {output} values; {config.file} has a hidden size of {hidden}"
        )
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
    """Return the keys of `config_with_tower` for Gemma 4. An audio tower in the same file is ignored."""
    hidden, heads = read.size(prefix + "embedding_length"), read.size(prefix + "attention.head_count")
    table = tower.tensors.get("v.position_embd.weight")
    if table is None or len(table.shape) != 3:
        raise CheckpointError(f"{tower.path} has no tensor v.position_embd.weight with positions of two axes")
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
    # GGUF files lack this setting. Images see themselves in both directions in the models without per-layer embeddings
    # (26B-A4B, 31B).
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
    """Return the image processor's settings in a tower's GGUF file."""
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
    """Return the image processor's settings for tiles of this size.

    Args:
        longest: longest side of an image before cutting
    """
    if kind == "gemma4":
        return {}
    if kind == "gemma3":
        return {"size": {"height": size, "width": size}}
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}


def _kind(tower: GGUFFile) -> str:
    """Return the kind of the tower's projector. Raise UnsupportedModelError for an unknown one."""
    metadata = tower.metadata
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if kind not in PROJECTORS:
        supported = ", ".join(PROJECTORS)
        raise UnsupportedModelError(f"{tower.path}: the projector {kind!r} is not supported; supported are {supported}")
    return PROJECTORS[str(kind)]


def _intermediate(tower: GGUFFile) -> int:
    """Return the MLP's width from its first bias, because the metadata of some files says 0."""
    biases = [tower.tensors.get(f"v.blk.0.{name}.bias") for name in ("ffn_up", "ffn_down")]
    sizes = [bias.shape[0] for bias in biases if bias is not None and len(bias.shape) == 1]
    if not sizes:
        raise CheckpointError(f"{tower.path} has no tensor v.blk.0.ffn_up.bias")
    return max(sizes)
