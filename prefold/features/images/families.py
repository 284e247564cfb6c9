"""The families of models that see images: a text model, and the tower beside it, both as data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...checkpoint.settings import Settings
from ...errors import UnsupportedModelError
from ...model.config import ModelConfig
from ...model.decoders import HFConfig, gemma3, llama
from .config import TEXT, TOWER, TowerConfig, tower_config


@dataclass(frozen=True, kw_only=True)
class SeeingConfig(ModelConfig):
    """A SeeingConfig is the ModelConfig of a text model that has a tower beside it, which makes rows of images."""

    tower: TowerConfig

    @classmethod
    def of(cls, text: ModelConfig, tower: TowerConfig) -> SeeingConfig:
        """Returns the config of a text model and its tower."""
        return cls(**_fields(text), tower=tower)

    @property
    def text(self) -> ModelConfig:
        return ModelConfig(**_fields(self))

    def image_inputs(self, checkpoint: Any, tokenizer: Any, table: Any = None, **options: Any) -> Any:
        from .items import image_inputs

        return image_inputs(checkpoint, self.tower, tokenizer, table, **options)

    @property
    def span_rows(self) -> int:
        return self.tower.rows if self.tower.span else 0


def tower_of(config: ModelConfig) -> TowerConfig | None:
    """Returns the tower of a model; None: it takes text alone."""
    return config.tower if isinstance(config, SeeingConfig) else None


def _fields(config: ModelConfig) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in fields(ModelConfig)}


# What a config leaves out of its text_config is as in transformers.
GEMMA3_TEXT: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
LLAMA_TEXT: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
# Architectures that are refused with the reason, in place of the list of those that work.
_THREE_POSITIONS = (
    "a row of its images has three positions (time, height and width), none of which is its depth in the prompt; "
    "use Gemma 3, Idefics3 or SmolVLM for images"
)
REFUSED: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": _THREE_POSITIONS,
    "Qwen2_5_VLForConditionalGeneration": _THREE_POSITIONS,
}


def gemma3_images(hf: HFConfig) -> ModelConfig:
    """Returns the config of Gemma 3 with its tower (4B and larger)."""
    hf = Settings.of(hf)
    text = gemma3(GEMMA3_TEXT | hf.settings("text_config"))
    tied = hf.flag("tie_word_embeddings", True)
    return _seeing(hf, replace(text, tie_embeddings=tied), tower_config("gemma3", hf, text.hidden))


def idefics3_images(hf: HFConfig) -> ModelConfig:
    """Returns the config of Idefics3 and SmolVLM: Llama with a tower."""
    hf = Settings.of(hf)
    settings = hf.settings("text_config")
    if settings.text("model_type", "llama") != "llama":
        raise UnsupportedModelError(f"the text model is {settings['model_type']!r}; only 'llama' is supported")
    for key in ("use_resampler", "qk_layer_norms"):
        if settings.get(key):
            raise UnsupportedModelError(f"text_config.{key} is not supported")
    text = llama(LLAMA_TEXT | settings)
    tied = hf.flag("tie_word_embeddings")
    return _seeing(hf, replace(text, tie_embeddings=tied), tower_config("idefics3", hf, text.hidden))


def _seeing(hf: Settings, text: ModelConfig, tower: TowerConfig) -> SeeingConfig:
    """Returns the config of a text model beside a tower. hf: the whole model's, which may say the dtype that the
    checkpoint was saved in."""
    dtype = hf.text("dtype", None) or hf.text("torch_dtype", None) or text.dtype
    return SeeingConfig.of(replace(text, names=replace(text.names, before=TEXT, other_names=TOWER), dtype=dtype), tower)
