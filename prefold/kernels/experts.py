"""Mixtures of experts: one call takes rows through the experts of a layer that a router's logits choose."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional as F

from .abi import ExpertsCall
from .interface import Family
from .products import COLUMNS, PanelPool, fill_words

LANES = 16  # columns of gate, or of up, that lie side by side


def pack_experts(weight: Tensor, pool: PanelPool | None = None, *, gated: bool) -> Tensor:
    """Returns the matrices of experts packed one behind the other, int32 [experts, panels, words along k, 32].

    weight: [experts, 2 * width, hidden], gate before up, where `gated`; else [experts, hidden, width]. Widths are
    filled up with zeros to whole LANES.
    """
    experts, outputs, inputs = weight.shape
    fill = -(outputs // 2 if gated else inputs) % LANES
    shape = (2 * (outputs // 2 + fill), inputs) if gated else (outputs, inputs + fill)
    words = shape[1] * weight.itemsize // 4
    packed = (pool or PanelPool()).take((experts, -(-shape[0] // COLUMNS), words, COLUMNS))
    for panels, matrix in zip(packed, weight.detach(), strict=True):
        fill_words(panels, _gate_in_turn(matrix, fill) if gated else F.pad(matrix, (0, fill)))
    return packed


def _gate_in_turn(columns: Tensor, fill: int) -> Tensor:
    """Returns rows of gate, then of up, each filled up with so many zeros, with LANES of each in turn."""
    halves = F.pad(columns.unflatten(0, (2, -1)), (0, 0, 0, fill))
    return halves.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)


class ExpertKernels(Family):
    """Takes rows through experts whose matrices `pack_experts` has packed. All is of one dtype, on the CPU."""

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        chosen: int,
        normalised: bool,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Returns the weighed sum of what each row's experts give, [rows, hidden].

        x            [rows, hidden]; logits: float32 [rows, experts], of the router
        chosen       each row goes through so many experts, those of its largest logits
        normalised   whether their shares are the softmax of these logits; else of all
        activation   "silu", "gelu_tanh", or "clamped": that of gpt-oss
        gate_up_bias, down_bias  [experts, 2 * an expert's width], gate before up, and [experts, hidden], of x's dtype

        Raises ValueError where sizes do not fit or there is no such kernel.
        """
        function, (rows, hidden) = self._calls.get(("experts", activation, x.dtype)), x.shape
        experts, panels, words, _ = gate_up.shape
        width = panels * COLUMNS // 2
        fits = words * 4 == hidden * x.itemsize and down.shape[2] * 4 == width * x.itemsize
        if function is None or not x.is_cpu or not fits or not 0 < chosen <= experts or logits.shape != (rows, experts):
            raise ValueError(f"no experts of {list(gate_up.shape)} words for {x.dtype} {list(x.shape)} on {x.device}")
        biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
        bias_width = 0 if gate_up_bias is None else gate_up_bias.shape[1] // 2
        x, logits = x if x.stride()[1] == 1 else x.contiguous(), logits.contiguous()
        out = torch.empty((rows, hidden), dtype=x.dtype)
        call = ExpertsCall(
            x=x.data_ptr(), logits=logits.data_ptr(), gate_up=gate_up.data_ptr(), down=down.data_ptr(),
            gate_up_bias=_address(biases[0]), down_bias=_address(biases[1]), bias_width=bias_width,
            out=out.data_ptr(), rows=rows, x_row=x.stride()[0], experts=experts, chosen=chosen, hidden=hidden,
            width=width, normalised=normalised, threads=torch.get_num_threads(),
        )  # fmt: skip
        if function(byref(call)):
            raise MemoryError("experts")
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
