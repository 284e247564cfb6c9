"""Dense families: functions from a Hugging Face config (a dict) to a ModelConfig; rotary settings. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import CONTEXT, MOST_LAYERS, MOST_POSITIONS, Settings
from ..errors import CheckpointError, UnsupportedModelError
from .config import STILL, ModelConfig, Plane, RopeConfig
from .names import FUSED, GPT2, STARCODER2, Names


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Read rotary settings from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    hf = Settings.of(hf)
    scaling, parameters = hf.settings("rope_scaling"), hf.settings("rope_parameters")
    rope = scaling or parameters
    kind = rope.text("rope_type", None) or rope.text("type", "default")
    kind = "longrope" if kind == "su" else kind
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError("rotary settings per layer type are not supported for this architecture")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"the rope type {kind!r:.200} is not supported; supported types: {', '.join(list(ROPE_KINDS)[:-1])}"
        )
    share = 1.0  # "proportional" has frequencies for whole heads
    if kind != "proportional":
        share = rope.number("partial_rotary_factor", None) or hf.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise (rope if "partial_rotary_factor" in rope else hf).wrong("partial_rotary_factor", "at most 1")
    theta = rope.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    settings = ROPE_KINDS[kind](hf, rope)
    return RopeConfig("default" if kind == "dynamic" else kind, float(theta), settings, float(share))


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


def _long_rope(hf: Settings, rope: Settings) -> dict[str, Any]:
    """Return the settings of LongRoPE, with the set of factors that `context_length` selects.

    LongRoPE has one set of factors for sequences up to the trained length, and one for longer sequences. If each
    sequence chose its set, the keys of a prefix would depend on what follows. So the longest possible sequence,
    `context_length`, chooses one set for all.
    """
    trained, most = _trained_positions(hf, rope), hf.size("max_position_embeddings", most=MOST_POSITIONS)
    factor = rope.number("factor", None) or most / trained
    warmth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 < trained else 1.0
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    is_long = _context(hf, most) > trained
    return {
        "factors": long if is_long else short,
        "attention_factor": rope.number("attention_factor", None) or warmth,
        "original_max_position_embeddings": trained,
        "is_long": is_long,
    }


def _dynamic_rope(hf: Settings, rope: Settings) -> dict[str, float]:
    """Return no settings, because dynamic NTK scaling has no effect here.

    It changes only sequences longer than `max_position_embeddings`, which are refused.
    """
    rope.number("factor")
    return {}


def _proportional_rope(hf: Settings, rope: Settings) -> dict[str, float]:
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise rope.wrong("partial_rotary_factor", "at most 1")
    return {"share": share, "factor": rope.number("factor", 1.0)}


def _trained_positions(hf: Settings, rope: Settings) -> int:
    """Return the trained context length, before an extension by RoPE scaling."""
    key, most = "original_max_position_embeddings", MOST_POSITIONS
    trained = hf.size(key, None, most=most) or rope.size(key, None, most=most)
    return trained or hf.size("max_position_embeddings", most=most)


# The reader of each rotary kind's settings. The last kind, a divisor per frequency, occurs in GGUF files only.
ROPE_KINDS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda hf, rope: {},
    "linear": lambda hf, rope: {"factor": rope.number("factor")},
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _long_rope,
    "proportional": _proportional_rope,
    "factors": lambda hf, rope: {"factors": rope.numbers("factors")},
}

HFConfig = Mapping[str, Any]

# prefold's activations, by their names in configs.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
ACTIVATIONS |= {"gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}
FULL, SLIDING = "full_attention", "sliding_attention"


def llama(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of Llama 1 to 3, SmolLM 1 and 2, TinyLlama, and other models with Llama's architecture.
    `options` are further arguments of `decoder`."""
    hf = Settings.of(hf)
    bias, mlp_bias = hf.flag("attention_bias"), hf.flag("mlp_bias")
    kv_heads = hf.size("num_key_value_heads", None) or hf.size("num_attention_heads")
    return decoder(hf, kv_heads=kv_heads, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, **options)


