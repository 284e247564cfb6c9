"""LoRA adapters of random weights as PEFT writes them, and transformers' models with such an adapter merged in."""

from __future__ import annotations

import json
import re

import torch
from safetensors.torch import load_file, save_file
from tiny import reference

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What these are in other models: GPT-2 and Starcoder 2, Phi 3, and Granite 4.
QKV, GATE_UP = ("c_attn", "qkv_proj"), ("c_fc", "gate_up_proj", "input_linear")
OTHERS = dict(zip(MODULES, (QKV, QKV, QKV, ("c_proj",), GATE_UP, GATE_UP, ("c_proj", "output_linear")), strict=True))


def is_transposed(name: str) -> bool:
    """Whether a tensor is stored as [inputs, outputs], as GPT-2's are."""
    return re.match(r"(transformer\.)?h\.", name) is not None


def write_adapter(
    folder, checkpoint, modules=MODULES, *, seed=0, layers=(0, 1, 2), prefix="base_model.model.", **config
):
    """A PEFT folder that adapts these modules of these layers; in some models those that have their place."""
    modules = {*modules, *(other for m in modules for other in OTHERS.get(m, ()))}
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": sorted(modules)} | config
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, parameter in load_file(checkpoint / "model.safetensors").items():
        match = re.fullmatch(r"(?:model\.layers|layers|transformer\.h)\.(\d+)\.\w+\.(\w+)\.weight", name)
        if match and int(match[1]) in layers and match[2] in modules and parameter.ndim == 2:
            rank = settings.get("rank_pattern", {}).get(match[2], settings["r"])
            path = prefix + name.removesuffix(".weight")
            outputs, inputs = parameter.shape[::-1] if is_transposed(name) else parameter.shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 6
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(checkpoint, adapter, scale=lambda module: 6 / 4, head="causal"):
    """transformers' model with the adapter in its weights. scale: by the module's name."""
    model, tensors = reference(checkpoint, head), load_file(adapter / "adapter_model.safetensors")
    parameters, changed = dict(model.named_parameters()), 0
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                path = path if path + ".weight" in parameters else "model." + path
                module = path.rsplit(".", 1)[1]
                change = scale(module) * tensors[name.replace("lora_A", "lora_B")] @ a
                parameters[path + ".weight"] += change.T if is_transposed(path) else change
                changed += 1
    assert changed == len(tensors) // 2
    return model
