"""A layer's mixture of experts, executed with tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import kernels
from ...model.program import Experts
from .device import TRITON_DTYPES, runs_triton
from .layers import Linear
from .operations import Execution, Place, Rows
from .ops import ACTIVATIONS, Ops, wide
from .products import wide_product

# grouped_mm on a GPU needs rows of matrices at multiples of this many bytes.
GROUPED_BYTES = 16
# Constants of gpt-oss's activation, as in kernels/src/activations.h.
ALPHA, LIMIT = 1.702, 7.0


class ExpertLinear(Linear):
    """One linear of every expert: weights stacked as [experts * outputs, inputs], maybe with biases.

    Args:
        gated: The linear is gate and up side by side.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        gated: bool,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(inputs, experts * outputs, bias=bias, dtype=dtype, device=device)
        self.experts, self.gated = experts, gated

    def pack(self, pool: kernels.PanelPool | None = None) -> None:
        """Do nothing: no packed product supports the matrices of several experts."""

    def matrices(self) -> Tensor:
        """Return the weights, [experts, outputs, inputs]."""
        assert self.weight is not None
        return self.weight.unflatten(0, (self.experts, -1))

    @property
    def biases(self) -> Tensor | None:
        """Return the biases, [experts, outputs], or None."""
        return None if self.bias is None else self.bias.unflatten(0, (self.experts, -1))


class ExpertWeights(nn.Module):
    """The weights of a mixture: the router, one linear with gate and up of all experts, and one with down."""

    def __init__(self, operation: Experts, place: Place):
        super().__init__()
        hidden, experts = operation.router.inputs[0], operation.experts
        options: dict[str, Any] = {"dtype": place.dtype, "device": place.device}
        (width,), (inputs,) = operation.down.inputs, operation.gate_up.inputs
        self.router = Linear(hidden, experts, bias=operation.router_bias is not None, **options)
        biased = operation.gate_up_bias is not None
        outputs = 2 * width if operation.gated else width
        self.gate_up = ExpertLinear(experts, inputs, outputs, gated=operation.gated, bias=biased, **options)
        # If ranks sum their results, only rank 0 adds the bias.
        biased = operation.down_bias is not None and place.ranks.rank == 0
        self.down = ExpertLinear(experts, width, inputs, gated=False, bias=biased, **options)
        self.correction = None if operation.correction is None else place.empty(operation.correction)
        self.scales = None if operation.scales is None else place.empty(operation.scales)


def experts(operation: Experts, weights: ExpertWeights, rows: Rows) -> None:
    """Run each row through the experts with its largest router scores."""
    h = rows.get(operation.source)
    read = h if operation.by is None else rows.get(operation.by)
    # In float32, because rounded logits tie.
    router, weight = weights.router.product, weights.router.weight
    logits = router.wide(read) if router is not None else wide_product(read, weight)
    if weights.router.bias is not None:
        logits = logits + weights.router.bias
    out = through_experts(operation, weights, h, logits, rows.ops)
    rows.put(operation.out, rows.ranks.sum(out) if operation.summed else out)


def choose_experts(operation: Experts, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each row's experts, [rows, chosen] each, largest first.

    Args:
        logits: float32 [rows, experts].
    """
    if operation.score == "sparsemixer":
        return mix_sparsely(operation, logits)
    scores = logits.sigmoid() if operation.score == "sigmoid" else logits.softmax(-1)
    # Without a correction, choosing by logits avoids the rounding of scores.
    keys = logits if correction is None else (logits if operation.corrects_logits else scores) + correction
    if operation.groups > 1:
        keys = scores if correction is None else keys
        of_groups = keys.unflatten(-1, (operation.groups, -1))
        best = of_groups.topk(min(operation.group_best, of_groups.shape[-1]), -1)[0].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(operation.chosen_groups, -1)[1], True)
        keys = of_groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = keys.topk(operation.chosen, -1)[1]
    if operation.score == "softmax" and operation.normalised and not operation.least_sum:
        return logits.gather(-1, experts).softmax(-1) * operation.scale, experts
    weights = scores.gather(-1, experts)
    if operation.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=operation.least_sum)
    return weights * operation.scale, experts


def mix_sparsely(operation: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each row's experts, by the "sparsemixer" router."""
    experts = logits.topk(operation.chosen, -1)[1]
    left, weights = logits, []
    for choice in experts.split(1, -1):
        top = logits.gather(-1, choice)
        is_far = (top - logits) / torch.maximum(logits.abs(), top) > operation.tolerance
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, choice))
        left = left.scatter(-1, choice, -torch.inf)
    return torch.cat(weights, -1) * operation.scale, experts


def through_experts(operation: Experts, weights: ExpertWeights, h: Tensor, logits: Tensor, ops: Ops) -> Tensor:
    """Run rows through their experts. Pairs of row and expert are sorted: one product per expert and matrix."""
    chosen = operation.chosen
    shares, experts = choose_experts(operation, logits, weights.correction)
    if weights.scales is not None:
        shares = shares * weights.scales[experts]
    experts, pairs = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(operation.experts, device=h.device), right=True)
    gate_up = grouped(h[pairs // chosen], weights.gate_up.matrices(), ends)
    if weights.gate_up.biases is not None:
        gate_up = gate_up + weights.gate_up.biases[experts]
    inner = activated(operation, gate_up, ops)
    results = grouped(inner, weights.down.matrices(), ends)
    if weights.down.biases is not None:
        results = results + weights.down.biases[experts]
    outputs = results[pairs.argsort()].unflatten(0, (-1, chosen))  # back in the order of rows and their choices
    return (wide(outputs) * shares[..., None]).sum(1).to(h.dtype)


NAMES = {
    f"{field}{suffix}": f"{field}.{suffix.removeprefix('_') or 'weight'}"
    for field in ("router", "gate_up", "down")
    for suffix in ("", "_bias")
}
EXECUTION = Execution(experts, ExpertWeights, NAMES)


def activated(operation: Experts, gate_up: Tensor, ops: Ops) -> Tensor:
    """Return the input of the down linear, [rows, width]."""
    if operation.activation == "clamped":
        return clamped(gate_up)
    return ops.gate(gate_up, operation.activation) if operation.gated else ACTIVATIONS[operation.activation](gate_up)


def clamped(gate_up: Tensor) -> Tensor:
    """Return gpt-oss's activation of gate_up [rows, 2 * width]: [rows, width]."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (1 + up.clamp(-LIMIT, LIMIT))


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows of x [rows, inputs] with its matrix: [rows, outputs].

    Args:
        matrices: [experts, outputs, inputs].
        ends: int64 [experts], one past each expert's last row, since x is sorted by expert. On a GPU the host does not
            wait for `ends`, except for gradients and float64.
    """
    apart = (matrices.shape[1] * x.itemsize, matrices.shape[2] * x.itemsize)
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(size % GROUPED_BYTES for size in apart):
        return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends.int())
    if runs_triton(x.device) and x.dtype in TRITON_DTYPES and not torch.is_grad_enabled():
        from .grouped_triton import grouped as by_triton

        return by_triton(x, matrices, ends)
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(parts, matrices, strict=True)])