def mistral(hf: HFConfig) -> ModelConfig:
    """Return the config of Mistral 7B and relatives: Llama; a sliding window in every layer if `sliding_window` is
    set."""
    hf = Settings.of(hf)
    return decoder(hf, windows=[window_of(hf)] * num_layers(hf))


def qwen2(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen 2 and 2.5: Llama with biases on q, k and v."""
    hf = Settings.of(hf)
    return decoder(hf, qkv_bias=True, windows=qwen_windows(hf))


def qwen3(hf: HFConfig) -> ModelConfig:
    """Return the config of Qwen 3: Llama with norms on q and k, and head_dim set separately."""
    hf = Settings.of(hf)
    bias = hf.flag("attention_bias")
    head_dim = hf.size("head_dim", 128)
    return decoder(hf, head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=qwen_windows(hf))


def gemma3(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 3 (text): norms before and after each sublayer; sliding-window layers have their
    own RoPE base."""
    hf = Settings.of(hf)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(key) is not None:
            raise UnsupportedModelError(f"{key} is {hf[key]}; it is not supported for Gemma 3, which has no soft caps")
    types = hf.texts("layer_types", None) or full_every(hf.size("sliding_window_pattern", 6), num_layers(hf))
    config = gemma_decoder(hf, rope_of(hf, FULL, "rope_theta", 1e6), types, qk_norm=True)
    return with_local_rope(config, types, rope_of(hf, SLIDING, "rope_local_base_freq", 1e4))


def smollm3(hf: HFConfig) -> ModelConfig:
    """Return the config of SmolLM 3: Llama; some layers have no RoPE."""
    hf = Settings.of(hf)
    every = hf.size("no_rope_layer_interval", 4)  # only the default for no_rope_layers
    turns = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers(hf))]
    if not isinstance(turns, list) or len(turns) < num_layers(hf) or any(turn not in (0, 1) for turn in turns):
        raise hf.wrong("no_rope_layers", "a list with 1 for each layer with RoPE, and 0 for each other layer")
    turns = turns[: num_layers(hf)]
    near = SLIDING if hf.flag("use_sliding_window") else FULL
    types = [FULL if turn else near for turn in turns]
    windows = windows_of(hf, hf.texts("layer_types", None) or types)
    defaults = {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2e6, "pad_token_id": 128004}
    return turning(llama(defaults | hf, windows=windows), turns)


