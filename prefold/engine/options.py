"""The options of an engine, which are fixed when it is made; `prefold.spec.model` declares those that users set."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.model import CacheOptions, ModelSpec, SlotOptions, StepOptions, part_of


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SlotOptions):
    """A GenerateOptions says how K/V is held for what is generated. Raises InputError for values out of range.

    cache  the options by which K/V of ended requests is kept; None: it is not kept
    """

    cache: CacheOptions | None = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StepOptions):
    """An EngineOptions says what an engine does where a run does not say otherwise.

    generation  how K/V is held for what is generated
    eos_ids     the tokens that end a text

    Raises InputError for values out of range.
    """

    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing == "auto":
            object.__setattr__(self, "sharing", "full")

    @classmethod
    def of(cls, options: ModelSpec, eos_ids: tuple[int, ...]) -> EngineOptions:
        """Returns the options of an engine that are among a model's options."""
        return part_of(cls, options, generation=part_of(GenerateOptions, options), eos_ids=eos_ids)
