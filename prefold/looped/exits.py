"""After which visit each row is read, as a looped model's gate decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Exits


@dataclass(frozen=True, slots=True)
class RowExits:
    """A RowExits says when rows that are read may leave: each of the first three is a number, or a tensor [reads].

    threshold  a row leaves after the first visit at which its probability of having left is at least this; at 1 only
               after the last one; nan: as the model's config says
    fewest     visits that it makes at least
    most       visits that it makes at most; it leaves after the last visit anyway
    rows       int64 [reads]: which of the rows that are read each read is of; None: each row is read once
    """

    threshold: float | Tensor = float("nan")
    fewest: float | Tensor = 1
    most: float | Tensor = float("inf")
    rows: Tensor | None = None

    @classmethod
    def of(cls, exits: Exits) -> RowExits:
        """Returns the same exits for all rows that are read."""
        threshold = float("nan") if exits.threshold is None else exits.threshold
        return cls(threshold, exits.min_visits, float("inf") if exits.max_visits is None else exits.max_visits)


def visits_at_exit(gate: Tensor, exits: RowExits, default: float = 1.0) -> Tensor:
    """Returns the visit that each read's row leaves after, from 0: int64 [reads].

    gate     float32 [visits, reads]: the logit of leaving after each visit, of a row that has not left before
    default  the threshold where `exits` has none

    The probability of leaving after visit t is l_t times the product of 1 - l over the visits before, where l is the
    gate's sigmoid, and what is left of it after the last visit (Ouro: Zhu et al. 2025).
    """
    visits = len(gate)
    share = torch.sigmoid(gate)
    stays = torch.cumprod(1 - share, 0)
    before = torch.cat((torch.ones_like(stays[:1]), stays[:-1]))
    has_left = torch.cumsum(share * before, 0)
    number = torch.arange(1, visits + 1, device=gate.device)[:, None]
    threshold = exits.threshold
    if not isinstance(threshold, Tensor):  # filled on the device: a copy would wait for it, and breaks off a capture
        threshold = torch.full((), threshold, device=gate.device)
    threshold = torch.where(threshold.isnan(), default, threshold)
    leaves = (has_left >= threshold) & (threshold < 1) & (number >= exits.fewest)
    leaves |= (number >= exits.most) | (number == visits)
    return leaves.to(torch.int64).argmax(0)