def olmo2(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of OLMo 2: norms only after each sublayer; norms over all heads of q and of k. `options` are
    further arguments of `decoder`."""
    defaults = {"rms_norm_eps": 1e-5, "pad_token_id": 1}
    return llama(defaults | Settings.of(hf), row_qk_norm=True, in_norms=False, out_norms=True, **options)


def olmo3(hf: HFConfig) -> ModelConfig:
    """Return the config of OLMo 3: OLMo 2; most layers have a sliding window and their own RoPE settings."""
    hf = Settings.of(hf)
    types = hf.texts("layer_types", None) or full_every(4, num_layers(hf))
    config = olmo2(rope_of(hf, FULL, "rope_theta", 5e5), windows=windows_of(hf, types))
    return with_local_rope(config, types, rope_of(hf, SLIDING, "rope_theta", 5e5))


def phi3(hf: HFConfig) -> ModelConfig:
    """Return the config of Phi 3, 3.5 and 4 mini: Llama with fused tensors; some models rotate part of each head."""
    hf = Settings.of(hf)
    key = next((key for key in ("rope_scaling", "rope_parameters") if hf.settings(key)), None)
    if key is not None and (rope := hf.settings(key)).get("rope_type", rope.get("type")) == "yarn":
        hf = hf | {key: dict(rope) | {"rope_type": "longrope"}}  # early files have this name
    hf.get("full_attn_mod")  # of Microsoft's own code; transformers has no such setting
    window = window_of(hf) if "sliding_window" in hf else None
    if window is not None and window >= hf.size("max_position_embeddings", most=MOST_POSITIONS):
        window = None
    defaults = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "pad_token_id": 32000}
    return llama(defaults | hf, windows=[window] * num_layers(hf), names=FUSED)


def granite(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of Granite 3, and dense Granite 4: Llama with factors on embeddings, attention scores,
    residuals and logits. `options` are further arguments of `decoder`."""
    hf = Settings.of(hf)
    return llama(
        hf,
        embedding_scale=float(hf.number("embedding_multiplier", 1.0)),
        query_scalar=hf.number("attention_multiplier", 1.0) ** -2,
        residual_scale=float(hf.number("residual_multiplier", 1.0)),
        logit_scale=1 / hf.number("logits_scaling", 1.0),
        **options,
    )


def gemma(hf: HFConfig) -> ModelConfig:
    """Return the config of Gemma 1: Llama with norm weights stored minus 1, and a scaled embedding."""
    hf = Settings.of(hf)
    activation = hf.text("hidden_activation", None) or hf.text("hidden_act", "gelu_pytorch_tanh")
    # "gelu" in early files means the tanh approximation.
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    scalar = hf.size("head_dim", 256)
    settings = hf | {"hidden_activation": activation, "query_pre_attn_scalar": scalar}
    return gemma_decoder(settings, settings, [FULL] * num_layers(hf), out_norms=False)


def gemma2(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of Gemma 2: norms before and after each sublayer; soft caps on attention scores and logits;
    every second layer has a sliding window. `options` are further arguments of `decoder`."""
    hf = Settings.of(hf)
    types = hf.texts("layer_types", None) or full_every(2, num_layers(hf))
    # A missing key has a default, but null means no cap.
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | hf
    attention, logits = hf.number("attn_logit_softcapping", None), hf.number("final_logit_softcapping", None)
    return gemma_decoder(hf, hf, types, attention_cap=attention, logit_cap=logits, **options)


def gemma_decoder(hf: Settings, rope: Settings, types: list[str], **options: Any) -> ModelConfig:
    """Return the config of the common part of Gemma models. `rope` is the config with the settings that `read_rope`
    reads."""
    bias = hf.flag("attention_bias")
    defaults = {"head_dim": 256, "tie_word_embeddings": True, "pad_token_id": 0}
    activation = {"hidden_act": hf.text("hidden_activation", "gelu_pytorch_tanh")}
    return decoder(
        defaults | rope | activation,
        windows=windows_of(hf, types),
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=hf.size("hidden_size") ** 0.5,
        query_scalar=hf.number("query_pre_attn_scalar", 256),
        **{"out_norms": True, "norm_offset": 1.0} | options,
    )


def cohere2(hf: HFConfig) -> ModelConfig:
    """Return the config of Cohere 2 (Command R7B and A): parallel attention and MLP; LayerNorm without bias; layers
    with full attention have no RoPE."""
    hf = Settings.of(hf)
    # Keys of Cohere's own code; transformers always behaves as with these values.
    expected = {"use_parallel_block": True, "use_gated_activation": True, "position_embedding_type": "rope_gptj"}
    works_with(hf, "Cohere 2", expected)
    hf.get("use_embedding_sharing")  # also of Cohere's own code; tie_word_embeddings decides
    types = hf.texts("layer_types", None) or full_every(hf.size("sliding_window_pattern", 4), num_layers(hf))
    windows = windows_of(hf, types)
    epsilon = hf.number("layer_norm_eps", 1e-5, zero=True)
    defaults = {"tie_word_embeddings": True, "rms_norm_eps": epsilon, "pad_token_id": 0}
    config = llama(
        defaults | hf,
        windows=windows,
        norm="layer",
        norm_bias=False,
        parallel=True,
        logit_scale=hf.number("logit_scale", 0.0625),
        names=Names(interleaved=True),
    )
    return turning(config, [window is not None for window in windows])


def starcoder2(hf: HFConfig) -> ModelConfig:
    """Return the config of Starcoder 2: LayerNorm; biases; MLPs without a gate."""
    hf = Settings.of(hf)
    for key in ("activation_function", "layer_norm_epsilon", "norm_type"):
        hf.get(key)  # in the original files; hidden_act and norm_epsilon decide
    bias, window = hf.flag("use_bias", True), window_of(hf) if "sliding_window" in hf else None
    defaults = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    return decoder(
        defaults | hf | {"rms_norm_eps": hf.number("norm_epsilon", 1e-5, zero=True)},
        windows=[window] * num_layers(hf),
        norm="layer",
        mlp="plain",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        names=STARCODER2,
    )


def exaone4(hf: HFConfig, **options: Any) -> ModelConfig:
    """Return the config of EXAONE 4: norms only after each sublayer; norms on q and k; if some layers have a sliding
    window, the others have no RoPE. `options` are further arguments of `decoder`."""
    hf = Settings.of(hf)
    hf.get("sliding_window_pattern")  # has no effect beside layer_types, or without a window
    windows: list[int | None] = [None] * num_layers(hf)
    if window_of(hf) is not None:
        types = hf.texts("layer_types", None) or full_every(hf.size("sliding_window_pattern", 4), num_layers(hf))
        windows = windows_of(hf, types)
    elif set(hf.texts("layer_types", None) or ()) - {FULL}:
        raise UnsupportedModelError("layer_types has sliding attention, but sliding_window is null")
    defaults = {"rms_norm_eps": 1e-5}
    options = {"in_norms": False, "out_norms": True} | options
    config = decoder(defaults | hf, windows=windows, qk_norm=True, **options)
    return turning(config, [window is not None or window_of(hf) is None for window in windows])


def gpt2(hf: HFConfig) -> ModelConfig:
    """Return the config of GPT-2: LayerNorm; learned positions; biases; MLPs without a gate; other names of keys and
    tensors.

    The key reorder_and_upcast_attn, the order in which attention rounds, changes nothing here.
    """
    hf = Settings.of(hf)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} is not supported")
    renamed = gpt2_settings(hf)
    heads = renamed["num_attention_heads"]
    return decoder(
        {"tie_word_embeddings": True} | hf | renamed,
        kv_heads=heads,
        head_dim=renamed["hidden_size"] // heads,
        rotary=False,
        norm="layer",
        mlp="plain",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scalar=None if hf.flag("scale_attn_weights", True) else 1.0,
        names=GPT2,
    )


def gpt2_settings(hf: Settings) -> HFConfig:
    """Return the settings of a config with GPT-2's keys, under the usual keys."""
    hidden, heads = hf.size("n_embd"), hf.size("n_head")
    if hidden % heads:
        raise UnsupportedModelError(f"n_embd is {hidden}; it must be a multiple of n_head, {heads}")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": hf.size("n_layer", most=MOST_LAYERS),
        "intermediate_size": hf.size("n_inner", 4 * hidden),
        "max_position_embeddings": hf.size("n_positions"),
        "hidden_act": hf.text("activation_function", "gelu_new"),
        "rms_norm_eps": hf.number("layer_norm_epsilon", 1e-5, zero=True),
    }


def decoder(
    hf: HFConfig,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: bool = True,
    windows: list[int | None] | None = None,
    **options: Any,
) -> ModelConfig:
    """Return the config of a decoder with the settings that most families share.

    Args:
        hf: the Hugging Face config.
        kv_heads: overrides `num_key_value_heads`.
        head_dim: overrides `head_dim` of the config.
        rotary: rotate queries and keys; if not, each position has an embedding.
        windows: sliding window per layer; 0 or None: no window.
        options: fields of ModelConfig.
    """
    hf = Settings.of(hf)
    activation = hf.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r:.200} is not supported; supported: {', '.join(map(repr, ACTIVATIONS))}. For "
            "another activation add a kind of MLP (docs/families.md)"
        )
    hidden, heads, layers = hf.size("hidden_size"), hf.size("num_attention_heads"), num_layers(hf)
    positions = hf.size("max_position_embeddings", most=MOST_POSITIONS)
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
        max_positions=_context(hf, positions),
        planes=tuple(Plane(window or None) for window in windows or [None] * layers),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        tie_embeddings=hf.flag("tie_word_embeddings"),
        dtype=hf.text("dtype", None) or hf.text("torch_dtype", None),
        pad_id=hf.token("pad_token_id"),
        **options,
    )


