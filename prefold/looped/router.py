"""The router of a looped model: which block comes next, read from states; and the planner, which says it beforehand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import Linear
from .config import LoopedConfig
from .loop import Routing


class Router(nn.Module):
    """A Router gives the logits of each block and of leaving before a visit, from a summary of the states so far.

    Its numbers are float32: two linears with SiLU between them, and a vector for each visit that is added between.
    """

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
    """A Planner gives what a Router gives before each visit, all at once, from the states before the first one: from
    what the embedding and the prelude make of a prompt."""

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
    """Returns what a router reads, float32 [n, inputs]: each state over its root mean square.

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
    """Returns the weight of what each block gives, and of the state as it was, float32 [n, blocks + 1]; they sum to 1.

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
