"""After which visit each row is read, as a looped model's gate decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowExits", "exit_visits"]


@dataclass(frozen=True, slots=True)
class RowExits:
    """A RowExits says when rows that are read may leave: each a number, or a tensor [rows read].

    threshold  a row leaves after the first visit at which its probability of having left is at least this; at 1 or
               more only after the last one
    fewest     visits that it makes at least
    most       visits that it makes at most; it leaves after the last visit anyway
    """

    threshold: float | Tensor
    fewest: int | Tensor = 1
    most: int | Tensor = 2**31 - 1


def exit_visits(gate: Tensor, exits: RowExits) -> Tensor:
    """Returns the visit that each row leaves after, from 0: int64 [rows].

    gate  float32 [visits, rows]: the logit of leaving after each visit, of a row that has not left before

    The probability of leaving after visit t is l_t times the product of 1 - l over the visits before, where l is the
    gate's sigmoid, and what is left of it after the last visit (Ouro: Zhu et al. 2025).
    """
    visits = len(gate)
    share = torch.sigmoid(gate)
    stays = torch.cumprod(1 - share, 0)
    before = torch.cat((torch.ones_like(stays[:1]), stays[:-1]))
    has_left = torch.cumsum(share * before, 0)
    number = torch.arange(1, visits + 1, device=gate.device)[:, None]
    threshold = torch.as_tensor(exits.threshold, device=gate.device)
    leaves = (has_left >= threshold) & (threshold < 1) & (number >= exits.fewest)
    leaves |= (number >= exits.most) | (number == visits)
    return leaves.to(torch.int64).argmax(0)
