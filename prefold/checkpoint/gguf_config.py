"""Translate GGUF metadata to a Hugging Face config, so that GGUF files use the existing model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .gguf import GGUFFile
from .keys import check_keys
from .settings import MOST_LAYERS, MOST_POSITIONS, Settings

Keys = dict[str, Any]  # keys of a config.json, with their values
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
}
# By architecture, for files with experts: returns the mixture's config keys, like OF_ARCHITECTURE.
MIXTURES: dict[str, Callable[[Settings, Keys], Keys]] = {}
# Architectures that use LayerNorm.
LAYER_NORM = {"cohere2", "starcoder2"}
# Architectures with queries, keys and values in one tensor.
FUSED_QUERIES = {"phi3"}
# Architectures with latent attention (MLA). Their keys describe the heads over latents, not the model's own heads.
LATENT: set[str] = set()
# {architecture: {config key: tensor}}: the key is True if the first layer has the tensor.
BY_TENSOR: dict[str, dict[str, str]] = {}
# {architecture: {config key: tensor}}: the key is the number of rows of the tensor.
ROWS: dict[str, dict[str, str]] = {}
# Settings with one number per layer. The list is stored under the key with the suffix ".layers", and its first number
# under the key itself.
BY_LAYER: set[str] = set()
# Architectures with layers that may use the output of the key projection as values; files then lack the value tensor.
TIED_VALUES: set[str] = set()
# Architectures with layers that have no attention and no KV heads.
WITHOUT_HEADS = ("lfm2", "lfm2moe", "granitehybrid")
# Settings that are lists of different values, most of them one per layer.
LISTS = (
    "attention.sliding_window_pattern",
    "rope.dimension_sections",
    *(f"{arch}.attention.head_count_kv" for arch in WITHOUT_HEADS),
)
# Architectures that may apply RoPE to a part of each head.
PARTLY_TURNED = {"phi3", "qwen35", "qwen35moe", "qwen3next"}
FULL, SLIDING, SHARE = "full_attention", "sliding_attention", "partial_rotary_factor"
DTYPES = {"F32": "float32", "F16": "float16"}


def config_from_gguf(file: GGUFFile) -> Settings:
    """Return the config.json keys of the model in `file`.

    Raise UnsupportedModelError for an unknown architecture or setting, and CheckpointError for impossible metadata
    values.
    """
    every = Settings(file.metadata, str(file.path))
    arch = every.text("general.architecture")
    if arch not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {arch!r:.200} is not supported; supported are: {names}; the model's "
            "folder with safetensors may run, through transformers' modules (docs/families.md)"
        )
    if every.size("split.count", 1, least=0) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of several parts; merge them first with llama-gguf-split --merge"
        )
    gguf = _of_architecture(file, arch)
    layers = layers_of(gguf)
    heads, hidden = gguf.size("attention.head_count"), gguf.size("embedding_length")
    is_latent = arch in LATENT
    head_dim = gguf.size("rope.dimension_count" if is_latent else "attention.key_length", hidden // heads)
    has_experts = gguf.size("expert_count", 0, least=0) > 0
    if has_experts and arch not in MIXTURES:
        _refuse(gguf, "expert_count", "a mixture of experts")
    if not gguf.flag("attention.causal", True):
        raise UnsupportedModelError(f"{file.path} attends in both directions; only causal models are supported")
    width = gguf.size("rope.dimension_count", head_dim)
    value_dim = head_dim if is_latent else gguf.size("attention.value_length", head_dim)
    if value_dim != head_dim or (width != head_dim and arch not in PARTLY_TURNED):
        raise UnsupportedModelError(f"{file.path}: value_length and rope.dimension_count must equal key_length")
    norm = "attention.layer_norm_epsilon" if arch in LAYER_NORM else "attention.layer_norm_rms_epsilon"
    queries = "attn_qkv" if arch in FUSED_QUERIES else "attn_kv_a_mqa" if is_latent else "attn_q"
    with_queries = (number for number in range(layers) if f"blk.{number}.{queries}.weight" in file.tensors)
    queries = f"blk.{next(with_queries, 0)}.{queries}"
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if is_latent or arch in WITHOUT_HEADS
        else gguf.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _width(gguf, has_experts),
        "hidden_act": "silu",
        "rms_norm_eps": gguf.number(norm, zero=True),
        "max_position_embeddings": gguf.size("context_length", most=MOST_POSITIONS),
        "rope_parameters": _rope(file, gguf, width) | ({SHARE: width / head_dim} if arch in PARTLY_TURNED else {}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch != "qwen2" and f"{queries}.bias" in file.tensors,
        "torch_dtype": DTYPES.get(_type(file, f"{queries}.weight"), "bfloat16"),
    }
    config |= {key: f"blk.0.{name}" in file.tensors for key, name in BY_TENSOR.get(arch, {}).items()}
    config |= {key: _rows(file, name) for key, name in ROWS.get(arch, {}).items()}
    if arch in TIED_VALUES:
        keys, values = ([name for name in file.tensors if name.endswith(f".attn_{part}.weight")] for part in "kv")
        config["has_tied_values"] = len(values) < len(keys)
    window = gguf.size("attention.sliding_window", 0, least=0, most=MOST_POSITIONS)
    if arch == "llama" and window:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif arch in OF_ARCHITECTURE:
        config |= OF_ARCHITECTURE[arch](gguf, config)
    elif arch != "llama":
        _refuse(gguf, "attention.sliding_window", "a sliding window")
    if has_experts:
        config |= MIXTURES[arch](gguf, config)
    read = [key.removeprefix(gguf.prefix) for key in gguf.reads]
    check_keys("{architecture}.", gguf, str(file.path), prefix=gguf.prefix, read=read)
    return Settings(config, str(file.path))


def layers_of(gguf: Settings) -> int:
    """Return the number of layers, without the further layers for multi-token prediction, which are not run."""
    layers: int = gguf.size("block_count", most=MOST_LAYERS)
    further = gguf.size("nextn_predict_layers", 0, least=0)
    if further >= layers:
        raise gguf.wrong("nextn_predict_layers", f"less than block_count, {layers}")
    return layers - further


def _width(gguf: Settings, has_experts: bool) -> int:
    """Return the width of an MLP; in a mixture without dense MLPs, the width of an expert."""
    width: int | None = gguf.size("feed_forward_length", None) if has_experts else gguf.size("feed_forward_length")
    return gguf.size("expert_feed_forward_length") if width is None else width


def _gemma3(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Gemma 3. Missing metadata has the defaults of llama.cpp."""
    _refuse(gguf, "attn_logit_softcapping", "soft capping")
    _refuse(gguf, "final_logit_softcapping", "soft capping")
    # Only the 27B model (62 layers) scales by its width divided by its heads instead of by head_dim.
    wide = config["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": gguf.number("rope.freq_base_swa", 10000.0)}
    gguf.size("attention.sliding_window")
    return windows_of(gguf, 6) | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def windows_of(gguf: Settings, every: int) -> Keys:
    """Return the sliding window and the layers that have it.

    If the file does not say which, every `every`-th layer has none.
    """
    layers = layers_of(gguf)
    has_window = gguf.get("attention.sliding_window_pattern", every)
    if isinstance(has_window, int) and not isinstance(has_window, bool):
        every = gguf.size("attention.sliding_window_pattern", every)
        has_window = [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(has_window, list) or len(has_window) != layers:
        raise gguf.wrong("attention.sliding_window_pattern", f"a whole number, or a list of {layers} booleans")
    window = gguf.size("attention.sliding_window", None, most=MOST_POSITIONS)
    if window is None:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": [SLIDING if has else FULL for has in has_window]}


def _smollm3(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to SmolLM 3.

    Files do not say which layers have no RoPE. As in llama.cpp, it is every fourth.
    """
    _refuse(gguf, "attention.sliding_window", "a sliding window")
    return {"no_rope_layer_interval": 4}


def _olmo2(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys of OLMo 2, or of OLMo 3 if the file has a sliding window.

    Layers with the window use RoPE without scaling.
    """
    windows = windows_of(gguf, 4)
    if windows["sliding_window"] is None:
        return {}
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return windows | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_parameters": {FULL: rope, SLIDING: local},
    }


def _phi3(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Phi 3 and 4."""
    trained = gguf.size("rope.scaling.original_context_length", config["max_position_embeddings"], most=MOST_POSITIONS)
    window = gguf.size("attention.sliding_window", None, least=0, most=MOST_POSITIONS)
    # A window of 0, or at least as large as the context, means full attention.
    window = None if window is None or window >= config["max_position_embeddings"] else window or None
    return {"sliding_window": window, "original_max_position_embeddings": trained}


def _granite(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Granite."""
    _refuse(gguf, "attention.sliding_window", "a sliding window")
    return {
        "embedding_multiplier": gguf.number("embedding_scale", 1.0),
        "residual_multiplier": gguf.number("residual_scale", 1.0),
        "attention_multiplier": gguf.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": gguf.number("logit_scale", 1.0),
    }


def _gemma2(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Gemma 2. Missing metadata has the defaults of llama.cpp."""
    # Only the 27B model (46 layers) scales by its width divided by its heads instead of by head_dim.
    wide = config["num_hidden_layers"] == 46
    return windows_of(gguf, 2) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "attn_logit_softcapping": gguf.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
    }


def _cohere2(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Cohere 2."""
    return windows_of(gguf, 4) | {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": gguf.number("logit_scale")}


def _starcoder2(gguf: Settings, config: Keys) -> Keys:
    """Return the config keys specific to Starcoder 2. Only files from newer converters have a window."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config["rms_norm_eps"],
        "use_bias": config["attention_bias"],
        "sliding_window": gguf.size("attention.sliding_window", None, most=MOST_POSITIONS),
    }


# By architecture: returns its specific config keys, from its metadata and the common config keys.
OF_ARCHITECTURE: dict[str, Callable[[Settings, Keys], Keys]] = {
    "gemma3": _gemma3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "granite": _granite,
    "gemma": lambda gguf, config: {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": _gemma2,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "exaone4": lambda gguf, config: windows_of(gguf, 4),
}


def _of_architecture(file: GGUFFile, arch: str) -> Settings:
    """Return the metadata of one architecture.

    A list with one value per layer becomes that value; the values must be equal (except for BY_LAYER and LISTS).
    """
    prefix, settings = arch + ".", {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            if isinstance(value, list) and value and key in BY_LAYER:
                settings[key.removeprefix(prefix) + ".layers"], value = value, value[0]
            elif isinstance(value, list) and value and not key.endswith(LISTS):
                if any(number != value[0] for number in value):
                    raise UnsupportedModelError(f"{file.path}: {key} differs from layer to layer")
                value = value[0]
            settings[key.removeprefix(prefix)] = value
    return Settings(settings, str(file.path), prefix)


def _refuse(gguf: Settings, key: str, setting: str) -> None:
    if gguf.get(key):
        raise UnsupportedModelError(f"{gguf.file} has {setting} ({gguf.prefix}{key}), which is not supported")


def _rows(file: GGUFFile, name: str) -> int:
    """Return the number of rows of the tensor `name`. Raise CheckpointError if there is no such matrix."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    shape = file.tensors[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{file.path}: {name} has {len(shape)} dimensions; it must have 2")
    return shape[0]


def _type(file: GGUFFile, name: str) -> str:
    """Return the name of the ggml type of the tensor `name`. Raise CheckpointError if it does not exist."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    return file.type_name(name)


def _rope(file: GGUFFile, gguf: Settings, width: int) -> Keys:
    """Return the RoPE settings in the form of transformers; `width` is the number of rotated dimensions of a head.

    `rope_freqs.weight` (Llama 3.1 and later) divides each frequency, and so do `rope_factors_long.weight` and
    `rope_factors_short.weight` (Phi 3).
    """
    rope: Keys = {"rope_type": "default", "rope_theta": gguf.number("rope.freq_base", 10000.0)}
    if LONG in file.tensors:
        factors = {key: _factors(file, name, width) for key, name in (("long_factor", LONG), ("short_factor", SHORT))}
        attention = gguf.number("rope.scaling.attn_factor", None)
        return rope | {"rope_type": "longrope", "attention_factor": attention} | factors
    kind = gguf.text("rope.scaling.type", "linear")  # as in llama.cpp; files of 2023 have no type
    is_latent = gguf.prefix.removesuffix(".") in LATENT
    _check_neutral(gguf, kind, is_latent)
    linear = _linear_factor(gguf) if kind == "linear" else 1.0
    if "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "linear") or linear != 1.0:
            raise UnsupportedModelError(f"{file.path} has both rope_freqs.weight and rope scaling {kind!r:.200}")
        rope |= {"rope_type": "factors", "factors": _factors(file, "rope_freqs.weight", width)}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": linear} if linear != 1.0 else {}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": gguf.number("rope.scaling.factor"),
            "original_max_position_embeddings": gguf.size("rope.scaling.original_context_length", most=MOST_POSITIONS),
            "beta_fast": gguf.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": gguf.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if is_latent:  # a tenth of what configs say; what it does to rotated numbers is cancelled, as by equal `mscale`
            scale = round(10 * gguf.number("rope.scaling.yarn_log_multiplier"), 6)
            rope |= {"mscale": scale, "mscale_all_dim": scale}
    elif kind != "none":
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r:.200} is not supported; linear and yarn are")
    return rope


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def _factors(file: GGUFFile, name: str, width: int) -> list[float]:
    """Return the RoPE frequency factors of a tensor. Raise CheckpointError if their number is wrong."""
    if name not in file.tensors or file.tensors[name].shape != (width // 2,):
        raise CheckpointError(f"{file.path}: {name} must have {width // 2} numbers, one per rotated pair of a head")
    return file.dequantize(name).tolist()


def _linear_factor(gguf: Settings) -> float:
    """Return the divisor of positions; 1 if the file has none, or 0."""
    factor = gguf.number("rope.scaling.factor", None, zero=True)
    return (gguf.number("rope.scale_linear", 1.0, zero=True) if factor is None else factor) or 1.0


def _check_neutral(gguf: Settings, kind: str, is_latent: bool) -> None:
    """Raise UnsupportedModelError if a RoPE scaling setting is not neutral and not supported for this kind."""
    neutral = {
        "attn_factor": (1.0,),
        "yarn_attn_factor": (1.0,),
        "yarn_ext_factor": (1.0 if kind == "yarn" else 0.0, -1.0),  # -1: the default of the kind
    }
    if not is_latent:
        neutral["yarn_log_multiplier"] = (0.0,)
    for key, values in neutral.items():
        value = gguf.get(f"rope.scaling.{key}", values[0])
        if value not in values:
            setting = f"{gguf.prefix}rope.scaling.{key} is {value}"
            raise UnsupportedModelError(f"{gguf.file}: {setting}, which is not supported; only {values[0]:g} is")
