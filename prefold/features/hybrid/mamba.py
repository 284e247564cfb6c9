"""Mamba-2, the recurrent layers of Granite 4 (Dao and Gu 2024, "Transformers are SSMs").

A row decays the state S [state size, head dim] of a head, and adds its numbers x with the key b to it:

    S = exp(decay) S + step b x^T;  y = S^T c
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...model.layers import Weight
from ...model.lora import RowAdapters
from ...model.ops import Ops
from .carry import Group, LayerStates
from .config import HybridConfig
from .delta import CHUNK, power
from .layers import Mixer


class Mamba2(Mixer):
    """A Mamba2 is a mixer of state spaces: x, keys b and queries c go through a short convolution; heads of one group
    share b and c. Source: modeling_granitemoehybrid.py of transformers."""

    def __init__(self, config: HybridConfig, number: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__(config, number, dtype=dtype, device=device)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        sizes = config.sizes
        self.heads, self.groups, self.inner = sizes["heads"], sizes["groups"], sizes["heads"] * sizes["dim"]
        channels = self.inner + 2 * self.groups * sizes["state"]
        self.taps = nn.Parameter(torch.empty(channels, 1, sizes["taps"], **place))
        self.conv_bias = nn.Parameter(torch.empty(channels, **place)) if sizes["conv_bias"] else None
        self.dt_bias, self.a_log, self.d = (nn.Parameter(torch.empty(self.heads, **place)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(self.inner, **place))

    def forward(self, h: Tensor, states: LayerStates, read: Tensor | None, adapters: RowAdapters, ops: Ops) -> Tensor:
        gate, xbc, dt = self.linear("in_proj", h, adapters).split([self.inner, len(self.taps), self.heads], -1)
        xbc = F.silu(states.conv(0, xbc, self.taps[:, 0], self.conv_bias))
        step = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.config.sizes["limits"])
        carry = states.carry
        # x of rows that prompts share lies at each of them from here on, where a step is folded.
        parts = carry.unfold(xbc).float().split([self.inner, *[(len(self.taps) - self.inner) // 2] * 2], -1)
        numbers = self.heads, self.groups, self.groups
        x, b, c = (part.unflatten(-1, (number, -1)) for part, number in zip(parts, numbers, strict=True))
        step = carry.unfold(step)
        decay = -self.a_log.float().exp() * step

        def scan(start: Tensor, group: Group) -> tuple[Tensor, Tensor]:
            by_runs = group.pick
            y, end = state_space(by_runs(c), by_runs(b), by_runs(x), by_runs(decay), by_runs(step), start)
            return y.flatten(2), end

        y = states.scan(1, scan, self.inner, torch.float32)
        y = y + (carry.fold(x) * self.d.float()[:, None]).flatten(1)
        if read is not None:
            y, gate, adapters = y[read], gate[read], adapters.read
        y = (y.to(h.dtype).float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.norm_eps)).flatten(1)
        return self.linear("out_proj", self.norm * y.to(h.dtype), adapters)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from super().weights(prefix)
        names = {"taps": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_bias", "a_log": "A_log", "d": "D"}
        for attribute, name in (names | {"norm": "norm.weight"}).items():
            if (parameter := getattr(self, attribute)) is not None:
                yield Weight(self, attribute, ((f"{prefix}mamba.{name}", len(parameter)),))


def state_space(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, step: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y [runs, rows, heads, head dim], and the states at the ends of the runs, in chunks.

    c, b         float32 [runs, rows, groups, state size]: each group is that of some neighbouring heads
    x            float32 [runs, rows, heads, head dim]
    decay, step  float32 [runs, rows, heads]: decay is 0 at most. Rows of zeros change nothing
    start        float32 [runs, heads, state size, head dim]
    """
    runs, rows, heads = x.shape[:3]
    c, b = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (c, b))
    # A matrix for each run and head.
    c, b, x, decay, step = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (c, b, x, decay, step))
    out, state = torch.empty_like(x), start.flatten(0, 1)
    for first in range(0, rows, CHUNK):
        chunk = slice(first, first + CHUNK)
        total = decay[:, chunk].cumsum(1)
        inner = torch.bmm(c[:, chunk], b[:, chunk].mT) * power(total[:, :, None] - total[:, None, :]).tril_()
        out[:, chunk] = torch.bmm(c[:, chunk], state) * power(total)[..., None]
        out[:, chunk] += torch.bmm(inner * step[:, None, chunk], x[:, chunk])
        remaining = power(total[:, -1:] - total) * step[:, chunk]
        state = state * power(total[:, -1:])[..., None] + torch.bmm(
            (b[:, chunk] * remaining[..., None]).mT, x[:, chunk]
        )
    return out.unflatten(0, (runs, heads)).transpose(1, 2), state.unflatten(0, (runs, heads))
