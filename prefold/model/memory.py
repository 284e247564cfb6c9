"""Refuses what does not fit before it is loaded."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from ..errors import OutOfMemoryError

__all__ = ["available_memory", "check_fits"]

CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device` without swapping; on a CPU within the container's limit, if any."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit = _container_free()
    return free if limit is None else min(free, limit)


def check_fits(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raises OutOfMemoryError when `needed` bytes are more than is available."""
    free = available_memory(device)
    if needed > free:
        raise OutOfMemoryError(
            f"{what} needs {needed / 1e9:.1f} GB of memory on {device.type}, and {free / 1e9:.1f} GB are free; {remedy}"
        )


def _container_free() -> int | None:
    """What a cgroup (version 2) leaves us; its file cache counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
