"""What this machine's CPU and memory afford, without torch."""

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
# Numbers of glibc's malloc.h, with the variables by which a user may have set them already.
MALLOC_OPTIONS = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}
# Arrays of a step are smaller than this, and memory of so many free bytes is kept for the next one.
MALLOC_KEEPS = 1 << 30
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # that a model may be loaded in: the bytes of a number
# With these a CPU multiplies bfloat16 numbers faster than float32, by products of words or by widening.
_X86_BF16 = ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"})


def available_memory(device: str = "cpu") -> int:
    """Return the bytes that can be allocated on a device without swapping; on a CPU within the limits of the container
    and of the process (`ulimit -v`), if any."""
    if device != "cpu":
        return int(named_class("prefold.worker.torch.device:available_memory")(device))
    import psutil

    free = (psutil.virtual_memory().available, free_memory(), _address_space_free())
    return min(limit for limit in free if limit is not None)


def check_fits(needed: int, subject: str, remedy: str, *, free: int | None = None, place: str = "cpu") -> None:
    """Raise OutOfMemoryError if `needed` bytes are more than is available. subject, remedy: for its message; free: the
    bytes that are available; None: `available_memory`; place: where they are, for the message"""
    free = available_memory() if free is None else free
    if needed > free:
        message = f"{subject} needs {needed / 1e9:.1f} GB of memory on {place}, and {free / 1e9:.1f} GB are free"
        raise OutOfMemoryError(f"{message}; {remedy}")


def _address_space_free() -> int | None:
    """Return the bytes that may still be mapped; None: there is no limit."""
    import psutil

    if not hasattr(psutil, "RLIMIT_AS"):
        return None
    process = psutil.Process()
    limit = process.rlimit(psutil.RLIMIT_AS)[0]
    return None if limit < 0 else max(0, limit - process.memory_info().vms)


def keep_freed() -> None:
    """Let glibc keep the memory of freed arrays for the next ones, until `give_back`.

    Every step makes arrays of some megabytes and frees them. By default glibc returns such pieces to the system, which
    hands them out again page by page, each filled with zeros first: up to 9 % of the time of a step on a CPU.
    """
    if _mallopt is not None and not any(name in os.environ for name in MALLOC_OPTIONS.values()):
        for option in MALLOC_OPTIONS:
            _mallopt(option, MALLOC_KEEPS)


def give_back() -> None:
    """Return free memory to the system; glibc itself keeps small freed pieces for later."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class GivesBack:
    """Gives memory back when it goes: as the last field of a worker it goes when the model has gone."""

    def __del__(self) -> None:
        if give_back is not None:  # as names are when Python ends
            give_back()


@cache
def computes_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 numbers natively, or with vectors that are wide enough for it."""
    flags = _cpu_flags()
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "bf16" in flags
    return any(needed <= flags for needed in _X86_BF16)


def _cpu_flags() -> set[str]:
    """Return the names of the CPU's instruction sets; none where the system does not say."""
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
    """Return whether this machine seems to have a GPU for PyTorch, which takes seconds to say so itself."""
    if sys.platform == "linux":
        return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()
    return sys.platform == "win32" and shutil.which("nvidia-smi") is not None


def has_torch() -> bool:
    """Return whether PyTorch is installed."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:  # of a loader that forbids it
        return False


def choose_device(name: str) -> str:
    """Return the device called `name`: "cpu", "cuda" or "cuda:1"; "auto" is a GPU where there is one. Raise InputError
    where it is not there."""
    if name == "cpu" or (name == "auto" and not (has_gpu() and has_torch())):
        return "cpu"
    if not has_torch():
        raise missing_torch(f"device is {name!r}", "device")
    return str(named_class("prefold.worker.torch.device:choose_device")(name))


def missing_torch(message: str, field: str) -> InputError:
    """Return the error of something that needs PyTorch, which is not installed."""
    return InputError(message, field=field, remedy="install PyTorch: pip install 'prefold[torch]'", code="no_torch")


def choose_dtype(name: str, config: Mapping[str, Any], device: str) -> str:
    """Return the dtype called `name`. Raise InputError for an unknown name.

    "auto" is the dtype that the checkpoint is stored in, as `config` (the keys of config.json) says, where the device
    computes natively in it, else float32.
    """
    if name != "auto":
        if name not in DTYPES:
            raise InputError(f"dtype is {name!r}", field="dtype", remedy=f"use auto, {', '.join(DTYPES)}")
        return name
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    stored = stored if stored in DTYPES else "float32"
    if stored == "float32" or device != "cpu":
        return stored
    # bfloat16 on a CPU that has to emulate it is slower than float32, and float16 nearly always is.
    return "bfloat16" if computes_bf16() else "float32"


def check_kv_dtype(dtype: str, device: str) -> None:
    """Raise InputError where keys and values of rows in `dtype` cannot be kept as bfloat16."""
    if device != "cpu" or dtype not in ("float32", "bfloat16"):
        message = f"keys and values of {dtype} on {device.partition(':')[0]} are kept as they are"
        raise InputError(message, field="kv_dtype", remedy="use dtype float32, or leave kv_dtype out (--kv-dtype auto)")
