"""Tiny random checkpoints of models that see images, written by transformers.

folder = tiny_vision(tmp_path, "gemma3")          # config.json, model.safetensors, tokenizer, processor settings
oracle = vision_reference(folder)                 # the transformers model, float32, eager
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import GEMMA4 as ARCHITECTURES_GEMMA4
from architectures import GEMMA4_26B, TINY
from tiny import OWN, SIZES, randomise, write_tokenizer
from tokenizers import AddedToken, Tokenizer

FAMILIES = ("gemma3", "idefics3", "smolvlm")
# Gemma 4 as E2B and E4B are; and as 26B-A4B and 31B are, whose images see themselves both ways.
GEMMA4 = ("gemma4", "gemma4 both ways")
CLASSES = {"gemma3": "Gemma3", "idefics3": "Idefics3", "smolvlm": "SmolVLM"} | dict.fromkeys(GEMMA4, "Gemma4")
# Odd sizes, a head_dim that is no multiple of anything, and pixels at the edge of a tile that no patch has.
VISION: dict[str, Any] = {
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "image_size": 26,
    "patch_size": 4,
}
VISION_OF_GEMMA4: dict[str, Any] = {
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "intermediate_size": 50,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 24,
}
TEXT_OF_GEMMA4: dict[str, Any] = {"sliding_window": 9, "pad_token_id": 5}
OF_GEMMA4: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma4": (ARCHITECTURES_GEMMA4, {"use_clipped_linears": True}),
    "gemma4 both ways": (
        GEMMA4_26B | {"use_bidirectional_attention": "vision", "num_experts": 4, "moe_intermediate_size": 16},
        {"standardize": True},
    ),
}
IMAGE_TOKENS = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "idefics3": ("<fake_token_around_image>", "<image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"),
}
IMAGE_TOKENS["smolvlm"] = IMAGE_TOKENS["idefics3"]
IMAGE_TOKENS |= dict.fromkeys(GEMMA4, ("<|image>", "<|image|>", "<image|>"))
PLACEHOLDER = {"gemma3": "<start_of_image>", "idefics3": "<image>", "smolvlm": "<image>"}
PLACEHOLDER |= dict.fromkeys(GEMMA4, "<|image|>")
_numbers = itertools.count()


def chat_template(family: str) -> str:
    """Parts as the templates of these models write them."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + PLACEHOLDER[family]
        + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tiny_vision(
    tmp_path: Path,
    family: str = "gemma3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A folder under `tmp_path`. vision, text: keys of these parts of its config; settings: of its images;
    overrides: keys of the config itself."""
    import transformers

    folder = Path(tmp_path) / f"{family}-images-{next(_numbers)}"
    tokenizer = write_vision_tokenizer(folder, family)
    own, visual = OWN["gemma3"] if family == "gemma3" else {"model_type": "llama"}, VISION
    if family in GEMMA4:
        own, visual = OF_GEMMA4[family][0] | TEXT_OF_GEMMA4, VISION_OF_GEMMA4 | OF_GEMMA4[family][1]
        own = TINY | own
    sizes = SIZES | own | (text or {})
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    top: dict[str, Any] = {"image_token_id": tokenizer.token_to_id(IMAGE_TOKENS[family][1])}
    if family in GEMMA4:
        top["vision_soft_tokens_per_image"] = 9
    elif family == "gemma3":
        top = {"mm_tokens_per_image": 9, "image_token_index": top["image_token_id"]}
    else:
        top |= {"scale_factor": 2, "tie_word_embeddings": False}
    name = CLASSES[family]
    config = getattr(transformers, name + "Config")(
        text_config=sizes, vision_config=visual | (vision or {}), **(top | overrides)
    )
    model = getattr(transformers, name + "ForConditionalGeneration")(config)
    randomise(model, seed, norm=0 if family == "gemma3" else 1)
    randomise_buffers(model, seed)
    soften(model)
    model.to(dtype).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings(family, config, settings)))
    return folder


def randomise_buffers(model: torch.nn.Module, seed: int) -> None:
    """Gives numbers to what is stored beside parameters: bounds that cut, shifts and scales."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            values = torch.randn(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                buffer.copy_((1.5 + 0.2 * values) * (-1 if name.endswith("_min") else 1))
            elif name.endswith(("layer_scalar", "std_scale")):
                buffer.copy_(1 + 0.2 * values)
            elif name.endswith("std_bias"):
                buffer.copy_(values)


def soften(model: torch.nn.Module) -> None:
    """Makes the tower's norms those of a LayerNorm, and its rows as large as embeddings are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" in name and name.endswith(
                ("layer_norm1.weight", "layer_norm2.weight", "post_layernorm.weight")
            ):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def image_settings(family: str, config: Any, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    if family in GEMMA4:
        vision = config.vision_config
        found = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
        return found | {"max_soft_tokens": 9} | (settings or {})
    size = config.vision_config.image_size
    found: dict[str, Any] = {"size": {"height": size, "width": size}, "do_pan_and_scan": False}
    if family != "gemma3":
        found = {"size": {"longest_edge": 2 * size}, "max_image_size": {"longest_edge": size}}
    found |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    found["image_processor_type"] = CLASSES[family] + "ImageProcessor"
    return found | (settings or {})


def write_vision_tokenizer(folder: Path, family: str) -> Tokenizer:
    """The tokenizer of `tiny.write_tokenizer`, with the tokens of images, and a template that writes parts."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in IMAGE_TOKENS[family]])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": chat_template(family)}
    if family == "gemma3" or family in GEMMA4:
        begin, row, end = IMAGE_TOKENS[family]
        settings["extra_special_tokens"] = {"boi_token": begin, "image_token": row, "eoi_token": end}
    path.write_text(json.dumps(settings))
    return tokenizer


