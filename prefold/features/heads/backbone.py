"""The language model below a decision head, whose architecture config.json does not name."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.settings import Settings
from ...model.config import ModelConfig
from ...model.families import HFConfig, config_from


def backbone(hf: HFConfig, *own: str) -> ModelConfig:
    """Return the config of a language model by its `model_type`, without an LM head. own: keys that the head reads"""
    settings = Settings.of(hf)
    for key in own:
        settings.get(key)
    inner = settings.settings("text_config") or settings
    return replace(config_from({key: inner[key] for key in inner if key not in ("architectures", *own)}), lm_head=False)
