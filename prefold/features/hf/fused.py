"""Replace norms, gated MLPs and rotations of transformers' modules by prefold's kernels.

A module is a candidate by its name and its parts. It is replaced if both compute the same outputs for random rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...worker.torch.layers import GatedLinear
from ...worker.torch.lora import RowAdapters
from ...worker.torch.ops import ACTIVATIONS, choose_ops
from .model import RowPass

ROWS = 5  # random rows of the comparison
# The largest difference relative to the largest output: rounding in float32, and in smaller dtypes.
DIFFERENCE, ROUNDED_DIFFERENCE = 1e-5, 2e-2


class RowNorm(nn.Module):
    """An RMS norm that replaces transformers': x [..., size] -> normalized x times a weight.

    Args:
        offset: Added to the weight (1 for norms that store the weight minus 1).
    """

    def __init__(self, norm: nn.Module, offset: float):
        super().__init__()
        weight: Tensor = norm.weight
        self.weight = nn.Parameter(weight.float() + offset if offset else weight, requires_grad=False)
        self.eps = next(float(value) for name in ("variance_epsilon", "eps") if (value := getattr(norm, name, None)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        # The kernel may write into the residual stream, so it is called without one.
        return (
            choose_ops(x.dtype, x.device).add_rms_norm(flat.contiguous(), None, self.weight, self.eps)[1].view(x.shape)
        )


class RowMlp(nn.Module):
    """A gated MLP that replaces transformers': down(activation(gate) * up).

    Args:
        names: The names of the gate's linear and of the up projection's linear in the model.
    """

    def __init__(self, mlp: Any, names: tuple[str, str], activation: str, rows: RowPass):
        super().__init__()
        gate, up = mlp.gate_proj, mlp.up_proj
        place = {"dtype": gate.weight.dtype, "device": gate.weight.device}
        biased = gate.bias is not None
        self.gate_up = GatedLinear(gate.in_features, gate.out_features, activation=activation, bias=biased, **place)
        with torch.no_grad():
            self.gate_up.weight.copy_(torch.cat((gate.weight, up.weight)))  # type: ignore[union-attr]
            if biased:
                self.gate_up.bias.copy_(torch.cat((gate.bias, up.bias)))  # type: ignore[union-attr]
        self.requires_grad_(False)
        self.down_proj, self.names, self.rows = mlp.down_proj, names, rows

    def forward(self, x: Tensor) -> Tensor:
        flat, ops = x.reshape(-1, x.shape[-1]).contiguous(), choose_ops(x.dtype, x.device)
        adapters: RowAdapters = self.rows.adapters
        if not adapters.adapters:
            return self.down_proj(self.gate_up.activated(flat, ops).view(*x.shape[:-1], -1))
        products = self.gate_up(flat)
        for part, name in zip(products.chunk(2, -1), self.names, strict=True):
            adapters.add(part, flat, 0, name)
        return self.down_proj(self.gate_up.activate(products, ops).view(*x.shape[:-1], -1))


def fuse(decoder: nn.Module, prefix: str, rows: RowPass, *, packed: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """Replace the decoder's norms and MLPs by kernels. Call it before the linears are replaced.

    Yield (name, (inputs, outputs)) for each linear that became part of an MLP.

    Args:
        prefix: The decoder's name in the model.
    """
    for path, module in list(decoder.named_modules()):
        name = f"{prefix}.{path}" if prefix else path
        if norm := _norm_of(module):
            decoder.set_submodule(path, norm)
        elif packed and (mlp := _mlp_of(module, name, rows)):
            sizes = module.gate_proj.in_features, module.gate_proj.out_features
            yield from ((part, sizes) for part in mlp.names)
            mlp.gate_up.pack()
            decoder.set_submodule(path, mlp)


def _norm_of(module: nn.Module) -> RowNorm | None:
    """Return the replacement for an RMS norm, or None if the module is not one."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight: Tensor = module.weight
    if weight.dim() != 1:
        return None
    for offset in (0.0, 1.0):
        with suppress(StopIteration, TypeError):
            norm = RowNorm(module, offset)
            if _same(module, norm, len(weight), weight):
                return norm
    return None


