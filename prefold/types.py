"""The words the layers share: what is asked of the engine, and what comes back. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

__all__ = ["SHARING_MODES", "Readout", "Request", "Result", "Sharing", "Stats"]

Sharing = Literal["full", "mlp", "off"]
SHARING_MODES: tuple[Sharing, ...] = ("full", "mlp", "off")


@dataclass(frozen=True, slots=True)
class Readout:
    """What a run reads from the model; one kind a run.

    kind        result of a request                                   read at
    "last"      hidden state after the final norm, [hidden]           its last row
    "first"     the same                                              its first row
    "mean"      the same, averaged in float32 over the prompt         all its rows
    "head"      the checkpoint's classification head, [num_labels]    its last row
    "logits"    logits of the vocabulary ids `ids`, [len(ids)]        its last row
    "logprobs"  log-probability of each target, [len(targets)],       its last len(targets) rows
                and whether the target is the arg-max
    """

    kind: Literal["last", "first", "mean", "head", "logits", "logprobs"]
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids.

    tokens   int32 [n], n >= 1: the rows of the prompt.
    targets  int32 [m], m <= n, for readout "logprobs" only: targets[t] is the token whose
             log-probability is wanted at the row of position n - m + t. A continuation's last
             token is a target and no row: score(P, C) is tokens = P + C[:-1], targets = C.
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a request's read-out gave: float32 `values`, and for "logprobs" bool `greedy` of the same shape."""

    values: np.ndarray
    greedy: np.ndarray | None = None


@dataclass(slots=True)
class Stats:
    """What was asked, what was computed, and where the time went.

    tokens          tokens of all prompts, as the user sees them
    unique_tokens   rows of the job's stream: its unique tokens, were they computed each exactly once
    rows_computed   rows that went through the model's position-wise layers
    requests        prompts
    steps           forward passes
    path_rows_peak  most rows whose K/V was held between two steps
    seconds         by part: "plan" (host), "model" (device), ...; parts may overlap
    """

    tokens: int = 0
    unique_tokens: int = 0
    rows_computed: int = 0
    requests: int = 0
    steps: int = 0
    path_rows_peak: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_seconds(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def saved(self) -> float:
        """Share of the tokens that was not computed, in [0, 1)."""
        return 1.0 - self.rows_computed / self.tokens if self.tokens else 0.0
