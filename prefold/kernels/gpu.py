"""What our Triton kernels need to know about tensors and devices. Imports torch; Triton only where it is asked for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["DEVICES", "DTYPES", "compile_seconds", "has_triton", "on", "runs_triton", "send", "takes_triton", "upload"]

# Kinds of device that Triton compiles for. (Its interpreter runs on "cpu": for tests.)
DEVICES = ("cuda",)

# What the kernels compute with; sums are float32 in each.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 4  # int32 numbers: 16 bytes


@cache
def has_triton() -> bool:
    """Whether Triton is installed; PREFOLD_TRITON=0 says to leave it alone."""
    return os.environ.get("PREFOLD_TRITON") != "0" and importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether our Triton kernels run on this device: a GPU that Triton compiles for."""
    return device.type in DEVICES and has_triton()


class _Clock:
    """Hears from Triton's compiler how long each kernel took it; those it has on disk take it next to nothing."""

    def __init__(self) -> None:
        from triton import knobs

        self.seconds = 0.0
        self._next = knobs.compilation.listener
        knobs.compilation.listener = self._listen

    def _listen(self, *, times: Any, **rest: Any) -> None:
        self.seconds += times.total / 1e6
        if self._next is not None:
            self._next(times=times, **rest)


@cache
def _clock() -> _Clock:
    return _Clock()


def compile_seconds() -> float:
    """Seconds that Triton has spent on compiling kernels since this was asked last; the first call begins to count."""
    if not has_triton():
        return 0.0
    clock = _clock()
    seconds, clock.seconds = clock.seconds, 0.0
    return seconds


def on(device: torch.device) -> AbstractContextManager[object]:
    """As a context: `device` is where this thread's kernels go. Triton launches them on the current GPU, whatever the
    tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def takes_triton(*tensors: Tensor | None) -> bool:
    """Whether our Triton kernels take these tensors: one device that they run on, one dtype of theirs."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    return (
        runs_triton(first.device)
        and first.dtype in DTYPES
        and all(t.dtype == first.dtype and t.device == first.device for t in given)
    )


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array as a tensor on `device`, whole numbers as int64, without waiting for it."""
    host = torch.from_numpy(array.astype(array.dtype if array.dtype.kind in "bf" else np.int64))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Arrays of whole numbers below 2**31 as int32 tensors on `device`: one copy for all, without waiting for it."""
    starts, total = [], 0
    for array in arrays.values():
        starts.append(total)
        total += -(-array.size // ALIGNMENT) * ALIGNMENT
    host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for array, start in zip(arrays.values(), starts, strict=True):
        numbers[start : start + array.size] = array.reshape(-1)
    # Memory that is pinned is not given to anybody else before the copy has been made.
    moved = host.to(device, non_blocking=True)
    return {
        name: moved[start : start + array.size].view(array.shape)
        for (name, array), start in zip(arrays.items(), starts, strict=True)
    }
