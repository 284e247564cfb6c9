"""The gate of a looped model: whether a row leaves after a visit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.layers import Linear
from ..model.ops import entropy
from .loop import GATE_FEATURES


@dataclass(frozen=True, slots=True)
class Seen:
    """A Seen is what a gate must know of rows after the visit before.

    hidden  [rows, hidden]: their states as they were read
    likely  int64 [rows]: the token that was the likeliest
    """

    hidden: Tensor
    likely: Tensor

    def take(self, rows: Tensor) -> Seen:
        """Returns that of some rows, int64 [r]."""
        return Seen(self.hidden[rows], self.likely[rows])


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