def _mlp_of(module: Any, name: str, rows: RowPass) -> RowMlp | None:
    """Return the replacement for a gated MLP, or None if the module is not one."""
    linears: list[Any] = [getattr(module, part, None) for part in ("gate_proj", "up_proj", "down_proj")]
    part_names = {part.partition(".")[0] for part, _ in module.named_parameters()}
    if part_names != {"gate_proj", "up_proj", "down_proj"} or any(type(linear) is not nn.Linear for linear in linears):
        return None
    gate, up, down = linears
    if (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        return None
    names = (f"{name}.gate_proj", f"{name}.up_proj")
    x = _random(gate.in_features, gate.weight)
    for activation, function in ACTIVATIONS.items():
        if _close(module(x), down(function(gate(x)) * up(x))):
            return RowMlp(module, names, activation, rows)
    return None


def _random(size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, ROWS, size, generator=generator).to(like.device, like.dtype) * 3


def _same(module: nn.Module, other: nn.Module, size: int, like: Tensor) -> bool:
    x = _random(size, like)
    return _close(module(x.clone()), other(x))


def _close(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    most = DIFFERENCE if a.dtype in (torch.float32, torch.float64) else ROUNDED_DIFFERENCE
    return bool((a - b).abs().max() <= most * a.abs().max())


# The function that rotates q and k in transformers' modules.
ROTATION = "apply_rotary_pos_emb"


def rotate_by_kernels(decoder: nn.Module) -> None:
    """Make the decoder's modules rotate q and k with prefold's kernel, if it agrees with the function that they call.

    Only these modules change: each gets a `forward` that finds the kernel under the function's name in its globals.
    """
    replaced: dict[Any, Any] = {}
    for module in decoder.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or forward.__closure__:
            continue
        if forward not in replaced:
            function = forward.__globals__[ROTATION]
            rotation = Rotation(function)
            if rotation.is_same(decoder.get_input_embeddings().weight):
                names = {**forward.__globals__, ROTATION: rotation}
                replaced[forward] = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
                replaced[forward].__kwdefaults__ = forward.__kwdefaults__
            else:
                replaced[forward] = None
        if replaced[forward] is not None:
            module.forward = MethodType(replaced[forward], module)


class Rotation:
    """A rotation of q and k by a kernel, with the arguments of the transformers function that it replaces."""

    def __init__(self, function: Any):
        self.function = function
        self._last: tuple[Any, Any, Tensor | None] = None, None, None

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        fits = (
            q.dim() == k.dim() == 4 and len(q) == 1 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        )
        if arguments or options or not fits or torch.is_grad_enabled():
            return self.function(q, k, cos, sin, *arguments, **options)
        if self._last[0] is not cos or self._last[1] is not sin:  # layers of one kind pass the same tensors
            half = cos.shape[-1] // 2
            self._last = cos, sin, torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float()
        ops, table = choose_ops(q.dtype, q.device), self._last[2]
        assert table is not None
        q, k = (ops.rope(x[0].transpose(0, 1).contiguous(), table).transpose(0, 1)[None] for x in (q, k))
        return q, k

    def is_same(self, like: Tensor) -> bool:
        """Return whether kernel and function agree for random rows of the dtype of `like`."""
        q, k = (_random(2 * 16, like).view(1, ROWS, heads, -1).transpose(1, 2) for heads in (2, 1))
        angles = _random(8, like).float().repeat(1, 1, 2)
        cos, sin = (turn(angles).to(like.dtype) for turn in (torch.cos, torch.sin))
        k = k[..., :16]
        try:
            expected = self.function(q.clone(), k.clone(), cos, sin)
            return all(map(_close, expected, self(q.clone(), k.clone(), cos, sin)))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        finally:
            self._last = None, None, None
