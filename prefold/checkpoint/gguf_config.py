"""Translates GGUF metadata to a Hugging Face config, so that GGUF files need no model families of their own."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .gguf import GGUFFile
from .settings import MOST_LAYERS, MOST_POSITIONS, Settings

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
DTYPES = {"F32": "float32", "F16": "float16"}


def config_from_gguf(file: GGUFFile) -> Settings:
    """Returns the config.json keys of the model in `file`.

    Raises UnsupportedModelError for an architecture or a setting that prefold does not know, and CheckpointError for
    metadata with impossible values.
    """
    every = Settings(file.metadata, str(file.path))
    arch = every.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported, for these are: {known}; its folder with "
            "safetensors may run, through transformers' modules (docs/families.md)"
        )
    if every.size("split.count", 1, least=0) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of several parts; merge them first with llama-gguf-split --merge"
        )
    read = _of_architecture(file, arch)
    layers = read.size("block_count", most=MOST_LAYERS)
    heads, hidden = read.size("attention.head_count"), read.size("embedding_length")
    head_dim = read.size("attention.key_length", hidden // heads)
    _refuse(read, "expert_count", "a mixture of experts")
    if not read.flag("attention.causal", True):
        raise UnsupportedModelError(f"{file.path} attends in both directions; only causal models are supported")
    if any(read.size(key, head_dim) != head_dim for key in ("attention.value_length", "rope.dimension_count")):
        raise UnsupportedModelError(f"{file.path}: value_length and rope.dimension_count must equal key_length")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": read.size("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", zero=True),
        "max_position_embeddings": read.size("context_length", most=MOST_POSITIONS),
        "rope_parameters": _rope(file, read, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": DTYPES.get(_type(file, "blk.0.attn_q.weight"), "bfloat16"),
    }
    window = read.size("attention.sliding_window", 0, least=0, most=MOST_POSITIONS)
    if arch == "llama" and window:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif arch == "gemma3":
        config |= _gemma3(read, config)
    elif arch != "llama":
        _refuse(read, "attention.sliding_window", "a sliding window")
    return Settings(config, str(file.path))


def _gemma3(read: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config keys that Gemma 3 alone has. What its files leave out is as in llama.cpp."""
    _refuse(read, "attn_logit_softcapping", "soft capping")
    _refuse(read, "final_logit_softcapping", "soft capping")
    # Only the 27B model, which is the one with 62 layers, scales by its width instead of by head_dim.
    wide = config["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10000.0)}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "sliding_window": read.size("attention.sliding_window", most=MOST_POSITIONS),
        "sliding_window_pattern": read.size("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _of_architecture(file: GGUFFile, arch: str) -> Settings:
    """Returns the metadata of one architecture. A list holds a value for each layer: all of them must be equal, and
    that value stands in its place."""
    prefix, settings = arch + ".", {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            if isinstance(value, list) and value:
                if any(each != value[0] for each in value):
                    raise UnsupportedModelError(f"{file.path}: {key} differs from layer to layer")
                value = value[0]
            settings[key.removeprefix(prefix)] = value
    return Settings(settings, str(file.path), prefix)


def _refuse(read: Settings, key: str, what: str) -> None:
    if read.get(key):
        raise UnsupportedModelError(f"{read.file} has {what} ({read.prefix}{key}), which is not supported")


def _rows(file: GGUFFile, name: str) -> int:
    """Returns the number of rows of the tensor `name`. Raises CheckpointError where there is no such matrix."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    shape = file.tensors[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{file.path}: {name} has {len(shape)} dimensions; it must have 2")
    return shape[0]


def _type(file: GGUFFile, name: str) -> str:
    """Returns the name of the ggml type of the tensor `name`. Raises CheckpointError where there is no such tensor."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    return file.type_name(name)


def _rope(file: GGUFFile, read: Settings, head_dim: int) -> dict[str, Any]:
    """Returns the rope settings in the form of transformers; `rope_freqs.weight` (Llama 3.1 and later) divides each
    frequency."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", 10000.0)}
    kind = read.text("rope.scaling.type", "linear")  # as in llama.cpp; files of 2023 have no type
    _check_neutral(read, kind)
    linear = _linear_factor(read) if kind == "linear" else 1.0
    if "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "linear") or linear != 1.0:
            raise UnsupportedModelError(f"{file.path} has both rope_freqs.weight and rope scaling {kind!r}")
        if file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
            raise CheckpointError(f"{file.path}: rope_freqs.weight must have {head_dim // 2} numbers, half of head_dim")
        rope |= {"rope_type": "factors", "factors": file.dequantize("rope_freqs.weight").tolist()}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": linear} if linear != 1.0 else {}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": read.number("rope.scaling.factor"),
            "original_max_position_embeddings": read.size("rope.scaling.original_context_length", most=MOST_POSITIONS),
            "beta_fast": read.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": read.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind != "none":
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not supported; linear and yarn are")
    return rope


def _linear_factor(read: Settings) -> float:
    """Returns the divisor of positions: 1 where the file has none, or has 0."""
    factor = read.number("rope.scaling.factor", None, zero=True)
    return (read.number("rope.scale_linear", 1.0, zero=True) if factor is None else factor) or 1.0


def _check_neutral(read: Settings, kind: str) -> None:
    """Raises UnsupportedModelError for rope scaling of this kind that is set to more than its neutral value, and is not
    computed here."""
    neutral = {
        "attn_factor": (1.0,),
        "yarn_attn_factor": (1.0,),
        "yarn_ext_factor": (1.0 if kind == "yarn" else 0.0, -1.0),  # -1: by the kind
        "yarn_log_multiplier": (0.0,),
    }
    for key, values in neutral.items():
        value = read.get(f"rope.scaling.{key}", values[0])
        if value not in values:
            what = f"{read.prefix}rope.scaling.{key} is {value}"
            raise UnsupportedModelError(f"{read.file}: {what}, which is not supported; only {values[0]:g} is")
