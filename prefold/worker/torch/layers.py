"""Norms and linears, and the checkpoint's names of their parameters."""

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
    """The sum x + delta [rows, size], and the norm of the sum.

    Args:
        kind: As in `program.Norm`.
    """

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
        """Allocate the parameters.

        Args:
            weight, bias: Create one.
            factor: Multiplies the weight.
        """
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
    """A product of x [rows, inputs] with a weight: [rows, outputs].

    Attributes:
        weight: A parameter [outputs, inputs]. None once a product holds a packed copy.
        bias: A parameter [outputs], or of the first outputs only, or None.
        product: The product that replaces PyTorch's, set by `use`, or None.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool | int, dtype: torch.dtype, device: torch.device):
        """Allocate the parameters.

        Args:
            bias: True for all outputs, or the number of outputs that have one.
        """
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        biased = outputs if bias is True else int(bias)
        self._unbiased = outputs - biased if biased else 0
        self.weight: Tensor | None = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(biased, dtype=dtype, device=device)) if biased else None
        self.product: Product | None = None

    def use(self, product: Product) -> None:
        """Multiply with `product` from now on, and free the weight."""
        self.product, self.weight = product, None

    def pack(self, pool: kernels.PanelPool | None = None) -> None:
        """Replace the weight by a packed copy if that is faster. It computes the same products, without gradients.

        Args:
            pool: Allocates the memory of prefold's own layout.
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
        """Return the bias padded to all outputs, [outputs], or None."""
        return F.pad(self.bias, (0, self._unbiased)) if self._unbiased else self.bias

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.outputs}{f', {type(self.product).__name__}' if self.product else ''}"


class ActivatedLinear(Linear):
    """The first linear of an MLP without a gate (up): x [rows, inputs] -> [rows, width]."""

    parts = 1  # number of linears of `width` outputs each, side by side

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
        """Return activation(up); up [rows, width]."""
        return ACTIVATIONS[self.activation](up)

    def activated(self, x: Tensor, ops: Ops) -> Tensor:
        """Return activation(up) for x [rows, inputs]: [rows, width]."""
        return self.activate(self(x), ops)


class GatedLinear(ActivatedLinear):
    """The first two linears of a gated MLP, gate and up, side by side: x [rows, inputs] -> [rows, 2 * width]."""

    parts = 2

    def activate(self, gate_up: Tensor, ops: Ops) -> Tensor:
        """Return activation(gate_scale * gate) * up for gate_up [rows, 2 * width]: [rows, width]."""
        if self.gate_scale != 1:
            gate, up = gate_up.chunk(2, -1)
            gate_up = torch.cat((self.gate_scale * gate, up), -1)
        return ops.gate(gate_up, self.activation)

    def activated(self, x: Tensor, ops: Ops) -> Tensor:
        """Return activation(gate_scale * gate) * up for x [rows, inputs]: [rows, width]."""
        if self.product is not None and self.gate_scale == 1:
            out = self.product.gated(x, self.bias, self.activation)
            if out is not None:
                return out
        return self.activate(self(x), ops)

    def _packed(self, weight: Tensor, pool: kernels.PanelPool | None) -> Product | None:
        return pack(weight, pool, gated=True)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A parameter of the model, and the tensors of the checkpoint that are stacked in it."""

    owner: nn.Module
    attribute: str
    parts: tuple[tuple[str, int], ...]  # the name and the number of rows of each tensor
    offset: float = 0.0  # added to the checkpoint's values
    places: tuple[tuple[slice, ...], ...] = ()  # the part of each tensor that this rank holds; empty: everything

    @property
    def parameter(self) -> Tensor:
        return getattr(self.owner, self.attribute)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, *self.parameter.shape[1:]) for name, rows in self.parts}


def recomputed(
    visit: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, kept: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the residual stream [rows, hidden] and the kept buffers after a visit, with activation checkpointing.

    The backward pass recomputes the visit, so only its input stays in memory (Chen et al. 2016).
    """

    def whole(x: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        after = dict(zip(kept, buffers, strict=True))
        x, delta = visit(x, None, kept=after)
        return (x if delta is None else x + delta, *after.values())

    x, *buffers = checkpoint(whole, x, *kept.values(), use_reentrant=False, preserve_rng_state=False)
    return x, dict(zip(kept, buffers, strict=True))
