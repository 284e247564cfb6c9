"""Model families: functions from a Hugging Face config (a dict) to a ModelConfig. No torch.

A family is data; one of your own is added with `register_family`. What a config asks for and the
transformer here does not do is an UnsupportedModelError, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.settings import MOST_LAYERS, MOST_POSITIONS, Settings
from ..errors import CheckpointError, UnsupportedModelError
from .config import ModelConfig, Plane, RopeConfig

__all__ = ["config_from", "decoder", "read_rope", "register_family", "supported_architectures"]

HFConfig = Mapping[str, Any]
Family = Callable[[HFConfig], ModelConfig]

# Activations by the names that configs give them.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LABELS = 2**20
# Of an error's message.
MOST_CHARACTERS = 600


def config_from(hf: HFConfig) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.

    Raises UnsupportedModelError for what prefold does not do, listing what works, and CheckpointError for settings that
    cannot be; both name the file (where `hf` are the settings of a checkpoint), the key and what is wrong.
    """
    hf = Settings.of(hf)
    try:
        return _config_from(hf)
    except CheckpointError as error:
        what = " ".join(str(error).split())  # names from the config may have lines
        what = what if len(what) <= MOST_CHARACTERS else what[:MOST_CHARACTERS] + "..."
        raise type(error)(what if hf.file in what else f"{hf.file}: {what}") from error


def _config_from(hf: Settings) -> ModelConfig:
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
    if isinstance(code, Mapping) and architecture not in OWN_CODE and any(str(k).startswith("AutoModel") for k in code):
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
    hf = Settings.of(hf)
    attention_bias = hf.flag("attention_bias")
    kv_heads = hf.size("num_key_value_heads", None) or hf.size("num_attention_heads")
    return decoder(hf, kv_heads=kv_heads, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf.flag("mlp_bias"))


def mistral(hf: HFConfig) -> ModelConfig:
    """Mistral 7B and kin: Llama, with a sliding window in every layer when `sliding_window` is set."""
    hf = Settings.of(hf)
    return decoder(hf, windows=[_window(hf)] * _layers(hf))


def qwen2(hf: HFConfig) -> ModelConfig:
    """Qwen 2 and 2.5: biases on q, k and v."""
    hf = Settings.of(hf)
    return decoder(hf, qkv_bias=True, windows=_qwen_windows(hf))


def qwen3(hf: HFConfig) -> ModelConfig:
    """Qwen 3: norms on q and k, a head_dim of its own."""
    hf = Settings.of(hf)
    bias = hf.flag("attention_bias")
    head_dim = hf.size("head_dim", 128)
    return decoder(hf, head_dim=head_dim, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_qwen_windows(hf))


