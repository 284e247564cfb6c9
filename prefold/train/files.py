"""Load a model with gradients, and save it as a folder that prefold and transformers can load."""

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

# Files beside the weights: tokenizer, chat templates, generation settings.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*.jinja")
# Files that are not copied: they are written anew, or describe the old weight files.
WRITTEN = ("config.json", "*.safetensors.index.json", "*.bin.index.json")


def load_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> CausalLM:
    """Load the model of a checkpoint for training.

    The model is in evaluation mode, and its weights have gradients.

    Args:
        checkpoint: The checkpoint, from `prefold.checkpoint.resolve`.
        dtype: Dtype of all weights. A classification head stays float32.
        device: The device.
        seed: Seed of random weights, for a checkpoint without weights.

    Returns:
        The model, a `torch.nn.Module`.

    Raises:
        UnsupportedModelError: prefold does not support the architecture or a setting.
        OutOfMemoryError: The weights do not fit in memory; raised before anything is read.
        CheckpointError: Tensors are missing, unexpected or have a wrong shape. The message names them.

    Example:
        >>> model = load_model(resolve("smollm2-135m"), dtype=torch.float32)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    """
    return load(checkpoint, dtype=dtype, device=device, pack=False, seed=seed)


def save_model(
    model: CausalLM, checkpoint: Checkpoint, folder: str | Path, *, dtype: torch.dtype | None = None
) -> Path:
    """Save a model as a folder with config.json, model.safetensors and the tokenizer.

    Args:
        model: The model.
        checkpoint: The checkpoint that the model was loaded from.
        folder: The folder to write. It must not be the checkpoint's own folder.
        dtype: Dtype of the saved tensors. None: the model's.

    Returns:
        The path of the folder.

    Raises:
        CheckpointError: The folder is the checkpoint's own, or the model is packed or split over ranks.
        UnsupportedModelError: The model has an image tower, or rotary settings that transformers lacks.

    Example:
        >>> save_model(model, checkpoint, "out")
        PosixPath('out')
    """
    folder = Path(folder)
    if checkpoint.path is not None and folder.resolve() == checkpoint.path.resolve():
        raise CheckpointError(f"{folder} has the checkpoint that the model was loaded from; save to another folder")
    if model.ranks.size > 1:
        raise CheckpointError("the model is split over ranks, and each has only a part; load it whole to save it")
    if any(rope.kind == "factors" for rope in model.config.ropes):
        raise UnsupportedModelError(
            f"{checkpoint.name} has custom rotary frequencies, which a config of transformers cannot express"
        )
    if model.config.text is not model.config:
        raise UnsupportedModelError(
            f"{checkpoint.name} has an image tower, which would not be saved; save the model with transformers"
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
    """Return the model's tensors by prefold's names, with fused linears split as in checkpoints."""
    tensors = {}
    for weight in model.held:
        if weight.parameter is None:
            raise CheckpointError("the model's weights are packed; load it with pack=False to save it")
        values = weight.parameter.detach().cpu() - weight.offset if weight.offset else weight.parameter.detach().cpu()
        for (name, _), part in zip(weight.parts, values.split([rows for _, rows in weight.parts]), strict=True):
            tensors[name] = part.to(dtype, copy=True)
    return tensors


def _stored(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors with the names and shapes of the checkpoint's family: the inverse of `Names.of_tensor`."""
    names = config.names
    stored_as = {names_of_parts: (stored, parts) for stored, parts in names.parts.items() for names_of_parts in parts}
    orders = {name: order for name in tensors if (order := config.row_order(name)) is not None}
    turned = {name: tensor_of(as_stored(array_of(tensors[name]), order)) for name, order in orders.items()}
    tensors = {**tensors, **turned}
    stored, tensors = _stacks(tensors, config) if names.writes_stacks else ({}, tensors)
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        path, rest = ("", name) if layer is None else (f"{names.layer(int(layer[1]))}.", layer[2])
        # A tensor with its own name in the table, or a module's tensor.
        module, _, kind = (rest, "", "") if rest in stored_as else rest.rpartition(".")
        template = re.sub(r"\.\d+(?=\.|$)", ".{}", module, count=1)
        called, parts = stored_as.get(module) or stored_as.get(template, (module, (module,)))
        if (number := re.search(r"\.(\d+)(?=\.|$)", module)) is not None:  # the number of an expert or a head
            called, parts = called.replace("{}", number[1]), tuple(part.replace("{}", number[1]) for part in parts)
        if module != parts[0]:
            continue  # a tensor of several parts is stored with its first part
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
    """Return the stacked tensors of a checkpoint (`Names.stacks`) by name, and the tensors that are in no stack."""
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
    """Write a GGUF file's tokenizer, or copy the files beside a folder's weights. Return keys for the config."""
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
