"""Configs of models that transformers' modules compute, before the model is loaded. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...checkpoint.settings import MOST_LAYERS, MOST_POSITIONS, Settings
from ...errors import MissingExtraError, UnsupportedModelError
from ...model.config import ModelConfig, Plane
from ...spec import environment

ABOUT = "other causal models, by transformers' modules (docs/families.md): pip install 'prefold[transformers]'"
# Endings of architecture names, and the class of transformers that loads such models.
HEADS = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM", "Model": "AutoModel"}
HEADS["ForSequenceClassification"] = "AutoModelForSequenceClassification"
# Tables of transformers: model_type -> architecture.
TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModel": "MODEL_MAPPING_NAMES",
}
# Checkpoints with towers that are not loaded: {architecture: architecture of the text model, which is loaded}.
TEXTS = {f"Gemma{number}ForConditionalGeneration": f"Gemma{number}ForCausalLM" for number in ("3n", "4")}
# RoPE types that change their factors for positions beyond this setting.
CHANGED_BEHIND = {"longrope": "original_max_position_embeddings"}


@dataclass(frozen=True, slots=True)
class PlaneHeads:
    """The attention of one plane. The K/V of all planes have the sizes of the largest."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float  # factor of query-key products
    cap: float | None = None  # products become cap * tanh(product / cap); None: no cap
    sinks: bool = False  # the softmax's denominator has one learned number per head

    def groups(self, kv_heads: int) -> tuple[int, int]:
        """Return (copies of each KV head in K/V with `kv_heads` heads, query heads per copy)."""
        group, times = self.heads // self.kv_heads, kv_heads // self.kv_heads
        return (times, group // times) if kv_heads % self.kv_heads == group % times == 0 else (1, group)


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The config of a model that transformers' modules compute.

    Head sizes and planes come from config.json until the model is loaded, and from its calls of attention afterwards.

    Attributes:
        architecture: the architecture's name in the checkpoint
        loader: the class of transformers that loads the model
        settings: config.json
        attention: one per plane; empty before the model is loaded
        linears: {name of a linear that sees every row: (inputs, outputs)}; empty before the model is loaded
        weights: number of parameters; 0 before the model is loaded
        is_part: the checkpoint also has towers (`TEXTS`)
    """

    model: ClassVar[str] = "prefold.features.hf.model:TransformersLM"
    loading: ClassVar[str] = "prefold.features.hf.load"

    architecture: str
    loader: str
    settings: Mapping[str, Any] = field(repr=False, hash=False)
    attention: tuple[PlaneHeads, ...] = ()
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False, hash=False)
    weights: int = 0
    is_part: bool = False

    @property
    def visited(self) -> Sequence[int]:
        return range(len(self.planes))  # a layer may call attention several times, or not at all

    @property
    def pass_layers(self) -> Sequence[int]:
        return range(self.layers)

    @property
    def fixed(self) -> str | None:
        return "transformers' modules rotate its keys"

    @property
    def num_parameters(self) -> int:
        return self.weights or super().num_parameters


def family_of(hf: Settings, architecture: str, is_known: bool) -> Any:
    """Return the family of a config that transformers' modules compute.

    Return None if a prefold family computes it, or if the architecture's name is not a causal model's. Raise
    UnsupportedModelError if transformers is not installed or lacks the model.

    Args:
        is_known: prefold has a family for the architecture
    """
    if is_known and not environment.wants_transformers():
        return None
    if architecture in TEXTS:
        family = family_of(hf.settings("text_config"), TEXTS[architecture], False)
        return lambda hf: _of_part(hf, family)
    ends = [end for end in HEADS if architecture.endswith(end)]
    if not ends and architecture != hf.get("model_type"):  # a bare model_type means the causal model
        return None
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        if is_known:
            raise MissingExtraError("transformers", "transformers", f"{environment.TRANSFORMERS}=all") from error
        raise UnsupportedModelError(
            f"the architecture {architecture!r} is not one of prefold's families, and running it with transformers' "
            "modules needs the package 'transformers': pip install 'prefold[transformers]'"
        ) from error
    model_type, loader = hf.get("model_type"), HEADS[ends[0] if ends else "ForCausalLM"]
    model_class = getattr(modeling_auto, TABLES[loader]).get(model_type)
    is_causal = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal or architecture not in (model_type, model_class):
        beside = " (the checkpoint's own code, auto_map, is never run)" if hf.get("auto_map") else ""
        raise UnsupportedModelError(
            f"the architecture {architecture!r} is not supported: neither prefold nor transformers "
            f"{transformers.__version__} has a causal model of this name with model_type {model_type!r}{beside}; use a "
            "newer transformers, or add a family with register_family and --plugin (docs/families.md)"
        )
    return lambda hf: config_of(hf, architecture, loader)


def _of_part(hf: Settings, family: Any) -> TransformersConfig:
    """Return the config of the text model in a checkpoint with towers."""
    hf.reads.update(hf.prefix + key for key in hf)
    return replace(family(hf.settings("text_config")), is_part=True)


def config_of(hf: Settings, architecture: str, loader: str) -> TransformersConfig:
    """Return the config of a transformers model. Raise UnsupportedModelError if transformers refuses the settings."""
    config = transformers_config(hf, architecture)
    hf.reads.update(hf.prefix + key for key in hf)  # transformers reads them all
    sizes = Settings({key: _of(config, *names) for key, names in SIZES.items()}, hf.file)
    heads, layers = sizes.size("num_attention_heads"), sizes.size("num_hidden_layers", most=MOST_LAYERS)
    positions = sizes.size("max_position_embeddings", most=MOST_POSITIONS)
    ropes = _ropes(getattr(config, "rope_parameters", None) or {})
    limits = [rope.get(CHANGED_BEHIND[kind]) or _of(config, CHANGED_BEHIND[kind]) for kind, rope in ropes]
    kinds = getattr(config, "layer_types", None) or ()
    window = _of(config, "sliding_window")
    hidden = sizes.size("hidden_size")
    return TransformersConfig(
        vocab_size=sizes.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=sizes.size("num_key_value_heads", heads),
        head_dim=sizes.size("head_dim", hidden // heads),
        intermediate=sizes.size("intermediate_size", 4 * hidden),
        norm_eps=1e-6,
        rope=None,
        max_positions=min([positions, *filter(None, limits)]),
        planes=tuple(
            Plane(window if number < len(kinds) and kinds[number] == "sliding_attention" else None)
            for number in range(layers)
        ),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        lm_head=loader == "AutoModelForCausalLM",
        num_labels=config.num_labels if loader == "AutoModelForSequenceClassification" else None,
        labels=_labels(hf),
        pad_id=_of(config.get_text_config(), "pad_token_id"),
        dtype=hf.text("dtype", None) or hf.text("torch_dtype", None),
        architecture=architecture,
        loader=loader,
        settings=dict(hf.items()),
    )  # fmt: skip


# Sizes by their usual names, and the names that configs use for them.
SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "moe_intermediate_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


def transformers_config(settings: Mapping[str, Any], architecture: str) -> Any:
    """Return a config.json as a config of transformers. Raise UnsupportedModelError if transformers refuses it."""
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(deepcopy(dict(settings.items())))
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} refuses the config: {type(error).__name__}: {error}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"the architecture {architecture!r} has an encoder, but only decoder-only models can run"
        )
    return config


def _of(config: Any, *names: str) -> Any:
    """Return the first value that a config has under these names, or the largest if it is a list.

    Return None if it has none, or if the value differs between layers.
    """
    for name in names:
        with contextlib.suppress(Exception):
            if (value := getattr(config, name, None)) is not None:
                return max(value) if isinstance(value, list) else value
    return None


def _ropes(parameters: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (type, settings) of each RoPE that changes its factors with the position, for all kinds of layers."""
    every = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return [(kind, rope) for rope in every if (kind := rope.get("rope_type")) in CHANGED_BEHIND]


def _labels(hf: Settings) -> tuple[str, ...]:
    names = hf.settings("id2label")
    return tuple(str(names[key]) for key in sorted(names, key=int)) if all(map(str.isdecimal, names)) else ()