def works_with(hf: Settings, name: str, expected: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if a setting differs from the one value that the family supports."""
    for key, value in expected.items():
        if hf.get(key) not in (None, value):
            raise UnsupportedModelError(f"{key} is {hf[key]}; {name} needs {value}")


def with_local_rope(config: ModelConfig, types: Sequence[str], hf: Settings) -> ModelConfig:
    """Return the config with rotary settings from `hf` in sliding-window layers. `types` is one type per layer."""
    local, planes = read_rope(hf), zip(config.planes, types, strict=True)
    return replace(config, planes=tuple(replace(p, rope=local) if kind == SLIDING else p for p, kind in planes))


def turning(config: ModelConfig, turns: Sequence[bool | int]) -> ModelConfig:
    """Return the config with RoPE only in layers whose entry in `turns` is true."""
    planes = zip(config.planes, turns, strict=True)
    return replace(config, planes=tuple(plane if turn else replace(plane, rope=STILL) for plane, turn in planes))


def _context(hf: Settings, positions: int) -> int:
    """Return the maximum sequence length. `positions` is the model's own limit."""
    context: int = hf.size(CONTEXT, positions)
    if context > positions:
        raise CheckpointError(f"context_length is {context:,}; the model supports at most {positions:,} tokens")
    return context


def num_layers(hf: Settings) -> int:
    return hf.size("num_hidden_layers", most=MOST_LAYERS)


def window_of(hf: Settings) -> int | None:
    """Return the sliding window; None if `sliding_window` is null or 0."""
    if "sliding_window" in hf and hf["sliding_window"] is None:
        return None
    return hf.size("sliding_window", 4096, least=0, most=MOST_POSITIONS) or None


def qwen_windows(hf: Settings) -> list[int | None]:
    """Return the sliding window per layer, by the rules of Qwen.

    With `use_sliding_window`, the layers from `max_window_layers` on, or the layers named in `layer_types`, have a
    window.
    """
    layers, types = num_layers(hf), hf.texts("layer_types", None)
    hf.get("sliding_window")  # has no effect without use_sliding_window
    if not hf.flag("use_sliding_window") or window_of(hf) is None:
        return [None] * layers
    first = min(hf.size("max_window_layers", 28, least=0), layers)
    return windows_of(hf, types or [FULL] * first + [SLIDING] * (layers - first))


def windows_of(hf: Settings, types: list[str]) -> list[int | None]:
    """Return the sliding window per layer, from one layer type per layer; None: full attention."""
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types has {', '.join(sorted(unknown))}; only {FULL} and {SLIDING} are supported"
        )
    if len(types) != num_layers(hf):
        raise CheckpointError(f"layer_types has {len(types)} entries; it must have {num_layers(hf)}, one per layer")
    window = window_of(hf)
    return [window if kind == SLIDING else None for kind in types]


def full_every(pattern: int, layers: int) -> list[str]:
    """Return layer types in which the last of every `pattern` layers is full."""
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def rope_of(hf: Settings, kind: str, base: str, default: float) -> Settings:
    """Return the config with the rotary settings of one layer type, as `read_rope` expects them.

    transformers 5 nests settings per layer type in `rope_parameters`. Before, `rope_scaling` applied to full layers,
    and each layer type had its own `base` key.
    """
    nested = hf.settings("rope_parameters")
    if not all(value is None or isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError(f"rope_parameters must have separate settings for {FULL} and {SLIDING}")
    settings = dict(nested.get(kind) or {}) | (hf.settings("rope_scaling") if kind == FULL else {})
    theta = settings.get("rope_theta") or hf.number(base, default)
    return hf | {"rope_scaling": None, "rope_parameters": settings | {"rope_theta": theta}}
