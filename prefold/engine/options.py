"""The options of an engine, which are settled when it is made."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    kv_memory: int | None = None
    max_running: int = 256
    reserve_output: bool = True
    cache: CacheOptions | None = None

    def __post_init__(self) -> None:
        for name in ("kv_memory", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}", field=name, remedy="give 1 or more")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An EngineOptions says what an engine does where a run does not say otherwise.

    sharing         how rows are shared between requests
    max_batch_rows  the most rows of a step; None: what the worker's device affords
    generation      how K/V is held for what is generated
    eos_ids         the tokens that end a text
    cache_prefill   whether numeric runs that read only last rows use and fill the cache of `generation` too
    media_memory    bytes of the rows of images that are kept once the tower has made them

    Raises ValueError for max_batch_rows below 1.
    """

    sharing: Sharing = "full"
    max_batch_rows: int | None = None
    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()
    cache_prefill: bool = False
    media_memory: int = MEDIA_MEMORY

    def __post_init__(self) -> None:
        if self.max_batch_rows is not None and self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, not {self.max_batch_rows}")
