"""The config of a model that sees images. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..model.config import ModelConfig
from .tower_config import TowerConfig


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

    def image_inputs(self, checkpoint: Any, tokenizer: Any, table: Any = None, **how: Any) -> Any:
        from .items import image_inputs

        return image_inputs(checkpoint, self.tower, tokenizer, table, **how)

    @property
    def span_rows(self) -> int:
        return self.tower.rows if self.tower.span else 0


def tower_of(config: ModelConfig) -> TowerConfig | None:
    """Returns the tower of a model; None: it takes text alone."""
    return config.tower if isinstance(config, SeeingConfig) else None


def _fields(config: ModelConfig) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
