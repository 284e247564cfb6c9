"""What this machine's CPU and memory afford, without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

import psutil

from ..errors import OutOfMemoryError
from ..spec.container import free_memory

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_malloc_trim, _mallopt = getattr(_LIBC, "malloc_trim", None), getattr(_LIBC, "mallopt", None)
# Numbers of glibc's malloc.h, with the variables by which a user may have set them already.
MALLOC_OPTIONS = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}
# Arrays of a step are smaller than this, and memory of so many free bytes is kept for the next one.
MALLOC_KEEPS = 1 << 30
# With these a CPU multiplies bfloat16 numbers faster than float32, by products of words or by widening.
_X86_BF16 = ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"})


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the limits of the container and of the process
    (`ulimit -v`), if any."""
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