def vision_reference(folder: Path, attention: str = "eager") -> torch.nn.Module:
    """The checkpoint as transformers loads it, float32, in evaluation mode."""
    import transformers

    loader = transformers.AutoModelForImageTextToText
    return loader.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def patches_of(tiles: Sequence[np.ndarray], patch: int, most: int) -> dict[str, torch.Tensor]:
    """Images as Gemma 4 of transformers takes them: patches, and the places of these. tiles: of one image each, [1, 3,
    height, width]; most: patches of an image"""
    patches, places = np.zeros((len(tiles), most, 3 * patch**2), np.float32), np.full((len(tiles), most, 2), -1)
    for number, (tile,) in enumerate(tiles):
        down, across = tile.shape[1] // patch, tile.shape[2] // patch
        found = tile.reshape(3, down, patch, across, patch).transpose(1, 3, 2, 4, 0).reshape(down * across, -1)
        patches[number, : len(found)] = found
        places[number, : len(found)] = [(x, y) for y in range(down) for x in range(across)]
    return {"pixel_values": torch.from_numpy(patches), "image_position_ids": torch.from_numpy(places)}


def tile_attend(patches: int, scale: float | None = None):
    """Attention of towers by the book: rows of one tile see each other. patches: of a tile; scale: of the products of
    queries and keys; None: as usual"""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        tiles = torch.arange(len(k)) // patches
        apart = tiles[start : start + len(q), None] != tiles
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        weights = (q.float() @ k.float().transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(
            apart, -torch.inf
        )
        return (weights.softmax(-1) @ v.float()).to(q.dtype).transpose(0, 1)

    return attend


def drawing(seed: int, height: int, width: int) -> np.ndarray:
    """Pixels of a smooth random picture, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width]
    waves = rng.uniform(0.05, 0.7, (3, 2))
    return np.stack([(np.sin(a * down + b * across) * 120 + 128).astype(np.uint8) for a, b in waves], -1)


def write_gguf_tower(folder: Path, path: Path, *, swapped: bool = False) -> None:
    """A tower of a folder as llama.cpp's converter writes it. swapped: with ffn_up and ffn_down as older ones did."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    vision, gemma = config["vision_config"], config["model_type"] == "gemma3"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("gemma3" if gemma else "idefics3")
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    writer.add_vision_use_gelu(True)
    side = vision["image_size"] // vision["patch_size"]
    merge = side // int(config["mm_tokens_per_image"] ** 0.5) if gemma else config["scale_factor"]
    writer.add_vision_projector_scale_factor(merge)
    if not gemma:
        writer.add_uint32("clip.vision.preproc_image_size", settings["size"]["longest_edge"])
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    names = {
        "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
        "post_layernorm": "v.post_ln", "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        "model.connector.modality_projection.proj": "mm.model.fc",
    }  # fmt: skip
    roles = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": up, "mlp.fc2": down,
    }  # fmt: skip
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name = stored.removeprefix("vision_tower.").removeprefix("model.vision_model.")
        if name == "multi_modal_projector.mm_input_projection_weight":
            writer.add_tensor("mm.input_projection.weight", tensor.numpy())
            continue
        module, _, kind = name.rpartition(".")
        if module.startswith("encoder.layers."):
            number, role = module.removeprefix("encoder.layers.").split(".", 1)
            writer.add_tensor(f"v.blk.{number}.{roles[role]}.{kind}", tensor.numpy())
        elif module in names:
            offset = 1 if names[module] == "mm.soft_emb_norm" else 0
            writer.add_tensor(f"{names[module]}.{kind}", tensor.numpy() + np.float32(offset))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_gemma4_tower(folder: Path, path: Path) -> None:
    """The tower of Gemma 4 of a folder as llama.cpp's converter writes it, with a tensor of one for sound."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_has_audio_encoder(True)
    writer.add_clip_vision_projector_type(gguf.VisionProjectorType.GEMMA4V)
    writer.add_vision_image_size(224)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean([0.0, 0.0, 0.0])
    writer.add_vision_image_std([1.0, 1.0, 1.0])
    if vision["pooling_kernel_size"] != 3:
        writer.add_vision_projector_scale_factor(vision["pooling_kernel_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    ends = (".weight", ".input_max", ".input_min", ".output_max", ".output_min")
    for stored, tensor in load_file(folder / "model.safetensors").items():
        if "vision" not in stored:
            continue
        name = stored.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        values = tensor.numpy()[None] if tensor.ndim == 0 else tensor.numpy()
        if name.endswith("input_proj.weight"):
            size = vision["patch_size"]
            values = np.ascontiguousarray(values.reshape(-1, size, size, 3).transpose(0, 3, 1, 2))
        found = names.get_name(name, try_suffixes=ends)
        assert found is not None, name
        writer.add_tensor(found, values)
    writer.add_tensor("a.blk.0.ln1.weight", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
