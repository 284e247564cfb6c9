"""Whether a row of a looped model leaves after a visit: its gate, and what requests ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.layers import Linear
from ..model.ops import entropy
from ..types import Exits
from .loop import GATE_FEATURES


@dataclass(frozen=True, slots=True)
class Seen:
    """A Seen is what a gate must know of rows after the visit before.

    hidden  [rows, hidden]: their states as they were read
    likely  int64 [rows]: the token that was the likeliest
    """

    hidden: Tensor
    likely: Tensor


class Gate(Linear):
    """A Gate gives the logit of a row's leaving after a visit, in float32.

    reads  "state": the state as it is read after the visit. "features": of the tokens that the state gives, the largest
           probability; whether the likeliest is that of the visit before; their entropy over the vocabulary's largest;
           and the cosine between the state and that of the visit before. After the first visit the second and the
           last are 0
    """

    def __init__(self, hidden: int, reads: Literal["state", "features"], *, device: torch.device):
        inputs = hidden if reads == "state" else GATE_FEATURES
        super().__init__(inputs, 1, bias=True, dtype=torch.float32, device=device)
        self.reads = reads

    def features(
        self, hidden: Tensor, logits: Tensor, before: Seen | None, first: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        """Returns the four features, float32 [rows, 4], and what the gate must know after the next visit.

        hidden  [rows, hidden] as it is read after the visit; logits: float32 [rows, vocabulary] of it
        before  that of the visit before; None after the first
        first   bool [rows]: whose visit is the first, so that nothing is known of the one before; None: nobody's

        They have no gradients: a gate learns what the model says, and not the model to please its gate.
        """
        hidden, logits = hidden.detach(), logits.detach()
        sums, likely, spread = entropy(logits)
        features = logits.new_zeros(len(logits), GATE_FEATURES)
        features[:, 0] = (logits.gather(-1, likely[:, None])[:, 0] - sums).exp()
        features[:, 2] = spread / math.log(logits.shape[-1])
        if before is not None:
            features[:, 1] = likely == before.likely
            features[:, 3] = F.cosine_similarity(hidden.float(), before.hidden.float(), dim=-1)
            if first is not None:
                features[:, 1::2].masked_fill_(first[:, None], 0.0)
        return features, Seen(hidden, likely)


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
