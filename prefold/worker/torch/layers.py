"""The residual stream's norm, linears, and what checkpoints call their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ... import kernels
from .ops import ACTIVATIONS, Ops, wide
from .products import Product, pack


class Norm(nn.Module):
    """A Norm gives x + delta [rows, size], and the norm of that. kind: as of `program.Norm`"""

    def __init__(
        self,
        size: int,
        *,
        bias: bool,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        kind: str = "rms",
        weight: bool = True,
        factor: float = 1.0,
    ):
        """Make the parameters. weight, bias: whether there is one; factor: what every number is multiplied with too"""
        super().__init__()
        self.kind, self.eps, self.factor = kind, eps, factor
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device)) if weight else None
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor, delta: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        weight = x.new_ones(x.shape[-1]) if self.weight is None else self.weight
        if self.factor != 1:
            weight = wide(weight) * self.factor
        if self.kind != "layer":
            return ops.add_rms_norm(x, delta, weight, self.eps)
        return ops.add_layer_norm(x, delta, weight, self.bias, self.eps)


class Linear(nn.Module):
    """A Linear gives x [rows, inputs] times its weight: [rows, outputs].

    weight   a parameter [outputs, inputs]; None once a product has it in a form of its own
    bias     a parameter [outputs], or None; or shorter: of the first outputs
    product  what multiplies in place of PyTorch, or None: put there by `use`
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool | int, dtype: torch.dtype, device: torch.device):
        """Makes the parameters. bias: whether there is one, or of how many outputs."""
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        biased = outputs if bias is True else int(bias)
        self._unbiased = outputs - biased if biased else 0
        self.weight: Tensor | None = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(biased, dtype=dtype, device=device)) if biased else None
        self.product: Product | None = None

    def use(self, product: Product) -> None:
        """Multiplies with `product` from now on, and frees the weight."""
        self.product, self.weight = product, None

    def pack(self, pool: kernels.PanelPool | None = None) -> None:
        """Replaces the weight by a packed copy where that is faster: the same products and sums, but no gradients.

        pool: where the memory of our own layout comes from.
        """
        if self.weight is not None and (product := self._packed(self.weight, pool)):
            self.use(product)

    def _packed(self, weight: Tensor, pool: kernels.PanelPool | None) -> Product | None:
        return pack(weight, pool)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(x, self.whole_bias)
        return F.linear(x, self.weight, self.whole_bias)

    @property
    def whole_bias(self) -> Tensor | None:
        """Returns the bias of all outputs, [outputs]; None where there is none."""
        return F.pad(self.bias, (0, self._unbiased)) if self._unbiased else self.bias

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.outputs}{f', {type(self.product).__name__}' if self.product else ''}"


class ActivatedLinear(Linear):
    """An ActivatedLinear is the linear that an MLP without a gate begins with, up: x [rows, inputs] -> [rows,
    width]."""

    parts = 1  # linears of `width` outputs each, side by side

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gate_scale: float = 1.0,
    ):
        super().__init__(inputs, self.parts * width, bias=bias, dtype=dtype, device=device)
        self.activation, self.gate_scale = activation, gate_scale

    def activate(self, up: Tensor, ops: Ops) -> Tensor:
        """Returns activation(up), shaped as up [rows, width]."""
        return ACTIVATIONS[self.activation](up)

    def activated(self, x: Tensor, ops: Ops) -> Tensor:
        """Returns activation(up) of x [rows, inputs]: [rows, width]."""
        return self.activate(self(x), ops)


class GatedLinear(ActivatedLinear):
    """A GatedLinear is the two linears of a gated MLP, gate and up, side by side: x [rows, inputs] -> [rows, 2 *
    width]."""

    parts = 2

    def activate(self, gate_up: Tensor, ops: Ops) -> Tensor:
        """Returns activation(gate_scale * gate) * up of gate_up [rows, 2 * width]: [rows, width]."""
        if self.gate_scale != 1:
            gate, up = gate_up.chunk(2, -1)
            gate_up = torch.cat((self.gate_scale * gate, up), -1)
        return ops.gate(gate_up, self.activation)

    def activated(self, x: Tensor, ops: Ops) -> Tensor:
        """Returns activation(gate_scale * gate) * up of x [rows, inputs]: [rows, width]."""
        if self.product is not None and self.gate_scale == 1:
            out = self.product.gated(x, self.bias, self.activation)
            if out is not None:
                return out
        return self.activate(self(x), ops)

    def _packed(self, weight: Tensor, pool: kernels.PanelPool | None) -> Product | None:
        return pack(weight, pool, gated=True)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A HeldWeight is a parameter of the model, and the checkpoint's tensors that are stacked in it, with their rows.

    offset  what is added to the checkpoint's numbers
    places  which part of each tensor this rank holds; empty: all of all
    """

    owner: nn.Module
    attribute: str
    parts: tuple[tuple[str, int], ...]
    offset: float = 0.0
    places: tuple[tuple[slice, ...], ...] = ()

    @property
    def parameter(self) -> Tensor:
        return getattr(self.owner, self.attribute)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, *self.parameter.shape[1:]) for name, rows in self.parts}


def recomputed(
    visit: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, kept: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the residual stream [rows, hidden] and further buffers after a visit, which is computed again in the
    backward pass: only what it began with is held for it (Chen et al. 2016)."""

    def whole(x: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        after = dict(zip(kept, buffers, strict=True))
        x, delta = visit(x, None, kept=after)
        return (x if delta is None else x + delta, *after.values())

    x, *buffers = checkpoint(whole, x, *kept.values(), use_reentrant=False, preserve_rng_state=False)
    return x, dict(zip(kept, buffers, strict=True))
