"""The limits that a container sets for this process: memory and processor time, of control groups of either version.

Standard library only, because setup.py loads this file by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# For each version: the files of a group's limit and use, and the entry of its statistics that the system gives back by
# itself.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int | None:
    """Return the bytes that our groups leave us, with their file cache counted as free; None: no group sets a limit."""
    free = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            try:
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free.append(max(0, most - int((group / used).read_text()) + int(stat.get(cached, 0))))
            except (OSError, ValueError):  # not of this version, or "max"
                continue
    return min(free, default=None)


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    These are the cores that it may run on, or the whole cores of its container's CPU quota if that is less.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the CPU quota of each group that sets one, in cores."""
    for group in _groups("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
            except (OSError, ValueError):  # not of this version, or "max"
                continue
            if quota > 0 and period > 0:
                yield quota / period


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folder of each group of this process that may have this controller, and the groups above it.

    Inside a container its own group is at the top, whatever its name outside.
    """
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}  # by the folder of the hierarchy; "": version 2
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            paths[controller] = paths[controllers] = path
        elif not controllers:
            paths[""] = path
    for hierarchy, path in paths.items():
        folder = CGROUP / hierarchy / path.lstrip("/")
        yield from (folder, *folder.parents)
