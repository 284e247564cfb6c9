"""A layer's mixture of experts: by PyTorch, which says what it computes, and by our compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import kernels
from ...model.arrays import array_of, tensor_of
from ...model.decoder_layer import Mlp
from ...model.device import TRITON_DTYPES, runs_triton
from ...model.layers import Linear, Weight, linear_weights
from ...model.lora import NO_ADAPTERS, RowAdapters
from ...model.ops import Ops, settled, wide
from ...model.parallel import ALONE, WIDTH_UNIT, Alone, share
from ...model.products import Product, product_kernels, wide_product
from .families import ExpertsConfig

# Rows of matrices that lie so many bytes apart can be multiplied by groups on a GPU.
GROUPED_BYTES = 16
# Of gpt-oss's activation, as in kernels/src/activations.h.
ALPHA, LIMIT = 1.702, 7.0


class ExpertPanels(Product):
    """An ExpertPanels has copies of the matrices of all experts, as `Kernels.pack_experts` lays them. No gradients."""

    def __init__(
        self, weight: Tensor, experts: int, compiled: kernels.Kernels, pool: kernels.PanelPool | None, gated: bool
    ):
        self.compiled = compiled
        self.packed = compiled.pack_experts(array_of(weight.unflatten(0, (experts, -1))), pool, gated=gated)

    def settle(self) -> bool:
        return True


class ExpertLinear(Linear):
    """An ExpertLinear has the weights of one linear of each expert, one below the other: [experts * outputs, inputs],
    and perhaps biases.

    gated: the linear is gate and up
    """

    panels = None

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

    def _packed(self, weight: Tensor, pool: kernels.PanelPool | None) -> Product | None:
        hidden = weight if self.gated else weight.new_empty(0, self.outputs // self.experts)
        compiled = product_kernels(hidden)  # of both linears, or of none
        return ExpertPanels(weight, self.experts, compiled, pool, self.gated) if compiled else None

    def matrices(self) -> Tensor:
        """Returns the weights, [experts, outputs, inputs]."""
        assert self.weight is not None
        return self.weight.unflatten(0, (self.experts, -1))

    @property
    def biases(self) -> Tensor | None:
        """Returns the biases, [experts, outputs]; None: there are none."""
        return None if self.bias is None else self.bias.unflatten(0, (self.experts, -1))


class Experts(nn.Module):
    """An Experts takes each row through some gated MLPs of many: those to which the router gives the largest logits.

    config: with the sizes of this rank's part, a share of each expert's columns; number: of the layer in the model
    """

    def __init__(self, config: ExpertsConfig, number: int, ranks: Alone, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        hidden, width, experts = config.hidden, config.intermediate, config.experts
        self.config, self.sum = config, ranks.sum
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        biases = config.biases
        self.router = Linear(hidden, experts, bias=biases, **place)
        self.gate_up = ExpertLinear(experts, hidden, 2 * width, gated=True, bias=biases, **place)
        # The biases of what is summed over ranks are added once.
        self.down = ExpertLinear(experts, width, hidden, gated=False, bias=biases and ranks.rank == 0, **place)
        self.shared = self.shared_gate = None
        if config.shared:
            unit = WIDTH_UNIT if config.shared >= WIDTH_UNIT * ranks.size else 1
            self.shared_place = share(config.shared, ranks.rank, ranks.size, unit)
            shared_config = replace(config, mlp="gated", intermediate=self.shared_place.stop - self.shared_place.start)
            # Alone: what it gives is summed over ranks together with what the experts give.
            self.shared = Mlp(shared_config, number, ALONE, **place)
            if config.shared_gate:
                self.shared_gate = Linear(hidden, 1, bias=False, **place)

    def forward(self, h: Tensor, adapters: RowAdapters, ops: Ops) -> Tensor:
        """Returns the result of the mixture for h [rows, hidden], shaped as h, summed over all ranks. Adapters add
        nothing."""
        # In float32: rounded logits tie.
        router, weight = self.router.product, self.router.weight
        logits = router.wide(h) if router is not None else wide_product(h, weight)
        if self.router.bias is not None:
            logits = logits + self.router.bias
        if isinstance(self.gate_up.product, ExpertPanels):
            out = self._by_kernels(h, logits)
        else:
            out = self._by_pytorch(h, logits, ops)
        if self.shared is not None:
            beside = self.shared(h, NO_ADAPTERS, ops)
            if self.shared_gate is not None:
                gate = self.shared_gate(h)
                beside = beside * (settled(torch.sigmoid, gate) if self.config.invariant else torch.sigmoid(gate))
            out = out + beside
        return self.sum(out)

    def _by_kernels(self, h: Tensor, logits: Tensor) -> Tensor:
        config, gate_up, down = self.config, self.gate_up.product, self.down.product
        assert isinstance(gate_up, ExpertPanels) and isinstance(down, ExpertPanels)
        out = gate_up.compiled.experts(
            array_of(h), array_of(logits), gate_up.packed, down.packed, chosen=config.chosen,
            normalised=config.normalised, activation="clamped" if config.clamped else config.activation,
            gate_up_bias=array_of(self.gate_up.biases), down_bias=array_of(self.down.biases),
        )  # fmt: skip
        return tensor_of(out)

    def _by_pytorch(self, h: Tensor, logits: Tensor, ops: Ops) -> Tensor:
        """Sorts pairs of a row and an expert by expert, so that each expert's rows are one product with its
        matrices."""
        chosen = self.config.chosen
        top, experts = logits.topk(chosen, -1)
        shares = top.softmax(-1) if self.config.normalised else logits.softmax(-1).gather(-1, experts)
        experts, pairs = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.config.experts, device=h.device), right=True)
        gate_up = grouped(h[pairs // chosen], self.gate_up.matrices(), ends)
        if self.gate_up.biases is not None:
            gate_up = gate_up + self.gate_up.biases[experts]
        inner = clamped(gate_up) if self.config.clamped else ops.gate(gate_up, self.config.activation)
        results = grouped(inner, self.down.matrices(), ends)
        if self.down.biases is not None:
            results = results + self.down.biases[experts]
        outputs = results[pairs.argsort()].unflatten(0, (-1, chosen))  # in the order of each row's own experts
        return (wide(outputs) * shares[..., None]).sum(1).to(h.dtype)

    def weights(self, prefix: str, places: Mapping[str, tuple[slice, ...]]) -> Iterator[Weight]:
        """Yields the parameters with the names of their tensors, as `Mlp.weights` does."""
        config, mlp = self.config, prefix + "mlp."
        numbers = range(config.experts)
        yield from linear_weights(self.router, (mlp + "gate", config.experts))
        halves = [(f"{mlp}experts.{n}.{half}_proj", config.intermediate) for n in numbers for half in ("gate", "up")]
        yield from linear_weights(self.gate_up, *halves, places=places)
        downs = [(f"{mlp}experts.{n}.down_proj", config.hidden) for n in numbers]
        yield from linear_weights(self.down, *downs, places=places)
        if self.shared is not None:
            part = self.shared_place
            of_shared = {"gate_proj": (part,), "up_proj": (part,), "down_proj": (slice(None), part)} if places else {}
            for weight in self.shared.weights(prefix, of_shared):
                parts = tuple((name.replace("mlp.", "mlp.shared_expert."), rows) for name, rows in weight.parts)
                yield replace(weight, parts=parts)
        if self.shared_gate is not None:
            yield from linear_weights(self.shared_gate, (mlp + "shared_expert_gate", 1))


def clamped(gate_up: Tensor) -> Tensor:
    """Returns what an expert of gpt-oss goes on with, of gate_up [rows, 2 * width]: [rows, width]."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (1 + up.clamp(-LIMIT, LIMIT))


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns the product of rows x [rows, inputs] with matrices [experts, outputs, inputs]: [rows, outputs]. ends:
    int64 [experts], where the rows of each end, which lie one behind the other.

    On a GPU nothing waits for `ends`, but for gradients and float64: PyTorch's own fallback would, too.
    """
    apart = (matrices.shape[1] * x.itemsize, matrices.shape[2] * x.itemsize)
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(size % GROUPED_BYTES for size in apart):
        return F.grouped_mm(x, matrices.transpose(1, 2), offs=ends.int())
    if runs_triton(x.device) and x.dtype in TRITON_DTYPES and not torch.is_grad_enabled():
        from .grouped_triton import grouped as by_triton

        return by_triton(x, matrices, ends)
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(parts, matrices, strict=True)])
