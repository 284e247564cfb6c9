"""The compiled kernels, called with tensors: tests compare them with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefold import kernels
from prefold.worker.torch.tensors import ARRAY_DTYPES, array_of, tensor_of


class TensorKernels:
    """Kernels whose methods take and return tensors in place of arrays, and dtypes of PyTorch."""

    def __init__(self, compiled: kernels.Kernels):
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._compiled, name)
        if not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            return _to_tensors(found(*map(_to_arrays, given), **{key: _to_arrays(one) for key, one in named.items()}))

        return call


def tensor_kernels() -> TensorKernels:
    """The kernels of this process."""
    return TensorKernels(kernels.load())


def _to_arrays(given: Any) -> Any:
    if isinstance(given, torch.dtype):
        return ARRAY_DTYPES.get(given)
    return array_of(given) if isinstance(given, Tensor) else given


def _to_tensors(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(_to_tensors, found))
    return tensor_of(found) if isinstance(found, np.ndarray) else found
