"""Loads a model with gradients, and saves it as a folder that prefold and transformers can load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint import Checkpoint
from ..checkpoint.settings import CONTEXT
from ..errors import CheckpointError, UnsupportedModelError
from ..model import ModelConfig
from ..model.sources import as_stored
from ..text import load_tokenizer
from ..worker.torch.load import load_model as load
from ..worker.torch.model import CausalLM
from ..worker.torch.tensors import array_of, tensor_of

# Files that lie beside the weights: tokenizer, chat templates, settings of generation.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*.jinja")
# Files that are not copied: they are written anew, or describe how the weights lay in files before.
WRITTEN = ("config.json", "*.safetensors.index.json", "*.bin.index.json")


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> CausalLM:
    """Return the model of a checkpoint, in evaluation mode. Its weights have gradients.

    dtype: of all weights (a classification head stays float32); seed: of random weights

    Raise UnsupportedModelError for an architecture or settings that prefold does not know, OutOfMemoryError before
    anything is read, and CheckpointError with the names of tensors that are missing, unexpected or misshapen.
    """
    return load(checkpoint, dtype=dtype, device=device, pack=False, seed=seed)


def save_model(
    model: CausalLM, checkpoint: Checkpoint, folder: str | Path, *, dtype: torch.dtype | None = None
) -> Path:
    """Writes `model`, which was loaded from `checkpoint`, to `folder`, and returns the folder's path.

    It holds config.json, model.safetensors and the tokenizer. dtype: that of the tensors, by default the model's.
    Raises CheckpointError where the folder is the checkpoint's own, or the model is packed or split over ranks, and
    UnsupportedModelError for a model with a tower, and for rotary settings that transformers lacks.
    """
    folder = Path(folder)
    if checkpoint.path is not None and folder.resolve() == checkpoint.path.resolve():
        raise CheckpointError(f"{folder} holds the checkpoint that the model was loaded from; save to another folder")
    if model.ranks.size > 1:
        raise CheckpointError("the model is split over ranks, each of which has a part of it; load it whole to save it")
    if any(rope.kind == "factors" for rope in model.config.ropes):
        raise UnsupportedModelError(
            f"{checkpoint.name} has rotary frequencies of its own, which transformers cannot read from a config"
        )
    if model.config.text is not model.config:
        raise UnsupportedModelError(
            f"{checkpoint.name} has a tower, which would not be written; save it by transformers"
        )
    dtype = dtype or model.dtype
    tensors = _stored(_tensors(model, dtype), model.config)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(checkpoint.config) | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    config.pop(CONTEXT, None)
    config.pop("quantization_config", None)
    if model.config.lm_head:
        config["tie_word_embeddings"] = model.lm_head is None
    config |= _write_tokenizer(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(model: CausalLM, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the model's tensors as checkpoints have them, each linear by itself, under prefold's names."""
    tensors = {}
    for weight in model.held:
        if weight.parameter is None:
            raise CheckpointError("the model's weights are packed; load it with pack=False to save it")
        values = weight.parameter.detach().cpu() - weight.offset if weight.offset else weight.parameter.detach().cpu()
        for (name, _), part in zip(weight.parts, values.split([rows for _, rows in weight.parts]), strict=True):
            tensors[name] = part.to(dtype, copy=True)
    return tensors


def _stored(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors under the names of the checkpoint's family, and in its shapes: the inverse of
    `Names.of_tensor`."""
    names = config.names
    stored_as = {names_of_parts: (stored, parts) for stored, parts in names.parts.items() for names_of_parts in parts}
    orders = {name: order for name in tensors if (order := config.row_order(name)) is not None}
    turned = {name: tensor_of(as_stored(array_of(tensors[name]), order)) for name, order in orders.items()}
    tensors = {**tensors, **turned}
    stored, tensors = _stacks(tensors, config) if names.writes_stacks else ({}, tensors)
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        path, rest = ("", name) if layer is None else (f"{names.layer(int(layer[1]))}.", layer[2])
        # A tensor with a name of its own, or a module's.
        module, _, kind = (rest, "", "") if rest in stored_as else rest.rpartition(".")
        template = re.sub(r"\.\d+(?=\.|$)", ".{}", module, count=1)
        called, parts = stored_as.get(module) or stored_as.get(template, (module, (module,)))
        if (number := re.search(r"\.(\d+)(?=\.|$)", module)) is not None:  # of an expert, or of a head
            called, parts = called.replace("{}", number[1]), tuple(part.replace("{}", number[1]) for part in parts)
        if module != parts[0]:
            continue  # a tensor of several parts is stored when its first part comes
        end = f".{kind}" if kind else ""
        if len(parts) > 1:
            tensor = torch.cat([tensors[f"{name.removesuffix(rest)}{part}{end}"] for part in parts])
        if not kind and len(parts) > 1:  # Huginn's biases of q and k
            tensor = tensor.view(2, 1, config.heads, config.head_dim)
        if name.endswith(names.single_rows):
            tensor = tensor[None]
        if names.transposed and layer is not None and tensor.dim() == 2:
            tensor = tensor.T.contiguous()
        prefix = "" if module.split(".")[0] in ("lm_head", "score") else names.prefix
        stored[f"{prefix}{path}{called}{end}"] = tensor
    return stored


def _stacks(tensors: Mapping[str, Tensor], config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the stacks of a checkpoint (`Names.stacks`) by their names there, and the tensors that are in none."""
    names, remaining, stored = config.names, dict(tensors), {}
    for number in range(config.layers):
        for stack, templates in names.stacks.items():
            matrices: list[Tensor] = []
            while (first := f"layers.{number}.{templates[0].format(len(matrices))}") in remaining:
                parts = [first, *(f"layers.{number}.{other.format(len(matrices))}" for other in templates[1:])]
                tensors_of = [remaining.pop(part) for part in parts]
                matrix = torch.stack(tensors_of, 1).flatten(0, 1) if names.in_turn else torch.cat(tensors_of)
                matrices.append(matrix.T if names.turned and matrix.dim() == 2 else matrix)
            if matrices:
                stored[f"{names.prefix}{names.layer(number)}.{stack}"] = torch.stack(matrices)
    return stored, remaining


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Writes a GGUF file's tokenizer, or copies the files beside a folder's weights, and returns keys for the
    config."""
    if checkpoint.gguf is None:
        if checkpoint.path is not None:
            _copy_companions(checkpoint.path, folder)
        return {}
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.special_tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if (template := checkpoint.metadata("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {name: number for name, number in ids.items() if number is not None}


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if not any(path.match(written) for written in WRITTEN):
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
