"""Model families: functions from a Hugging Face config (a dict) to a ModelConfig. No torch.

A family is data; one of your own is added with `register_family`. What a config asks for and the
transformer here does not do is an UnsupportedModelError, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedModelError
from .config import ModelConfig, Plane, RopeConfig

__all__ = ["config_from", "decoder", "read_rope", "register_family", "supported_architectures"]

HFConfig = Mapping[str, Any]
Family = Callable[[HFConfig], ModelConfig]

# Settings that a rotary kind reads, with their defaults; `...` marks those that must be given.
ROPE_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "llama3": {"factor": ..., "low_freq_factor": ..., "high_freq_factor": ..., "original_max_position_embeddings": ...},
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": ...,
        "attention_factor": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
    "factors": {"factors": ...},  # one divisor a frequency, as GGUF files carry them
}
# Activations by the names that configs give them.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


def config_from(hf: HFConfig) -> ModelConfig:
    """The ModelConfig of a Hugging Face config. Raises UnsupportedModelError, listing what works."""
    architecture = _architecture(hf)
    family = _FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(supported_architectures())
        raise UnsupportedModelError(f"the architecture {architecture!r} is not supported; these are: {known}")
    quantised = hf.get("quantization_config") or hf.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        raise UnsupportedModelError(
            f"the checkpoint is quantised (method {method!r}); use the unquantised one, or a GGUF file of the model"
        )
    if hf.get("is_causal") is False:
        raise UnsupportedModelError("the model attends in both directions (is_causal is false); only causal ones work")
    code = hf.get("auto_map")
    if isinstance(code, Mapping) and architecture not in OWN_CODE and any(k.startswith("AutoModel") for k in code):
        raise UnsupportedModelError(
            "the checkpoint brings model code of its own (auto_map), which is never run; remove auto_map from its "
            f"config.json only if it is a plain {architecture}"
        )
    return family(hf)


def register_family(architecture: str, family: Family) -> None:
    """Makes checkpoints whose config names `architecture` loadable: `family` turns their config into a ModelConfig."""
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    return sorted(_FAMILIES)


def llama(hf: HFConfig) -> ModelConfig:
    """Llama 1 to 3, SmolLM 1 and 2, TinyLlama, and all that call themselves so."""
    attention_bias = bool(hf.get("attention_bias", False))
    kv_heads = hf.get("num_key_value_heads") or hf.get("num_attention_heads")
    mlp_bias = bool(hf.get("mlp_bias", False))
    return decoder(hf, kv_heads=kv_heads, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias)


def mistral(hf: HFConfig) -> ModelConfig:
    """Mistral 7B and kin: Llama, with every layer windowed when `sliding_window` is set."""
    return decoder(hf, windows=[hf.get("sliding_window", 4096)] * _required(hf, "num_hidden_layers"))


def qwen2(hf: HFConfig) -> ModelConfig:
    """Qwen 2 and 2.5: biases on q, k and v."""
    return decoder(hf, qkv_bias=True, windows=_qwen_windows(hf))


def qwen3(hf: HFConfig) -> ModelConfig:
    """Qwen 3: norms on q and k, a head_dim of its own."""
    bias = bool(hf.get("attention_bias", False))
    head_dim = hf.get("head_dim") or 128
    return decoder(hf, head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(hf))


def gemma3(hf: HFConfig) -> ModelConfig:
    """Gemma 3, the text model: norms before and after each part; windowed layers, with a rotary base of their own."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); only causal ones work"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(key) is not None:
            raise UnsupportedModelError(f"{key} {hf[key]} is not supported; Gemma 3 has none")
    types = hf.get("layer_types") or _every(hf.get("sliding_window_pattern") or 6, _required(hf, "num_hidden_layers"))
    bias = bool(hf.get("attention_bias", False))
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    activation = {"hidden_act": hf.get("hidden_activation") or "gelu_pytorch_tanh"}
    config = decoder(
        defaults | _rope_of(hf, FULL, "rope_theta", 1e6) | activation,
        windows=_windows(types, hf.get("sliding_window", 4096)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        out_norms=True,
        norm_offset=1.0,
        embedding_scale=_required(hf, "hidden_size") ** 0.5,
        query_scalar=hf.get("query_pre_attn_scalar", 256),
    )
    local = read_rope(_rope_of(hf, SLIDING, "rope_local_base_freq", 1e4))
    planes = zip(config.planes, types, strict=True)
    return replace(config, planes=tuple(replace(p, rope=local) if kind == SLIDING else p for p, kind in planes))


def gpt2(hf: HFConfig) -> ModelConfig:
    """GPT-2: LayerNorm, learned positions, biases everywhere, no gate; keys, tensors and modules with names of its own.

    Not a setting of the model: reorder_and_upcast_attn, the order in which attention rounds.
    """
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} is not supported")
    hidden, heads = _required(hf, "n_embd"), _required(hf, "n_head")
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd is {hidden}; it must be a multiple of n_head, {heads}")
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": _required(hf, "n_layer"),
        "intermediate_size": hf.get("n_inner") or 4 * hidden,
        "max_position_embeddings": _required(hf, "n_positions"),
        "hidden_act": hf.get("activation_function", "gelu_new"),
        "rms_norm_eps": hf.get("layer_norm_epsilon", 1e-5),
    }
    return decoder(
        {"tie_word_embeddings": True} | dict(hf) | renamed,
        kv_heads=heads,
        head_dim=hidden // heads,
        rotary=False,
        norm="layer",
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scalar=None if hf.get("scale_attn_weights", True) else 1.0,
        names="gpt2",
    )


