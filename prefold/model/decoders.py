"""The model families without loops: functions from a Hugging Face config (a dict) to a ModelConfig; and the rotary
settings in such configs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, MOST_POSITIONS, Settings
from ..errors import CheckpointError, UnsupportedModelError
from .config import ModelConfig, Plane, RopeConfig
from .names import GPT2


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Returns rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    hf = Settings.of(hf)
    scaling, parameters = hf.settings("rope_scaling"), hf.settings("rope_parameters")
    rope = scaling or parameters
    kind = rope.text("rope_type", None) or rope.text("type", "default")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError("rotary settings that differ from layer to layer are not supported")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"the rope type {kind!r} is not supported; these are: {', '.join(list(ROPE_KINDS)[:-1])}"
        )
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; all of a head is rotated")
    theta = rope.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    return RopeConfig(kind, float(theta), ROPE_KINDS[kind](hf, rope))


def _llama3_rope(hf: Settings, rope: Settings) -> dict[str, Any]:
    numbers = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor, {numbers['low_freq_factor']}")
    return numbers | {"original_max_position_embeddings": _trained_positions(hf, rope)}


def _yarn_rope(hf: Settings, rope: Settings) -> dict[str, Any]:
    theta = rope.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    if theta <= 1:
        raise (rope if "rope_theta" in rope else hf).wrong("rope_theta", "more than 1 with yarn")
    trained = _trained_positions(hf, rope)
    return {
        "factor": rope.number("factor", None) or hf.size("max_position_embeddings", most=MOST_POSITIONS) / trained,
        "original_max_position_embeddings": trained,
        "attention_factor": rope.number("attention_factor", None),
        "beta_fast": rope.number("beta_fast", 32),
        "beta_slow": rope.number("beta_slow", 1),
        "mscale": rope.number("mscale", None, zero=True),
        "mscale_all_dim": rope.number("mscale_all_dim", None, zero=True),
        "truncate": rope.flag("truncate", True),
    }


def _trained_positions(hf: Settings, rope: Settings) -> int:
    """Returns how many positions the model was trained on, before its context was made longer."""
    key, most = "original_max_position_embeddings", MOST_POSITIONS
    trained = hf.size(key, None, most=most) or rope.size(key, None, most=most)
    return trained or hf.size("max_position_embeddings", most=most)


# What reads the settings of each rotary kind; the last one, a divisor for every frequency, is in GGUF files only.
ROPE_KINDS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda hf, rope: {},
    "linear": lambda hf, rope: {"factor": rope.number("factor")},
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "factors": lambda hf, rope: {"factors": rope.numbers("factors")},
}

HFConfig = Mapping[str, Any]

# Activations by the names that configs give them.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


def llama(hf: HFConfig) -> ModelConfig:
    """Returns the config of Llama 1 to 3, SmolLM 1 and 2, TinyLlama, and all that call themselves so."""
    hf = Settings.of(hf)
    attention_bias = hf.flag("attention_bias")
    kv_heads = hf.size("num_key_value_heads", None) or hf.size("num_attention_heads")
    return decoder(hf, kv_heads=kv_heads, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf.flag("mlp_bias"))


def mistral(hf: HFConfig) -> ModelConfig:
    """Returns the config of Mistral 7B and kin: Llama, with a sliding window in every layer when `sliding_window` is
    set."""
    hf = Settings.of(hf)
    return decoder(hf, windows=[_window(hf)] * _layers(hf))


def qwen2(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen 2 and 2.5: biases on q, k and v."""
    hf = Settings.of(hf)
    return decoder(hf, qkv_bias=True, windows=qwen_windows(hf))


def qwen3(hf: HFConfig) -> ModelConfig:
    """Returns the config of Qwen 3: norms on q and k, a head_dim of its own."""
    hf = Settings.of(hf)
    bias = hf.flag("attention_bias")
    head_dim = hf.size("head_dim", 128)
    return decoder(hf, head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=qwen_windows(hf))


def gemma3(hf: HFConfig) -> ModelConfig:
    """Returns the config of Gemma 3, the text model: norms before and after each part; layers with a sliding window
    have a rotary base of their own."""
    hf = Settings.of(hf)
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); only causal ones work"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(key) is not None:
            raise UnsupportedModelError(f"{key} {hf[key]} is not supported; Gemma 3 has none")
    types = hf.texts("layer_types", None) or _every(hf.size("sliding_window_pattern", 6), _layers(hf))
    bias = hf.flag("attention_bias")
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    activation = {"hidden_act": hf.text("hidden_activation", "gelu_pytorch_tanh")}
    config = decoder(
        defaults | _rope_of(hf, FULL, "rope_theta", 1e6) | activation,
        windows=_windows(hf, types),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        out_norms=True,
        norm_offset=1.0,
        embedding_scale=hf.size("hidden_size") ** 0.5,
        query_scalar=hf.number("query_pre_attn_scalar", 256),
    )
    local = read_rope(_rope_of(hf, SLIDING, "rope_local_base_freq", 1e4))
    planes = zip(config.planes, types, strict=True)
    return replace(config, planes=tuple(replace(p, rope=local) if kind == SLIDING else p for p, kind in planes))


