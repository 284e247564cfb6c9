"""GGUF metadata as a Hugging Face config, so that a GGUF file needs no model families of its own."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .gguf import GGUFFile

__all__ = ["config_from_gguf"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
DTYPES = {"F32": "float32", "F16": "float16"}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json keys of the model in `file`. Raises UnsupportedModelError where it has none."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {arch!r} is not supported; these are: {known}")
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{file.path} is one of several parts; merge them: llama-gguf-split --merge")
    read = _Reader(file, arch)
    heads = read("attention.head_count")
    hidden = read("embedding_length")
    head_dim = read("attention.key_length", hidden // heads)
    read.refuse("expert_count", "a mixture of experts")
    if read("attention.causal", True) is False:
        raise UnsupportedModelError(f"{file.path} attends in both directions; only causal models are supported")
    if read("attention.value_length", head_dim) != head_dim or read("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: value_length and rope.dimension_count must equal key_length")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": read("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read("context_length"),
        "rope_parameters": _rope(file, read),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": DTYPES.get(file.type_name("blk.0.attn_q.weight"), "bfloat16"),
    }
    if arch == "llama" and read("attention.sliding_window", 0):
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": read("attention.sliding_window")}
    elif arch == "gemma3":
        config |= _gemma3(read, config)
    elif arch != "llama":
        read.refuse("attention.sliding_window", "a sliding window")
    return config


def _gemma3(read: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """What is different for Gemma 3; what its files leave out is as in llama.cpp."""
    read.refuse("attn_logit_softcapping", "soft capping")
    read.refuse("final_logit_softcapping", "soft capping")
    # The 27B model alone, the one with 62 layers, scales by its width and not by head_dim.
    wide = config["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": read("rope.freq_base_swa", 10000.0)}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "sliding_window": read("attention.sliding_window"),
        "sliding_window_pattern": read("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


class _Reader:
    """Metadata of one architecture; a list with one value a layer must have the same for all."""

    def __init__(self, file: GGUFFile, arch: str):
        self.file, self.arch = file, arch

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no metadata {self.arch}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{self.file.path}: {self.arch}.{key} differs from layer to layer")
            return value[0]
        return value

    def refuse(self, key: str, what: str) -> None:
        if self(key, 0):
            raise UnsupportedModelError(f"{self.file.path} has {what} ({self.arch}.{key}), not supported")


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    return file.tensors[name].shape


def _rope(file: GGUFFile, read: _Reader) -> dict[str, Any]:
    """Rope settings in the form of transformers; `rope_freqs.weight` (Llama 3.1 and later) divides each frequency."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read("rope.freq_base", 10000.0)}
    kind = read("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "linear"):
            raise UnsupportedModelError(f"{file.path} has both rope_freqs.weight and rope scaling {kind!r}")
        rope |= {"rope_type": "factors", "factors": file.dequantize("rope_freqs.weight").tolist()}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": read("rope.scaling.factor")}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": read("rope.scaling.factor"),
            "original_max_position_embeddings": read("rope.scaling.original_context_length"),
        }
        if (attention := read("rope.scaling.attn_factor", 1.0)) != 1.0:
            raise UnsupportedModelError(f"{file.path}: rope.scaling.attn_factor {attention} is not supported")
    elif kind != "none":
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not supported; linear and yarn are")
    return rope
