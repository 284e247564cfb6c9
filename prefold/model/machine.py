"""Capabilities and free memory of this machine, without torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError, OutOfMemoryError
from ..spec.container import free_memory
from ..spec.plugins import named_class

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_malloc_trim, _mallopt = getattr(_LIBC, "malloc_trim", None), getattr(_LIBC, "mallopt", None)
# Options of glibc's malloc.h, and the environment variables by which a user may have set them already.
MALLOC_OPTIONS = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}
# Arrays of a step are smaller than this. glibc keeps up to this many free bytes for the next step.
MALLOC_KEEPS = 1 << 30
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # dtypes that a model can be loaded in, with bytes per element
# With either set, a CPU multiplies bfloat16 faster than float32: by products of 16-bit words, or by fast widening.
_X86_BF16 = ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"})


def available_memory(device: str = "cpu") -> int:
    """Return the bytes that a device can allocate without swapping.

    On a CPU, limits of the container and of the process (`ulimit -v`) count.
    """
    if device != "cpu":
        return int(named_class("prefold.worker.torch.device:available_memory")(device))
    import psutil

    free = (psutil.virtual_memory().available, free_memory(), _address_space_free())
    return min(limit for limit in free if limit is not None)


def check_fits(needed: int, subject: str, remedy: str, *, free: int | None = None, place: str = "cpu") -> None:
    """Raise OutOfMemoryError if `needed` bytes are not available.

    Args:
        needed: bytes.
        subject, remedy: the start and the end of the error message.
        free: available bytes; None: `available_memory`.
        place: the device's name in the message.
    """
    free = available_memory() if free is None else free
    if needed > free:
        message = f"{subject} needs {needed / 1e9:.1f} GB of memory on {place}, and {free / 1e9:.1f} GB are free"
        raise OutOfMemoryError(f"{message}; {remedy}")


def _address_space_free() -> int | None:
    """Return the bytes that may still be mapped; None if there is no limit."""
    import psutil

    if not hasattr(psutil, "RLIMIT_AS"):
        return None
    process = psutil.Process()
    limit = process.rlimit(psutil.RLIMIT_AS)[0]
    return None if limit < 0 else max(0, limit - process.memory_info().vms)


def keep_freed() -> None:
    """Let glibc keep the memory of freed arrays for later arrays, until `give_back`.

    Every step allocates and frees arrays of some megabytes. By default glibc returns such memory to the system, which
    hands it out again page by page and zeroes each page. That costs up to 9 % of a step's time on a CPU.
    """
    if _mallopt is not None and not any(name in os.environ for name in MALLOC_OPTIONS.values()):
        for option in MALLOC_OPTIONS:
            _mallopt(option, MALLOC_KEEPS)


def give_back() -> None:
    """Return free memory to the system. glibc itself keeps small freed pieces."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class GivesBack:
    """An object whose destructor calls `give_back`.

    As the last attribute of a worker it is destroyed after the model.
    """

    def __del__(self) -> None:
        if give_back is not None:  # Python sets names to None when it exits
            give_back()


@cache
def computes_bf16() -> bool:
    """Return whether bfloat16 is faster than float32 on this CPU, by native products or by wide vectors."""
    flags = _cpu_flags()
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "bf16" in flags
    return any(needed <= flags for needed in _X86_BF16)


def _cpu_flags() -> set[str]:
    """Return the names of the CPU's instruction sets; an empty set if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(values.split())
    return set()


def has_gpu() -> bool:
    """Return whether this machine seems to have a GPU for PyTorch. Asking PyTorch itself takes seconds."""
    if sys.platform == "linux":
        return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()
    return sys.platform == "win32" and shutil.which("nvidia-smi") is not None


def has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:  # a loader may forbid the import
        return False


def choose_device(name: str) -> str:
    """Return the device for a name: "cpu", "cuda" or "cuda:1". "auto" is a GPU if there is one.

    Raise InputError if the device does not exist.
    """
    if name == "cpu" or (name == "auto" and not (has_gpu() and has_torch())):
        return "cpu"
    if not has_torch():
        raise missing_torch(f"device is {name!r}", "device")
    return str(named_class("prefold.worker.torch.device:choose_device")(name))


def missing_torch(message: str, field: str) -> InputError:
    """Return the error for an option that needs PyTorch when PyTorch is not installed."""
    return InputError(message, field=field, remedy="install PyTorch: pip install 'prefold[torch]'", code="no_torch")


def choose_dtype(name: str, config: Mapping[str, Any], device: str) -> str:
    """Return the dtype for a name. Raise InputError for an unknown name.

    "auto" is the dtype of the checkpoint, from the keys of config.json in `config`, if the device computes natively in
    it. Otherwise it is float32.
    """
    if name != "auto":
        if name not in DTYPES:
            raise InputError(f"dtype is {name!r}", field="dtype", remedy=f"use auto, {', '.join(DTYPES)}")
        return name
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    stored = stored if stored in DTYPES else "float32"
    if stored == "float32" or device != "cpu":
        return stored
    # Emulated bfloat16 is slower than float32 on a CPU, and float16 nearly always is too.
    return "bfloat16" if computes_bf16() else "float32"


def check_kv_dtype(dtype: str, device: str) -> None:
    """Raise InputError if keys and values of rows in `dtype` cannot be stored as bfloat16."""
    if device != "cpu" or dtype not in ("float32", "bfloat16"):
        message = f"kv_dtype bfloat16 is not supported with dtype {dtype} on {device.partition(':')[0]}"
        raise InputError(message, field="kv_dtype", remedy="use dtype float32, or leave kv_dtype out (--kv-dtype auto)")
