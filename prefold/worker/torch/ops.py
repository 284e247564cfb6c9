"""The position-wise operations of a layer, in several implementations.

`choose_ops` selects one for a pass: compiled CPU kernels, Triton, or PyTorch. All agree up to floating-point rounding.
Only PyTorch's are differentiable, and only they never write to their inputs.
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

# By `ModelConfig.activation`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
# Activations with a fused kernel for activation(gate) * up.
FUSED_GATES = ("silu", "gelu_tanh")


class Ops:
    """The operations in PyTorch, on any device and in any dtype."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + delta (the residual stream), and its RMS norm scaled by `weight` (Zhang and Sennrich 2019).

        Args:
            x, delta: [rows, hidden].
            weight: [hidden], in x's dtype or float32. It may overwrite x.
        """
        if delta is not None:
            x = x + delta
        h = wide(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return x, (weight * h.to(weight.dtype)).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta (the residual stream), and its LayerNorm (Ba et al. 2016).

        Args:
            weight, bias: [hidden].
        """
        if delta is not None:
            x = x + delta
        if weight.dtype == x.dtype:
            return x, F.layer_norm(x, weight.shape, weight, bias, eps)
        return x, F.layer_norm(wide(x), weight.shape, weight, None if bias is None else wide(bias), eps).to(x.dtype)

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Return x [rows, heads, dim] after rotary position embedding, in the half-split form of Llama.

        Args:
            x: [rows, heads, dim]; it may be overwritten.
            cos_sin: float32 [rows, turned]: cosines, then sines of the row's turned/2 angles, multiplied by the
                attention factor of the RoPE variant. The first `turned` values of each head are rotated; 0: none.
            norm_weight: [dim], an RMS norm over dim before the rotation (Qwen3's q/k norm). None: no norm.
            eps: Epsilon of the norm.
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
        """Return activation(gate) * up [rows, width], for gate_up [rows, 2 * width].

        Args:
            activation: A key of ACTIVATIONS.
        """
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up


class CompiledOps:
    """The compiled kernels of a CPU, with tensor arguments."""

    def __init__(self, compiled: kernels.Kernels):
        self._compiled = compiled

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return tensor_of(self._compiled.add_rms_norm(array_of(x), array_of(delta), array_of(weight), eps))

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        self._compiled.rope(array_of(x), array_of(cos_sin), array_of(norm_weight), eps)

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return tensor_of(self._compiled.gate_mul(array_of(gate_up), activation))


class FusedOps(Ops):
    """The operations in fused kernels, which write to their inputs. No gradients.

    Args:
        kernels: `CompiledOps` for float32 and bfloat16 on a CPU, or the module `ops_triton` on a GPU.
    """

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, self._kernels.add_rms_norm(x, delta, weight, eps)

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        turned = cos_sin.shape[1]
        if not turned:
            return super().rope(x, cos_sin, norm_weight, eps)
        if turned < x.shape[-1] and norm_weight is not None:  # the kernel would norm only the rotated part
            x = self._kernels.add_rms_norm(x.flatten(0, 1), None, norm_weight, eps).view(x.shape)
            norm_weight = None
        self._kernels.rope(x[..., :turned], cos_sin, norm_weight, eps)
        return x

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in FUSED_GATES:
            return super().gate(gate_up, activation)
        return self._kernels.gate_mul(gate_up, activation)


PYTORCH = Ops()
# Device types for which torch can report autocast. For "meta", say, it cannot.
AUTOCAST = ("cpu", "cuda")


def choose_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    """Return the fastest operations for tensors of this dtype on this device.

    PyTorch's are used if gradients are enabled, and under autocast, which mixes dtypes.
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
    """Return the log-sum-exp of each row, [rows], and the index of its largest value, int64 [rows].

    Args:
        logits: [rows, columns]. On a CPU, ties go to the lowest index.
    """
    if logits.is_cpu and not (torch.is_grad_enabled() and logits.requires_grad):
        compiled, numbers = kernels.load(), array_of(logits)
        if compiled and compiled.can_log_sum_exp(numbers):
            sums, largest = compiled.log_sum_exp(numbers)
            return tensor_of(sums), tensor_of(largest)
    return torch.logsumexp(logits, -1), logits.argmax(-1)


def entropy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `log_sum_exp`, and the entropy of each row's probabilities in nats, [rows]. No gradients.

    Args:
        logits: [rows, columns].
    """
    with torch.no_grad():
        compiled = kernels.load() if logits.is_cpu else None
        if compiled and compiled.can_log_sum_exp(numbers := array_of(logits)):
            sums, largest, entropies = map(tensor_of, compiled.entropy(numbers))
            return sums, largest, entropies
        sums, largest = torch.logsumexp(logits, -1), logits.argmax(-1)
        scores = logits - sums[:, None]
        return sums, largest, torch.special.entr(scores.exp()).sum(-1)


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype of sums: float64 if x is float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()
