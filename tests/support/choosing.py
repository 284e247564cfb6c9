"""The sampler, asked as the engine asks it: for the tokens of some samples, by what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefold import kernels
from prefold.engine.sampling import SamplerState, drawing_of
from prefold.spec.requests import Sampling, TokenLogprobs
from prefold.spec.task import FILTERS, filters_of
from prefold.worker.arrays import Arrays
from prefold.worker.native.arrays import NumpyArrays
from prefold.worker.sampler import choose
from prefold.worker.torch.arrays import TorchArrays


def arrays_of(x: torch.Tensor | np.ndarray) -> Arrays:
    """What computes with x."""
    return NumpyArrays(kernels.load()) if isinstance(x, np.ndarray) else TorchArrays(x.device)


class OnlyThese:
    """A matcher that allows some ids."""

    is_done = False

    def __init__(self, ids: list[int], vocab: int = 300):
        self.allowed = np.zeros(vocab, bool)
        self.allowed[ids] = True
        self.accepted: list[int] = []

    def mask(self) -> np.ndarray:
        return np.packbits(self.allowed, bitorder="little")

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@dataclass
class Choice:
    ids: list[int]
    logprobs: list[TokenLogprobs | None]


def choose_for(
    logits: torch.Tensor | np.ndarray,
    states: Sequence[SamplerState],
    rows: Sequence[int] | None = None,
    ahead: Sequence[int] | None = None,
) -> Choice:
    """The next token of each sample; `rows[i]` is the row of states[i], by default i."""
    places = np.arange(len(states)) if rows is None else np.array(rows, np.int64)
    ids, logprobs = choose(arrays_of(logits), logits, places, drawing_of(states, ahead or [0] * len(states)))
    return Choice(ids.tolist(), [logprobs.get(i) for i in range(len(states))])


def draw_for(
    logits: torch.Tensor | np.ndarray, rows: Sequence[int], options: Sequence[Sampling], keys: Sequence[int]
) -> torch.Tensor | np.ndarray:
    """A token drawn from each of `rows` by options alone."""
    filters = np.array([filters_of(one) for one in options], np.float64).reshape(-1, len(FILTERS))
    return arrays_of(logits).draw(logits, np.array(rows, np.int64), filters, np.array(keys, np.uint64))
