"""Defines what is counted while a model runs, and how what a user is given becomes plain values. It imports NumPy
only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass

import numpy as np


class Jsonable:
    """Jsonable is the base of what a user is given: `to_dict` makes plain values of its fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, object]:
        """Returns {name of a field: its value as JSON knows it}: arrays and tuples become lists, errors their text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return str(value) if isinstance(value, Exception) else value


@dataclass(slots=True)
class GenerationStats(Jsonable):
    """Counts what generation did, beside what `Stats` counts.

    generated_tokens        tokens of all outputs
    prefill_rows            rows of prompts, those computed again included
    decode_rows             rows of running sequences: one for each sequence and step
    recomputed_rows         rows computed again after a preemption
    copied_rows             rows of prompts whose K/V was copied from other positions, in place of being computed
    discarded_rows          rows of sequences that had ended already, which showed only while they ran
    first_admission_hits    tokens of prompts that were there when the request was first admitted
    in_step_hits            tokens of prompts shared with a prompt admitted in the same step
    cross_window_hits       tokens of prompts found in the cache, from an earlier window or call
    preemptions             sequences taken out because memory was full
    kv_bytes_now            bytes of K/V held
    kv_bytes_peak           most bytes of K/V held at once
    kv_bytes_unshared_peak  most bytes of K/V held at once, had every sequence K/V of its own
    steps                   forward passes
    running_peak            most sequences running in one step

    of a looped model that is gone through a visit at a time:

    block_calls             rows that went through a block, summed over visits
    block_calls_saved       visits that rows did not make because they had left
    kv_bytes_freed          bytes of K/V that these visits would have held
    """

    generated_tokens: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    recomputed_rows: int = 0
    discarded_rows: int = 0
    copied_rows: int = 0
    first_admission_hits: int = 0
    in_step_hits: int = 0
    cross_window_hits: int = 0
    preemptions: int = 0
    kv_bytes_now: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_unshared_peak: int = 0
    steps: int = 0
    running_peak: int = 0
    block_calls: int = 0
    block_calls_saved: int = 0
    kv_bytes_freed: int = 0

    def __add__(self, other: GenerationStats) -> GenerationStats:
        """Returns the counts of both: the larger one of each peak, the sum of all else."""
        return GenerationStats(**{field.name: _added(self, other, field.name) for field in fields(self)})


@dataclass(slots=True)
class Stats(Jsonable):
    """Counts the tokens of requests and the rows that were computed, and says where the time went.

    tokens          tokens of all prompts, as the user sees them: what sharing "off" computes. A prompt that is read
                    more than once (for labels of one token) counts once. Where text is generated, the tokens of each
                    sample's prompt and output, but for the last token, which needs no row
    unique_tokens   rows of the job's stream: its unique tokens, were each computed exactly once
    rows_computed   rows that went through the model's position-wise layers
    requests        prompts
    steps           forward passes
    path_rows_peak  most rows whose K/V was held between two steps
    tower_runs      images that were encoded
    seconds         by part: "plan" (host), "model" (device), "compile" (of kernels for a GPU), ...; parts may overlap
    generation      what generation did, None without any
    """

    tokens: int = 0
    unique_tokens: int = 0
    rows_computed: int = 0
    requests: int = 0
    steps: int = 0
    path_rows_peak: int = 0
    tower_runs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    generation: GenerationStats | None = None

    def __add__(self, other: Stats) -> Stats:
        """Returns the counts of both, as of two runs or replicas: the larger one of each peak, the sum of all else."""
        counts = {field.name: _added(self, other, field.name) for field in fields(self)[:-2]}
        seconds = {
            part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0)
            for part in {**self.seconds, **other.seconds}
        }
        both = [stats.generation for stats in (self, other) if stats.generation is not None]
        return Stats(**counts, seconds=seconds, generation=sum(both, GenerationStats()) if both else None)

    def add_seconds(self, part: str, seconds: float) -> None:
        """Adds to the seconds of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def saved(self) -> float:
        """Returns the share of the tokens that was not computed, below 1."""
        return 1.0 - self.rows_computed / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        parts = [
            f"{self.requests:,} prompts, {self.tokens:,} tokens",
            f"{self.rows_computed:,} rows computed ({self.saved:.1%} saved) in {self.steps:,} steps",
        ]
        if self.tower_runs:
            parts.append(f"{self.tower_runs:,} images encoded")
        if self.generation is not None:
            parts.append(f"{self.generation.generated_tokens:,} tokens generated")
        spent = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        return "; ".join([*parts, spent] if spent else parts)


def _added(first: object, second: object, name: str) -> int:
    """Returns two counters of this name as one."""
    counts = getattr(first, name), getattr(second, name)
    return max(counts) if name.endswith("_peak") else sum(counts)
