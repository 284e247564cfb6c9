"""What a mixture of experts is, as data. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...errors import UnsupportedModelError
from ...model.config import ModelConfig

MLP = "experts"  # the kind of MLP


@dataclass(frozen=True, slots=True)
class ExpertsConfig(ModelConfig):
    """An ExpertsConfig describes a decoder with a mixture of experts in each layer; `intermediate` is an expert's
    width.

    experts      gated MLPs of a layer, of which each row goes through some
    chosen       of how many: of those to which the router, a linear, gives the largest logits
    normalised   whether their shares are the softmax over their logits, and so sum to 1; else the softmax over all
    shared       the width of a gated MLP beside them that every row goes through; 0: there is none
    shared_gate  whether what it gives is multiplied with the sigmoid of a linear with one output
    biases       whether the router and the experts have biases
    clamped      whether an expert is that of gpt-oss: of gates g, at most 7, and of up u, within 7, it goes on with
                 g * sigmoid(1.702 g) * (1 + u)
    """

    experts: int = 1
    chosen: int = 1
    normalised: bool = True
    shared: int = 0
    shared_gate: bool = False
    biases: bool = False
    clamped: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if not 0 < self.chosen <= self.experts:
            raise UnsupportedModelError(f"each row goes through {self.chosen} experts of {self.experts}")

    def fused_sizes(self, names: Sequence[str]) -> list[int]:
        return [
            self.shared if ".shared_expert." in name else ModelConfig.fused_sizes(self, [name])[0] for name in names
        ]


def mixture(config: ModelConfig, **values: Any) -> ExpertsConfig:
    """Returns a decoder whose MLPs are mixtures. values: fields of ExpertsConfig, and others that
    differ."""
    same = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
    return ExpertsConfig(**same | values | {"mlp": MLP, "mlp_bias": False})


def other_weights(config: Any) -> tuple[int, int]:
    """Returns how many weights the mixture of a layer has, and how many of those of its matrices a row meets."""
    beside = config.hidden * (config.experts + 3 * config.shared + config.shared_gate)
    expert = 3 * config.hidden * config.intermediate
    biases = config.biases * config.experts * (1 + 2 * config.intermediate + config.hidden)
    return config.experts * expert + beside + biases, config.chosen * expert + beside
