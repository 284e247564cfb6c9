"""The position-wise operations of a layer, and the code that computes them.

`choose_ops` gives the operations for a pass by compiled CPU kernels, by Triton, or by PyTorch. All have the same
results up to floating-point rounding; those by PyTorch alone are differentiable, and write into nothing they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import kernels
from .device import TRITON_DTYPES, runs_triton
from .tensors import ARRAY_DTYPES, array_of, tensor_of

# By ModelConfig.activation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
# Those whose product with up has a kernel of its own.
FUSED_GATES = ("silu", "gelu_tanh")


class Ops:
    """An Ops computes the operations by PyTorch, on any device and in any dtype."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns x + delta (the residual stream), and its RMS norm scaled by `weight` (Zhang and Sennrich 2019).

        x, delta [rows, hidden]; weight [hidden], of x's dtype or float32. May write into x.
        """
        if delta is not None:
            x = x + delta
        h = wide(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return x, (weight * h.to(weight.dtype)).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns x + delta (the residual stream), and its LayerNorm (Ba et al. 2016). weight, bias [hidden]; bias may
        be None."""
        if delta is not None:
            x = x + delta
        return x, F.layer_norm(x, weight.shape, weight, bias, eps)

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Returns x [rows, heads, dim] after rotary position embedding, halves rotated against each other (as in
        Llama).

        cos_sin float32 [rows, turned]: cosines then sines of the row's turned/2 angles, already multiplied by the
        RoPE variant's attention factor. The first `turned` numbers of each head are rotated; 0: none. norm_weight
        [dim]: an RMS norm over dim before the rotation (Qwen3's q/k norm). May write into x.
        """
        if norm_weight is not None:
            _, x = Ops.add_rms_norm(self, x, None, norm_weight, eps)
        if not (turned := cos_sin.shape[1]):
            return x
        cos, sin = cos_sin[:, None, :].chunk(2, -1)
        a, b = wide(x[..., :turned]).chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
        return rotated if turned == x.shape[-1] else torch.cat((rotated, x[..., turned:]), -1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up, of gate_up [rows, 2 * width] -> [rows, width]. activation: a key of
        ACTIVATIONS."""
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up


class CompiledOps:
    """The compiled kernels of a CPU, called with tensors."""

    def __init__(self, compiled: kernels.Kernels):
        self._compiled = compiled

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return tensor_of(self._compiled.add_rms_norm(array_of(x), array_of(delta), array_of(weight), eps))

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        self._compiled.rope(array_of(x), array_of(cos_sin), array_of(norm_weight), eps)

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return tensor_of(self._compiled.gate_mul(array_of(gate_up), activation))


class FusedOps(Ops):
    """A FusedOps computes the operations by kernels that write into what they are given. No gradients.

    kernels: `CompiledOps`, for float32 and bfloat16 on a CPU, or the functions of `ops_triton`, on a GPU
    """

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, self._kernels.add_rms_norm(x, delta, weight, eps)

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        turned = cos_sin.shape[1]
        if not turned:
            return super().rope(x, cos_sin, norm_weight, eps)
        if turned < x.shape[-1] and norm_weight is not None:  # the kernel norms what it turns
            x = self._kernels.add_rms_norm(x.flatten(0, 1), None, norm_weight, eps).view(x.shape)
            norm_weight = None
        self._kernels.rope(x[..., :turned], cos_sin, norm_weight, eps)
        return x

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in FUSED_GATES:
            return super().gate(gate_up, activation)
        return self._kernels.gate_mul(gate_up, activation)


PYTORCH = Ops()
# Types of device that torch can be asked of; of "meta", for one, it cannot.
AUTOCAST = ("cpu", "cuda")


def choose_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    """Returns the fastest operations for tensors of this dtype on this device.

    Those by PyTorch are returned where gradients are enabled, and under autocast, where tensors are of several dtypes.
    """
    if torch.is_grad_enabled() or (device.type in AUTOCAST and torch.is_autocast_enabled(device.type)):
        return PYTORCH
    if device.type == "cpu" and dtype in ARRAY_DTYPES and (compiled := kernels.load()):
        return FusedOps(CompiledOps(compiled))
    if runs_triton(device) and dtype in TRITON_DTYPES:
        from . import ops_triton

        return FusedOps(ops_triton)
    return PYTORCH


def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of each row of logits [rows, columns], [rows], and the place of its largest number, int64
    [rows].

    Of several largest ones a CPU gives the first.
    """
    if logits.is_cpu and not (torch.is_grad_enabled() and logits.requires_grad):
        compiled, numbers = kernels.load(), array_of(logits)
        if compiled and compiled.can_log_sum_exp(numbers):
            sums, largest = compiled.log_sum_exp(numbers)
            return tensor_of(sums), tensor_of(largest)
    return torch.logsumexp(logits, -1), logits.argmax(-1)


def entropy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `log_sum_exp` does of logits [rows, columns], and the entropy in nats of the probabilities that each
    row stands for, [rows]. No gradients."""
    with torch.no_grad():
        compiled = kernels.load() if logits.is_cpu else None
        if compiled and compiled.can_log_sum_exp(numbers := array_of(logits)):
            sums, largest, entropies = map(tensor_of, compiled.entropy(numbers))
            return sums, largest, entropies
        sums, largest = torch.logsumexp(logits, -1), logits.argmax(-1)
        scores = logits - sums[:, None]
        return sums, largest, torch.special.entr(scores.exp()).sum(-1)


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype that sums are made in: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()
