"""Where rows of a looped model go after a visit: a gate says whether a row leaves, a router which block comes next.

A planner computes beforehand the logits that a router computes visit by visit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...model.layers import Linear
from ...model.ops import entropy
from ...spec.requests import Exits
from .config import GATE_FEATURES, LoopedConfig, Routing
from .steps import exits_row


@dataclass(frozen=True, slots=True)
class VisitOutputs:
    """A VisitOutputs holds the outputs of the previous visit that a gate compares with those of the next.

    hidden  [rows, hidden]: the states as they were read
    likely  int64 [rows]: the likeliest token of each row
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

    varies = "gates and routers of looped models"

    def __init__(self, hidden: int, reads: Literal["state", "features"], *, device: torch.device):
        inputs = hidden if reads == "state" else GATE_FEATURES
        super().__init__(inputs, 1, bias=True, dtype=torch.float32, device=device)
        self.reads = reads

    def features(self, hidden: Tensor, logits: Tensor, before: VisitOutputs | None) -> tuple[Tensor, VisitOutputs]:
        """Returns the four features, float32 [rows, 4], and the VisitOutputs of this visit for the next call.

        hidden  [rows, hidden] as it is read after the visit; logits: float32 [rows, vocabulary] of it
        before  the VisitOutputs of the visit before; None after the first

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
        return features, VisitOutputs(hidden, likely)


@dataclass(frozen=True, slots=True)
class RowExits:
    """When rows of a row stream are read: each of these is a number, or a tensor [rows].

    threshold  a row leaves after the first visit at which its probability of having left is at least this; at 1 only
               after the last one; nan: as the model's config says
    fewest     visits that it makes at least
    most       visits that it makes at most; it leaves after the last visit anyway
    """

    threshold: float | Tensor = float("nan")
    fewest: float | Tensor = 1
    most: float | Tensor = float("inf")

    @classmethod
    def of(cls, exits: Exits) -> RowExits:
        """Returns the same exits for all rows that are read."""
        threshold, fewest, most = exits_row(exits)
        return cls(math.nan if threshold is None else threshold, fewest, most)


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


class Router(nn.Module):
    """A Router gives the logits of each block and of leaving before a visit, from a summary of the states so far.

    Its numbers are float32: two linears with SiLU between them, and a vector for each visit that is added between.
    """

    varies = "gates and routers of looped models"

    def __init__(self, config: LoopedConfig, *, device: torch.device):
        super().__init__()
        assert config.loop.router is not None
        self.blocks, inputs = config.loop.blocks, 2 if config.loop.router.reads == "request" else 1
        self.inner = _linear(inputs * config.hidden, config.hidden, device)
        self.step = nn.Parameter(torch.empty(len(config.loop.order), config.hidden, device=device))
        self.outer = _linear(config.hidden, self.blocks + 1, device)

    def forward(self, states: Tensor, visit: int | Tensor) -> Tensor:
        """Returns float32 logits [n, blocks + 1], that of leaving last; it is -inf before the first visit.

        states  float32 [n, inputs], see `summary`
        visit   the number of the visit that is to come, from 0: of all, or int64 [n]
        """
        logits = self.outer(F.silu(self.inner(states) + self.step[visit]))
        first = torch.as_tensor(visit == 0, device=logits.device).expand(len(logits))
        return torch.cat((logits[:, :-1], logits[:, -1:].masked_fill(first[:, None], -torch.inf)), -1)


class Planner(nn.Module):
    """A Planner computes the logits of all visits at once, where a Router computes them visit by visit. It reads the
    states of a prompt before the first visit: the output of the embedding and the prelude."""

    varies = "gates and routers of looped models"

    def __init__(self, config: LoopedConfig, *, device: torch.device):
        super().__init__()
        self.blocks, self.visits = config.loop.blocks, len(config.loop.order)
        self.inner = _linear(2 * config.hidden, config.hidden, device)
        self.outer = _linear(config.hidden, self.visits * (self.blocks + 1), device)

    def forward(self, states: Tensor) -> Tensor:
        """Returns float32 logits [visits, n, blocks + 1]; states: float32 [n, 2 * hidden], see `summary`."""
        logits = self.outer(F.silu(self.inner(states))).unflatten(-1, (self.visits, self.blocks + 1)).movedim(1, 0)
        first = torch.zeros_like(logits, dtype=torch.bool)
        first[0, :, -1] = True
        return logits.masked_fill(first, -torch.inf)


def summary(last: Tensor, mean: Tensor | None = None) -> Tensor:
    """Returns the input of a router, float32 [n, inputs]: each state divided by its root mean square.

    last  [n, hidden]: the residual stream of each request's last prompt row, or of each row
    mean  [n, hidden]: the mean of the residual stream over each request's prompt rows; None: the router reads rows
    """
    states = (last,) if mean is None else (mean, last)
    return torch.cat([F.rms_norm(state.float(), state.shape[-1:], eps=1e-6) for state in states], -1)


def choose(logits: Tensor, threshold: float | Tensor) -> Tensor:
    """Returns the number of the likeliest block, or of blocks where there are no more visits: int64 [n].

    logits     float32 [n, blocks + 1]. Of blocks that are as likely the first is chosen
    threshold  there are no more visits where the probability of leaving is at least this; a number, or a tensor [n]
    """
    leaves = torch.softmax(logits, -1)[:, -1] >= threshold
    return torch.where(leaves, logits.shape[-1] - 1, logits[:, :-1].argmax(-1))


def mixture(logits: Tensor, routing: Routing) -> Tensor:
    """Returns the weights of each block's output and of the unchanged state, float32 [n, blocks + 1]; they sum to 1.

    logits  float32 [n, blocks + 1]
    """
    if routing.kind == "soft":
        return torch.softmax(logits, -1)
    blocks = logits.shape[-1] - 1
    picked = F.one_hot(choose(logits, routing.threshold), blocks + 1).to(logits.dtype)
    if routing.kind != "top":
        return picked
    best = logits[:, :-1].topk(min(routing.top, blocks), -1)
    shares = torch.zeros_like(logits).scatter(-1, best.indices, torch.softmax(best.values, -1))
    return torch.where(picked[:, -1:] > 0, picked, shares)


def _linear(inputs: int, outputs: int, device: torch.device) -> Linear:
    return Linear(inputs, outputs, bias=True, dtype=torch.float32, device=device)
