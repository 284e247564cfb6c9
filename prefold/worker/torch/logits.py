"""What the products of an LM head go through before they are logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LogitShape:
    """A LogitShape makes logits of the products x of an LM head: scale * x, or cap * tanh(scale * x / cap).

    scale, cap  as `logit_scale` and `logit_cap` of ModelConfig
    """

    scale: float
    cap: float | None

    @classmethod
    def of(cls, config: ModelConfig) -> LogitShape | None:
        """Returns the shape of a model's logits; None: they are the products."""
        plain = config.logit_scale == 1 and config.logit_cap is None
        return None if plain else cls(config.logit_scale, config.logit_cap)

    def __call__(self, products: Tensor) -> Tensor:
        """Returns the logits of products, of any shape."""
        if self.cap is None:
            return products * self.scale
        products = products * (self.scale / self.cap)
        return self.cap * torch.tanh(products)

    def gradient(self, logits: Tensor) -> Tensor | float:
        """Returns the derivative of logits by their products, shaped as logits or a number."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)
