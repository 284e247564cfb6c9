"""Scale and cap the products of an LM head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LogitShape:
    """The step from products x of an LM head to logits: scale * x, or cap * tanh(scale * x / cap).

    Attributes:
        scale, cap: `logit_scale` and `logit_cap` of ModelConfig.
    """

    scale: float
    cap: float | None

    @classmethod
    def of(cls, config: ModelConfig) -> LogitShape | None:
        """Return the shape of a model's logits. None: the products are the logits."""
        plain = config.logit_scale == 1 and config.logit_cap is None
        return None if plain else cls(config.logit_scale, config.logit_cap)

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits of products, of any shape."""
        if self.cap is None:
            return products * self.scale
        products = products * (self.scale / self.cap)
        return self.cap * torch.tanh(products)

    def gradient(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of logits with respect to their products, shaped like logits, or a number."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)
