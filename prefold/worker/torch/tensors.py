"""Convert between NumPy arrays, for the compiled kernels, and PyTorch tensors, over the same memory."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...kernels import BFLOAT16

# The dtypes of the compiled kernels.
ARRAY_DTYPES = {getattr(torch, name): dtype for dtype, name in kernels.DTYPES.items()}


@overload
def array_of(tensor: None) -> None: ...
@overload
def array_of(tensor: Tensor) -> np.ndarray: ...
def array_of(tensor: Tensor | None) -> np.ndarray | None:
    """Return an array over the memory of a CPU tensor, with its strides. None: None."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a tensor over the memory of an array, with its strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
