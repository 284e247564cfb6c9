"""The sampler, asked as the engine asks it: for the tokens of some samples, by what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefold.engine.sampling import SamplerState, drawing_of
from prefold.spec.requests import Sampling, TokenLogprobs
from prefold.spec.task import FILTERS, filters_of
from prefold.worker.sampler import choose
from prefold.worker.torch.arrays import TorchArrays


@dataclass
class Choice:
    ids: list[int]
    logprobs: list[TokenLogprobs | None]


def choose_for(
    logits: torch.Tensor,
    states: Sequence[SamplerState],
    rows: Sequence[int] | None = None,
    ahead: Sequence[int] | None = None,
) -> Choice:
    """The next token of each sample; `rows[i]` is the row of states[i], by default i."""
    places = np.arange(len(states)) if rows is None else np.array(rows, np.int64)
    ids, logprobs = choose(TorchArrays(logits.device), logits, places, drawing_of(states, ahead or [0] * len(states)))
    return Choice(ids.tolist(), [logprobs.get(i) for i in range(len(states))])


def draw_for(
    logits: torch.Tensor, rows: Sequence[int], options: Sequence[Sampling], keys: Sequence[int]
) -> torch.Tensor:
    """A token drawn from each of `rows` by options alone."""
    filters = np.array([filters_of(one) for one in options], np.float64).reshape(-1, len(FILTERS))
    return TorchArrays(logits.device).draw(logits, np.array(rows, np.int64), filters, np.array(keys, np.uint64))
