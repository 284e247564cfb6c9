"""Write GGUF files with the sizes of a model and random weights, for comparisons with llama.cpp. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from prefold.model.config import ModelConfig

# Tensors that llama.cpp reads in float32 only, by parts of their names in the file.
FLOAT32 = ("norm", "conv1d", "ssm_a", "ssm_dt", "gate_inp", "exp_probs_b", "output_scale", "router", "scale")
# Names that the table of the gguf package lacks.
OWN_NAMES = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias", "gate.correction": "gate.e_score_correction.bias"}


def write_random(path: Path, config: ModelConfig, arch: str, kind: str, metadata: Mapping[str, Any]) -> None:
    """Write a file without a tokenizer.

    Args:
        path: The file.
        config: The sizes of the model.
        arch: llama.cpp's name of the architecture.
        kind: The type of the matrices in llama.cpp, for example "Q8_0".
        metadata: Further keys of the architecture, without its name.
    """
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "block_count": config.layers, "context_length": config.max_positions, "embedding_length": config.hidden,
        "feed_forward_length": config.intermediate, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.rope is not None:
        values["rope.freq_base"] = config.rope.theta
    if config.experts is not None:
        values |= {
            "expert_count": config.experts.count, "expert_used_count": config.experts.chosen,
            "expert_feed_forward_length": config.experts.width,
        }  # fmt: skip
    for key, value in (values | dict(metadata)).items():
        add = {bool: "bool", int: "uint32", float: "float32", list: "array", str: "string"}[type(value)]
        getattr(writer, f"add_{add}")(f"{arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    for name, shape in tensors_of(config, arch).items():
        _add(writer, name, shape, gguf.GGMLQuantizationType[kind])
    if arch == "gemma4":
        turned = config.rotated_dims[-1] // 8  # pairs of a head that full attention rotates: a quarter
        still = config.rotated_dims[-1] // 2 - turned
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * still, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(config: ModelConfig, arch: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model's file by their names there."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, found = gguf.get_tensor_name_map(number, config.layers), dict[str, tuple[int, ...]]()
    for weight in config.program().weights:
        for name, shape in weight.shapes.items():
            head, numbered, rest = name.partition(".experts.")
            if numbered:  # the matrices of all experts are one tensor
                name, shape = f"{head}.experts.{rest.partition('.')[2]}", (config.experts.count, *shape)
            if name.endswith(".kv_b_proj.weight"):
                found |= _of_latents(config, name.split(".")[1])
                continue
            for ours, theirs in OWN_NAMES.items():
                name = name.replace(ours, theirs)
            name = name if name.startswith("lm_head") else f"model.{name}"
            stored = names.get_name(name, (".weight", ".bias")) or names.get_name(f"{name}.weight", (".weight",))
            assert stored, name
            stored = stored if stored.endswith((".weight", ".bias", "ssm_a")) else f"{stored}.weight"
            found[stored] = (shape[0], shape[2]) if "conv1d" in stored else shape
    return found


def _of_latents(config: ModelConfig, number: str) -> dict[str, tuple[int, ...]]:
    latent = config.latent
    assert latent is not None
    return {
        f"blk.{number}.attn_k_b.weight": (config.heads, latent.rank, latent.dim),
        f"blk.{number}.attn_v_b.weight": (config.heads, latent.value_dim, latent.rank),
    }


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
    """Add a tensor of random numbers. All matrices of a stack are equal."""
    rng = np.random.default_rng(len(name))
    if len(shape) < 2 or any(part in name for part in FLOAT32):
        values = (
            np.ones(shape, np.float32)
            if "norm" in name or "scale" in name
            else rng.standard_normal(shape, np.float32) / 45
        )
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
        return
    values = rng.standard_normal(shape[-2:], np.float32) * shape[-1] ** -0.5
    stored = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, np.broadcast_to(stored, (*shape[:-2], *stored.shape)), raw_dtype=kind)
