"""NumPy arrays and PyTorch tensors over the same memory.

NumPy has no bfloat16 of its own: arrays of it have the dtype of the package ml_dtypes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a CPU tensor as an array over the same memory, with the same strides."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(BFLOAT16)
    return tensor.detach().numpy()


def tensor_of(array: np.ndarray) -> Tensor:
    """Return an array as a tensor over the same memory, with the same strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
