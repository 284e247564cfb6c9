"""Translates the metadata of a tower's GGUF file (llama.cpp's mmproj, architecture "clip") to a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.gguf import GGUFFile
from ..checkpoint.settings import MOST_LAYERS, Settings
from ..errors import CheckpointError, UnsupportedModelError

# By the projector's type: the architecture of the whole model, and the text model's that it stands on.
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaForCausalLM"),
}
# Patches along a side of what becomes a row of Gemma 3, where its file does not say.
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
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {**config, "model_type": "llama"} if kind == "idefics3" else dict(config),
        "vision_config": vision,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "torch_dtype": config["torch_dtype"],
    }
    if kind == "idefics3":
        found["scale_factor"] = read.size(prefix + "projector.scale_factor")
    else:
        merge = read.size(prefix + "projector.scale_factor", GEMMA3_MERGE)
        found["mm_tokens_per_image"] = (image_size // patch_size // merge) ** 2
    return Settings(found, str(tower.path))


def tower_settings(tower: GGUFFile) -> Settings:
    """Returns the keys that an image processor's file has, as far as a tower's GGUF file says."""
    read = Settings(tower.metadata, str(tower.path))
    size = read.size("clip.vision.image_size")
    found: dict[str, Any] = {
        "image_mean": read.get("clip.vision.image_mean", [0.5] * 3),
        "image_std": read.get("clip.vision.image_std", [0.5] * 3),
    }
    if _kind(tower) == "gemma3":
        found["size"] = {"height": size, "width": size}
    else:
        longest = read.size("clip.vision.preproc_image_size", 4 * size)
        found |= {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}
    return Settings(found, str(tower.path))


def _kind(tower: GGUFFile) -> str:
    """Returns the type of the tower's projector. Raises UnsupportedModelError for one that is not known."""
    metadata = tower.metadata
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{tower.path}: the projector {kind!r} is not supported; these are: {known}")
    return str(kind)


def _intermediate(tower: GGUFFile) -> int:
    """Returns the width of the MLP, by its first bias: some files say 0."""
    biases = [tower.tensors.get(f"v.blk.0.{name}.bias") for name in ("ffn_up", "ffn_down")]
    sizes = [bias.shape[0] for bias in biases if bias is not None and len(bias.shape) == 1]
    if not sizes:
        raise CheckpointError(f"{tower.path} has no tensor v.blk.0.ffn_up.bias")
    return max(sizes)
