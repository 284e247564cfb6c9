"""The memory and CPU limits that a container sets for this process, by control groups of version 1 or 2.

This file imports only the standard library, because setup.py loads it alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# For each version: the files with a group's limit and its use, and the field of memory.stat with the file cache, which
# the system reclaims when memory is needed.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int | None:
    """Return the free bytes within the limits of our groups, or None without a limit. File cache counts as free."""
    free = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            try:
                most = int((group / limit).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free.append(max(0, most - int((group / used).read_text()) + int(stat.get(cached, 0))))
            except (OSError, ValueError):  # another version, or "max"
                continue
    return min(free, default=None)


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    This is the number of cores that it may run on, limited by its container's CPU quota, rounded down.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the CPU quota of each group that sets one, in cores."""
    for group in _groups("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
            except (OSError, ValueError):  # another version, or "max"
                continue
            if quota > 0 and period > 0:
                yield quota / period


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folder of each group of this process that may have this controller, then the groups above it.

    Inside a container, the container's group is at the top of the hierarchy, whatever its name is outside.
    """
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}  # {folder of the hierarchy: group}; "" is version 2
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            paths[controller] = paths[controllers] = path
        elif not controllers:
            paths[""] = path
    for hierarchy, path in paths.items():
        folder = CGROUP / hierarchy / path.lstrip("/")
        yield from (folder, *folder.parents)
