"""The options of an engine, which are settled when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..cache import CacheOptions
from ..errors import InputError
from ..types import Sharing

__all__ = ["MEDIA_MEMORY", "EngineOptions", "GenerateOptions"]

MEDIA_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A GenerateOptions says how K/V is held for what is generated. Raises InputError for values out of range.

    kv_memory       bytes of K/V; None: half of what is free, on a CPU at most 4 GiB
    max_running     the most sequences that run at once
    reserve_output  whether room for a whole output is set aside where its length was given; otherwise outputs take
                    room as they grow, and the sequence that was admitted last makes room when memory runs out
    cache           the options by which K/V of ended requests is kept; None: it is not kept
    exits           of a looped model. "read": rows make all visits, whichever they are read after. "save": they leave,
                    and deeper visits see the K/V of their last visit to a block; "project": K/V made of their state.
                    Requests may then give routes, too
    refill          where rows leave, others come into their places at once; else when all have left
    group           which rows make a step together then: those whose next "block" is the same, or whose "template"
    step_visits     the most visits that rows make one after another in a step then, where nobody has a prompt to
                    compute
    """

    kv_memory: int | None = None
    max_running: int = 256
    reserve_output: bool = True
    cache: CacheOptions | None = None
    exits: Literal["read", "save", "project"] = "read"
    refill: bool = True
    group: Literal["block", "template"] = "block"
    step_visits: int = 2

    def __post_init__(self) -> None:
        for name in ("kv_memory", "max_running", "step_visits"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}", field=name, remedy="give 1 or more")
        for name, allowed in (("exits", ("read", "save", "project")), ("group", ("block", "template"))):
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"{name} is {value!r}", field=name, remedy=f"use {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An EngineOptions says what an engine does where a run does not say otherwise.

    sharing         how rows are shared between requests
    sharing_threshold  above 0, at most 1. With sharing "full": a window of numbers whose unique tokens are a larger
                    share of its tokens runs as with "off" where that was measured to take less time
    max_batch_rows  the most rows of a step; None: what the worker's device affords, and where text is generated fewer
                    once that is found to be faster (`StepSize`)
    generation      how K/V is held for what is generated
    eos_ids         the tokens that end a text
    cache_prefill   whether numeric runs that read only last rows use and fill the cache of `generation` too
    media_memory    bytes of the rows of images that are kept once the tower has made them

    Raises ValueError for max_batch_rows below 1, and a threshold out of range.
    """

    sharing: Sharing = "full"
    sharing_threshold: float = 1.0
    max_batch_rows: int | None = None
    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()
    cache_prefill: bool = False
    media_memory: int = MEDIA_MEMORY

    def __post_init__(self) -> None:
        if self.max_batch_rows is not None and self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, not {self.max_batch_rows}")
        if not 0 < self.sharing_threshold <= 1:
            raise ValueError(f"sharing_threshold must be above 0 and at most 1, not {self.sharing_threshold}")