def gemma3(hf: HFConfig) -> ModelConfig:
    """Gemma 3, the text model: norms before and after each part; layers with a sliding window have a rotary base of
    their own."""
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
    """GPT-2: LayerNorm, learned positions, biases everywhere, no gate; keys, tensors and modules with names of its own.

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
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        query_scalar=None if hf.flag("scale_attn_weights", True) else 1.0,
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
    hf = Settings.of(hf)
    activation = hf.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not supported; these are: {', '.join(map(repr, ACTIVATIONS))}"
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


def read_rope(hf: HFConfig) -> RopeConfig:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    hf = Settings.of(hf)
    given = hf.settings("rope_scaling") or hf.settings("rope_parameters")
    kind = given.text("rope_type", None) or given.text("type", "default")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rotary settings that differ from layer to layer are not supported")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"the rope type {kind!r} is not supported; these are: {', '.join(list(ROPE_KINDS)[:-1])}"
        )
    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; all of a head is rotated")
    theta = given.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    return RopeConfig(kind, float(theta), ROPE_KINDS[kind](hf, given))


def _linear_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    return {"factor": given.number("factor")}


def _llama3_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    numbers = {key: given.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise given.wrong("high_freq_factor", f"more than low_freq_factor, {numbers['low_freq_factor']}")
    return numbers | {"original_max_position_embeddings": _trained_positions(hf, given)}


def _yarn_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    theta = given.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    if theta <= 1:
        raise (given if "rope_theta" in given else hf).wrong("rope_theta", "more than 1 with yarn")
    trained = _trained_positions(hf, given)
    return {
        "factor": given.number("factor", None) or hf.size("max_position_embeddings", most=MOST_POSITIONS) / trained,
        "original_max_position_embeddings": trained,
        "attention_factor": given.number("attention_factor", None),
        "beta_fast": given.number("beta_fast", 32),
        "beta_slow": given.number("beta_slow", 1),
        "mscale": given.number("mscale", None, zero=True),
        "mscale_all_dim": given.number("mscale_all_dim", None, zero=True),
        "truncate": given.flag("truncate", True),
    }


def _factors_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    return {"factors": given.numbers("factors")}


def _trained_positions(hf: Settings, given: Settings) -> int:
    """Positions that the model was trained on, before its context was made longer."""
    key, most = "original_max_position_embeddings", MOST_POSITIONS
    trained = hf.size(key, None, most=most) or given.size(key, None, most=most)
    return trained or hf.size("max_position_embeddings", most=most)


# What reads the settings of each rotary kind; the last one, a divisor for every frequency, is in GGUF files only.
ROPE_KINDS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda hf, given: {},
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "factors": _factors_rope,
}


def _layers(hf: Settings) -> int:
    return hf.size("num_hidden_layers", most=MOST_LAYERS)


def _window(hf: Settings) -> int | None:
    """Positions of the sliding window; None where `sliding_window` is null or 0: there is none."""
    if "sliding_window" in hf and hf["sliding_window"] is None:
        return None
    return hf.size("sliding_window", 4096, least=0, most=MOST_POSITIONS) or None


def _qwen_windows(hf: Settings) -> list[int | None]:
    """Sliding windows in the last layers, from `max_window_layers` on, or in those that `layer_types` names; none
    unless `use_sliding_window` is set."""
    layers = _layers(hf)
    if not hf.flag("use_sliding_window") or _window(hf) is None:
        return [None] * layers
    first = min(hf.size("max_window_layers", 28, least=0), layers)
    return _windows(hf, hf.texts("layer_types", None) or [FULL] * first + [SLIDING] * (layers - first))


def _windows(hf: Settings, types: list[str]) -> list[int | None]:
    """The sliding window of each layer; None: it attends to everything before. types: one a layer."""
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(f"layer_types has {', '.join(sorted(unknown))}; full and sliding attention work")
    if len(types) != _layers(hf):
        raise CheckpointError(f"layer_types has {len(types)} entries; it must have {_layers(hf)}, one a layer")
    window = _window(hf)
    return [window if kind == SLIDING else None for kind in types]


def _every(pattern: int, layers: int) -> list[str]:
    """Layer types where one layer in `pattern` is full: the last of each."""
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _rope_of(hf: Settings, kind: str, base: str, default: float) -> Settings:
    """The config as `read_rope` reads it, for the layers of one kind.

    Transformers 5 has settings for each kind in `rope_parameters`; before, `rope_scaling` was for the full
    layers, and each kind had its `base` key.
    """
    nested = hf.settings("rope_parameters")
    if not all(value is None or isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError(f"rope_parameters must be given for {FULL} and {SLIDING} apart")
    settings = dict(nested.get(kind) or {}) | (hf.settings("rope_scaling") if kind == FULL else {})
    theta = settings.get("rope_theta") or hf.number(base, default)
    return hf | {"rope_scaling": None, "rope_parameters": settings | {"rope_theta": theta}}


def _architecture(hf: Settings) -> str:
    names = hf.texts("architectures", None)
    if names:
        return names[0]
    model_type = hf.text("model_type", None)
    return MODEL_TYPES.get(str(model_type), str(model_type))


def _bare(family: Family) -> Family:
    """Checkpoints without a head. They give no logits, also where a language model's embedding is its head: these were
    trained for something else, and what they would say of the next token means nothing."""

    def bare(hf: HFConfig) -> ModelConfig:
        return replace(family(hf), lm_head=False)

    return bare


def _classifier(family: Family) -> Family:
    """Checkpoints with a classification head, of one linear."""

    def classifier(hf: HFConfig) -> ModelConfig:
        hf = Settings.of(hf)
        labels = _labels(hf)
        num_labels = len(labels) or hf.size("num_labels", 2, most=MOST_LABELS)
        return replace(family(hf), lm_head=False, num_labels=num_labels, labels=labels)

    return classifier


def _labels(hf: Settings) -> tuple[str, ...]:
    """The names of the labels, in the order of their numbers; none where the config has no names."""
    names = hf.settings("id2label")
    try:
        numbered = {int(key): str(value) for key, value in names.items()}
    except ValueError:
        raise hf.wrong("id2label", "an object of names by number") from None
    return tuple(numbered[i] for i in sorted(numbered))


def _reward(family: Family) -> Family:
    """Checkpoints with a head of two linears."""

    def reward(hf: HFConfig) -> ModelConfig:
        num_labels = Settings.of(hf).size("num_labels", 1, most=MOST_LABELS)
        return replace(family(hf), lm_head=False, num_labels=num_labels, head_layers=2)

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
