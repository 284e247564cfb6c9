"""How an engine runs: what is settled when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache import CacheOptions
from ..errors import InputError
from ..types import Sharing

__all__ = ["EngineOptions", "GenerateOptions"]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """kv_memory       bytes of K/V; None: half of what is free, on a CPU at most 4 GiB
    max_running     sequences at once
    reserve_output  set aside room for a whole output where its length was given; else outputs grow, and what
                    was admitted last makes room when memory runs out
    cache           keep K/V of what has ended, by these options; None: do not
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
    """What an engine does where a run does not say otherwise.

    sharing         of rows between requests
    max_batch_rows  rows of a step; None: what the worker's device affords
    generation      how K/V is held for what is generated
    eos_ids         tokens that end a text
    cache_prefill   runs that read last rows only use and fill the cache of `generation` too
    """

    sharing: Sharing = "full"
    max_batch_rows: int | None = None
    generation: GenerateOptions = GenerateOptions()
    eos_ids: tuple[int, ...] = ()
    cache_prefill: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_rows is not None and self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, not {self.max_batch_rows}")