def decoder(
    hf: HFConfig,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: bool = True,
    windows: list[int | None] | None = None,
    **options: Any,
) -> ModelConfig:
    """The part that all these families share; `options` are fields of ModelConfig."""
    activation = hf.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not supported; these are: {', '.join(map(repr, ACTIVATIONS))}"
        )
    hidden, heads, layers = (_required(hf, f"{name}") for name in SIZES)
    return ModelConfig(
        vocab_size=_required(hf, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or _required(hf, "num_key_value_heads"),
        head_dim=head_dim or hf.get("head_dim") or hidden // heads,
        intermediate=_required(hf, "intermediate_size"),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=read_rope(hf) if rotary else None,
        max_positions=_required(hf, "max_position_embeddings"),
        planes=tuple(Plane(window or None) for window in windows or [None] * layers),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=hf.get("dtype") or hf.get("torch_dtype"),
        **options,
    )


SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")


def read_rope(hf: HFConfig) -> RopeConfig:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rotary settings that differ from layer to layer are not supported")
    if kind not in ROPE_SETTINGS:
        raise UnsupportedModelError(
            f"the rope type {kind!r} is not supported; these are: {', '.join(list(ROPE_SETTINGS)[:-1])}"
        )
    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; all of a head is rotated")
    theta = given.get("rope_theta", hf.get("rope_theta"))
    if "original_max_position_embeddings" in ROPE_SETTINGS[kind]:
        trained = hf.get("original_max_position_embeddings", given.get("original_max_position_embeddings"))
        given["original_max_position_embeddings"] = trained or _required(hf, "max_position_embeddings")
    settings = {}
    for name, default in ROPE_SETTINGS[kind].items():
        value = given.get(name)
        settings[name] = default if value is None else value
        if settings[name] is ...:
            raise UnsupportedModelError(f"the rope type {kind!r} needs the setting {name!r}, which is missing")
    if kind == "yarn" and settings["factor"] is None:
        settings["factor"] = _required(hf, "max_position_embeddings") / settings["original_max_position_embeddings"]
    return RopeConfig(kind, float(10000.0 if theta is None else theta), settings)


def _required(hf: HFConfig, key: str) -> Any:
    value = hf.get(key)
    if value is None:
        raise UnsupportedModelError(f"the config has no {key!r}")
    return value


def _qwen_windows(hf: HFConfig) -> list[int | None]:
    """The last layers from `max_window_layers` on are windowed, or those `layer_types` names; if switched on at all."""
    layers, window = _required(hf, "num_hidden_layers"), hf.get("sliding_window", 4096)
    if not hf.get("use_sliding_window", False) or window is None:
        return [None] * layers
    first = hf.get("max_window_layers", 28)
    return _windows(hf.get("layer_types") or [FULL] * min(first, layers) + [SLIDING] * (layers - first), window)


def _windows(types: list[str], window: int | None) -> list[int | None]:
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(f"layer_types has {', '.join(sorted(unknown))}; full and sliding attention work")
    return [window if kind == SLIDING else None for kind in types]


def _every(pattern: int, layers: int) -> list[str]:
    """Layer types where one layer in `pattern` is full: the last of each."""
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _rope_of(hf: HFConfig, kind: str, base: str, default: float) -> dict[str, Any]:
    """The config as `read_rope` reads it, for the layers of one kind.

    Transformers 5 has settings for each kind in `rope_parameters`; before, `rope_scaling` was for the full
    layers, and each kind had its `base` key.
    """
    nested = hf.get("rope_parameters") or {}
    if not all(value is None or isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError(f"rope_parameters must be given for {FULL} and {SLIDING} apart")
    settings = dict(nested.get(kind) or {}) | dict((kind == FULL and hf.get("rope_scaling")) or {})
    theta = settings.get("rope_theta") or hf.get(base) or default
    return dict(hf) | {"rope_scaling": None, "rope_parameters": settings | {"rope_theta": theta}}


def _architecture(hf: HFConfig) -> str:
    names = hf.get("architectures")
    if names:
        return names[0]
    model_type = hf.get("model_type")
    return MODEL_TYPES.get(str(model_type), str(model_type))


def _bare(family: Family) -> Family:
    """Checkpoints without a head: logits only where the embedding is the head as well."""

    def bare(hf: HFConfig) -> ModelConfig:
        config = family(hf)
        return replace(config, lm_head=config.tie_embeddings)

    return bare


def _classifier(family: Family) -> Family:
    def classifier(hf: HFConfig) -> ModelConfig:
        names = {int(key): str(value) for key, value in (hf.get("id2label") or {}).items()}
        labels = tuple(names[i] for i in sorted(names))
        num_labels = len(labels) or hf.get("num_labels") or 2
        return replace(family(hf), lm_head=False, num_labels=num_labels, labels=labels)

    return classifier


def _reward(family: Family) -> Family:
    def reward(hf: HFConfig) -> ModelConfig:
        return replace(family(hf), lm_head=False, num_labels=hf.get("num_labels") or 1, head_layers=2)

    return reward


MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# Architectures that exist only as code beside checkpoints, and whose model is implemented here.
OWN_CODE = ("Qwen2ForRewardModel",)

_FAMILIES: dict[str, Family] = {"Qwen2ForRewardModel": _reward(qwen2)}
for _causal, _other, _family in (
    ("LlamaForCausalLM", "Llama", llama),
    ("MistralForCausalLM", "Mistral", mistral),
    ("Qwen2ForCausalLM", "Qwen2", qwen2),
    ("Qwen3ForCausalLM", "Qwen3", qwen3),
    ("Gemma3ForCausalLM", "Gemma3Text", gemma3),  # "Gemma3Model" is the one with images
    ("GPT2LMHeadModel", "GPT2", gpt2),
):
    _FAMILIES[_causal] = _family
    _FAMILIES[f"{_other}Model"] = _bare(_family)
    _FAMILIES[f"{_other}ForSequenceClassification"] = _classifier(_family)
