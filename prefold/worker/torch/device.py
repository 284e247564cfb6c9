"""Devices: their memory and dtypes, and copies of arrays to them.

This module imports nothing about models, plans or steps.
"""

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

from ... import kernels
from ...errors import InputError
from ...kernels.threads import VARIABLES
from ...kernels.threads import process as kernel_threads
from ...model import machine
from ...spec import environment
from ...spec.container import usable_cores

# The dtypes of models, by the name in options.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Device types that Triton compiles for. (Tests add "cpu", for its interpreter.)
TRITON_DEVICES = ("cuda",)
# The dtypes of prefold's Triton kernels; all sum in float32.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Arrays that are uploaded together start at multiples of this many int32 numbers (16 bytes).
ALIGNMENT = 4
kernels.calm_openmp()  # PyTorch has loaded OpenMP by now


class TorchThreads:
    """The numbers of threads of PyTorch and of the compiled kernels.

    Attributes:
        first: PyTorch's number before the program chose one.
        settled: PyTorch's number after the last `settle`.
    """

    def __init__(self) -> None:
        self.first = self.settled = torch.get_num_threads()

    def settle(self, threads: int | None) -> None:
        """Set both numbers. None: the user's choice, or else at most `usable_cores`.

        The user chooses with `torch.set_num_threads`, with `kernels.set_threads` (if PyTorch's number has not changed
        since the last `settle`), or with an environment variable. PyTorch ignores the CPU quota of a container.
        """
        now = torch.get_num_threads()
        if threads is None and now == self.settled:
            threads = kernel_threads.chosen
        if threads is None:
            is_chosen = now != self.first or any(name in os.environ for name in VARIABLES)
            threads = now if is_chosen else min(now, usable_cores())
        if threads != now:
            torch.set_num_threads(threads)
        kernels.set_threads(threads)
        self.settled = threads


settle_threads = TorchThreads().settle


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" prefers a GPU. Raise InputError if the device does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device is {name!r}", field="device", remedy="use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("this torch sees no GPU", field="device", remedy="use cpu, or install a CUDA build of torch")
    return device


def choose_dtype(name: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the result of `machine.choose_dtype` as a torch dtype."""
    return DTYPES[machine.choose_dtype(name, config, device.type)]


def available_memory(device: torch.device | str) -> int:
    """Return the free memory in bytes: of the GPU, or `machine.available_memory`."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.available_memory()


def check_fits(needed: int, device: torch.device, subject: str, remedy: str) -> None:
    """Raise OutOfMemoryError if `needed` bytes exceed the free memory.

    Args:
        subject, remedy: The start and the end of the error message.
    """
    machine.check_fits(needed, subject, remedy, free=available_memory(device), place=device.type)


def free_cached(device: torch.device) -> None:
    """Release the memory that torch caches, after running out of memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@cache
def block_memory(device: torch.device) -> int:
    """Return the shared memory of a thread block in bytes: 227 KiB on an H100, 99 KiB on an A10G or L4.

    Other devices have no limit; an H100's number is returned.
    """
    if device.type != "cuda":
        return 227 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 227 << 10)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread launches kernels on `device`.

    Triton launches kernels on the current GPU, whichever GPU the tensors are on.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a tensor on `device`, without waiting. Integers except bytes become int64."""
    is_kept = array.dtype.kind in "bf" or array.dtype == np.uint8
    host = torch.from_numpy(array.astype(array.dtype if is_kept else np.int64))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy integer arrays (below 2**31) to int32 tensors on `device`, in one copy, without waiting."""
    starts, total = [], 0
    for array in arrays.values():
        starts.append(total)
        total += -(-array.size // ALIGNMENT) * ALIGNMENT
    host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for array, start in zip(arrays.values(), starts, strict=True):
        numbers[start : start + array.size] = array.reshape(-1)
    # Pinned memory is not reused before the copy is done.
    moved = host.to(device, non_blocking=True)
    return {
        name: moved[start : start + array.size].view(array.shape)
        for (name, array), start in zip(arrays.items(), starts, strict=True)
    }


@cache
def has_triton() -> bool:
    """Return True if Triton is installed and PREFOLD_TRITON=0 is not set."""
    return environment.allows_triton() and importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Return True if prefold's Triton kernels run on this device: a GPU that Triton supports."""
    return device.type in TRITON_DEVICES and has_triton()


class CompileClock:
    """The sum of the seconds that Triton's compiler reports. Kernels cached on disk count almost nothing."""

    def __init__(self) -> None:
        from triton import knobs

        self.seconds = 0.0
        self._next = knobs.compilation.listener
        knobs.compilation.listener = self._listen

    def _listen(self, *, times: Any, **rest: Any) -> None:
        self.seconds += times.total / 1e6
        if self._next is not None:
            self._next(times=times, **rest)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


_clock = cache(CompileClock)


def compile_seconds() -> float:
    """Return the seconds of Triton compilation since the last call. The first call starts the clock."""
    if not has_triton():
        return 0.0
    return _clock().take()
