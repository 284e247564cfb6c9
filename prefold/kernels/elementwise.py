"""What is done to each row by itself: norms, rotations and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from .interface import Family


class ElementwiseKernels(Family):
    """Computes what a layer does between its products, on tensors of one of DTYPES on the CPU."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds delta to x in place, and returns the norm of the sum; x, delta [rows, width], each row contiguous.

        weight [width], of x's dtype or float32. Raises ValueError where the shapes do not fit.
        """
        rows, width = x.shape
        if weight.shape[0] != width or (delta is not None and delta.shape != x.shape) or x.stride()[1] != 1 < width:
            raise ValueError(f"x {list(x.shape)}, delta and weight {list(weight.shape)} do not fit together")
        out = torch.empty((rows, width), dtype=x.dtype)
        self._calls["add_rms_norm", x.dtype, weight.dtype](
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            x.stride()[0],
            0 if delta is None else delta.stride()[0],
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope(self, x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
        """Rotates x [rows, heads, dim] in place, normed before where there is a weight; cos_sin float32 [rows, dim].

        Raises ValueError where the shapes do not fit.
        """
        rows, _, dim = x.shape
        if cos_sin.shape != (rows, dim) or dim % 2 or (norm_weight is not None and norm_weight.shape[0] != dim):
            raise ValueError(f"x {list(x.shape)} and cos_sin {list(cos_sin.shape)} do not fit together")
        self._calls["rope", x.dtype, x.dtype if norm_weight is None else norm_weight.dtype](
            x.data_ptr(),
            cos_sin.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            *x.shape,
            *x.stride()[:2],
            eps,
            torch.get_num_threads(),
        )

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up [rows, width] of gate_up [rows, 2 * width]; activation "silu" or "gelu_tanh".

        Raises ValueError where gate and up have an odd number of columns together.
        """
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate and up have {width} columns together, an odd number")
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        threads = torch.get_num_threads()
        call = self._calls["gate_mul", activation, gate_up.dtype]
        call(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.stride()[0], threads)
        return out