def gpt2(hf: HFConfig) -> ModelConfig:
    """Returns the config of GPT-2: LayerNorm, learned positions, biases everywhere, no gate; keys, tensors and modules
    have names of their own.

    Not a setting of the model: reorder_and_upcast_attn, the order in which attention rounds.
    """
    hf = Settings.of(hf)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} is not supported")
    hidden, heads = hf.size("n_embd"), hf.size("n_head")
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd is {hidden}; it must be a multiple of n_head, {heads}")
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": hf.size("n_layer", most=MOST_LAYERS),
        "intermediate_size": hf.size("n_inner", 4 * hidden),
        "max_position_embeddings": hf.size("n_positions"),
        "hidden_act": hf.text("activation_function", "gelu_new"),
        "rms_norm_eps": hf.number("layer_norm_epsilon", 1e-5, zero=True),
    }
    return decoder(
        {"tie_word_embeddings": True} | hf | renamed,
        kv_heads=heads,
        head_dim=hidden // heads,
        rotary=False,
        norm="layer",
        mlp="plain",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scalar=None if hf.flag("scale_attn_weights", True) else 1.0,
        names=GPT2,
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
    """Returns the config of the part that all these families share.

    kv_heads, head_dim   where they are not what `num_key_value_heads` and `head_dim` of the config say
    rotary               whether queries and keys are rotated; otherwise each position has an embedding
    windows              the sliding window of each layer; 0 or None: none
    options              fields of ModelConfig
    """
    hf = Settings.of(hf)
    activation = hf.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not supported; these are: {', '.join(map(repr, ACTIVATIONS))}; "
            "another activation is an MLP of another kind (docs/families.md)"
        )
    hidden, heads, layers = hf.size("hidden_size"), hf.size("num_attention_heads"), _layers(hf)
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or hf.size("num_key_value_heads"),
        head_dim=head_dim or hf.size("head_dim", hidden // heads),
        intermediate=hf.size("intermediate_size"),
        norm_eps=float(hf.number("rms_norm_eps", 1e-6, zero=True)),
        rope=read_rope(hf) if rotary else None,
        max_positions=hf.size("max_position_embeddings", most=MOST_POSITIONS),
        planes=tuple(Plane(window or None) for window in windows or [None] * layers),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        tie_embeddings=hf.flag("tie_word_embeddings"),
        dtype=hf.text("dtype", None) or hf.text("torch_dtype", None),
        **options,
    )


def _layers(hf: Settings) -> int:
    return hf.size("num_hidden_layers", most=MOST_LAYERS)


def _window(hf: Settings) -> int | None:
    """Returns the positions of the sliding window; None where `sliding_window` is null or 0: there is none."""
    if "sliding_window" in hf and hf["sliding_window"] is None:
        return None
    return hf.size("sliding_window", 4096, least=0, most=MOST_POSITIONS) or None


def qwen_windows(hf: Settings) -> list[int | None]:
    """Returns the sliding window of each layer: the last ones, from `max_window_layers` on, or those that `layer_types`
    names, have one where `use_sliding_window` is set."""
    layers, types = _layers(hf), hf.texts("layer_types", None)
    hf.get("sliding_window")  # it is read, and says nothing where use_sliding_window is not set
    if not hf.flag("use_sliding_window") or _window(hf) is None:
        return [None] * layers
    first = min(hf.size("max_window_layers", 28, least=0), layers)
    return _windows(hf, types or [FULL] * first + [SLIDING] * (layers - first))


def _windows(hf: Settings, types: list[str]) -> list[int | None]:
    """Returns the sliding window of each layer; None: it attends to everything before. types: one a layer."""
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(f"layer_types has {', '.join(sorted(unknown))}; full and sliding attention work")
    if len(types) != _layers(hf):
        raise CheckpointError(f"layer_types has {len(types)} entries; it must have {_layers(hf)}, one a layer")
    window = _window(hf)
    return [window if kind == SLIDING else None for kind in types]


def _every(pattern: int, layers: int) -> list[str]:
    """Returns layer types where one layer in `pattern` is full: the last of each."""
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _rope_of(hf: Settings, kind: str, base: str, default: float) -> Settings:
    """Returns the config as `read_rope` reads it, for the layers of one kind.

    Transformers 5 has settings for each kind in `rope_parameters`; before, `rope_scaling` was for the full
    layers, and each kind had its `base` key.
    """
    nested = hf.settings("rope_parameters")
    if not all(value is None or isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError(f"rope_parameters must be given for {FULL} and {SLIDING} apart")
    settings = dict(nested.get(kind) or {}) | (hf.settings("rope_scaling") if kind == FULL else {})
    theta = settings.get("rope_theta") or hf.number(base, default)
    return hf | {"rope_scaling": None, "rope_parameters": settings | {"rope_theta": theta}}
