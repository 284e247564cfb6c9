"""The config of a looped model. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ..model.config import ModelConfig
from ..types import Exits
from .loop import Loop
from .requests import check_exits


@dataclass(frozen=True, kw_only=True)
class LoopedConfig(ModelConfig):
    """A LoopedConfig is a ModelConfig that has a plane for each layer of each visit.

    loop  how the layers are visited
    """

    model: ClassVar[str] = "prefold.looped.model:LoopedLM"

    loop: Loop

    @classmethod
    def of(cls, config: ModelConfig, loop: Loop) -> LoopedConfig:
        """Returns a looped model of the layers of another one."""
        own = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
        return cls(**own | {"planes": tuple(config.planes[i] for i in loop.visited(config.layers)), "loop": loop})

    def check_exits(self, exits: Exits) -> None:
        check_exits(exits, self.loop)

    @property
    def visited(self) -> tuple[int, ...]:
        return self.loop.visited(self.layers)

    @property
    def fixed(self) -> str:
        return super().fixed or "it is looped, and what its rows have at a visit may depend on more than their tokens"

    @property
    def linear_flops(self) -> int:
        return super().linear_flops + len(self.loop.order) * 2 * self._injection

    @property
    def num_parameters(self) -> int:
        return super().num_parameters + self.loop.num_parameters(self.hidden) + self._injection

    @property
    def _injection(self) -> int:
        return 2 * self.hidden**2 if self.loop.between == "inject" else 0
