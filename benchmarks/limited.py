"""Scores prompts in a process whose address space is limited, and prints the seconds as JSON: `layerwise.py` runs it.

    python benchmarks/limited.py SETTINGS

SETTINGS is JSON: see `scored`. It imports no more than a user's program does.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def limit_memory(size: int) -> None:
    """Let the process map so many bytes at most, as `ulimit -v` does. size: 0: it may map all"""
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def mapped() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident_peak() -> int:
    """Return the most bytes that were resident; what was resident before this program began does not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def prompts(records: int, shared: int, own: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts that begin alike, and a continuation of each, as token ids."""
    import numpy as np

    rng = np.random.default_rng(0)
    stem = rng.integers(1000, 30_000, shared).tolist()
    every = [[*stem, *rng.integers(1000, 30_000, own).tolist()] for _ in range(records)]
    return every, [rng.integers(1000, 30_000, 2).tolist() for _ in range(records)]


def scored(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a job of scores, its digest, and what it read.

    settings: model, layerwise, dtype, threads; records, shared, own: of the prompts; step: rows of a step; by_step:
    whether each step reads the weights, as over a mapped file; limit: bytes of the address space, free: more bytes than
    what imports have mapped (0: there is no limit)
    """
    limit_memory(settings["limit"])
    from prefold import LLM
    from prefold.features.layerwise.engine import LayerwisePart

    given, continuations = prompts(settings["records"], settings["shared"], settings["own"])
    options = {name: settings[name] for name in ("layerwise", "dtype", "threads")}
    imported = mapped()
    if settings["free"]:
        limit_memory(imported + settings["free"])
    started = time.perf_counter()
    with LLM(settings["model"], max_batch_rows=settings["step"], **options) as llm:
        loaded = time.perf_counter()
        part = llm.engine.part(LayerwisePart)
        if settings["by_step"]:
            assert part is not None, "the weights are in memory"
            part.max_rows = settings["step"]
        found = list(llm.score(given, continuations))
        seconds = time.perf_counter() - loaded
        digest = hashlib.sha256(json.dumps([score.logprob for score in found]).encode()).hexdigest()
        stats = llm.stats
        return {
            "load seconds": loaded - started, "seconds": seconds, "digest": digest, "rows": stats.rows_computed,
            "windows": stats.weight_reads, "bytes read": stats.weight_bytes, "resident peak": resident_peak(),
            "mapped by imports": imported, "dtype": llm.dtype, "passes": llm.passes,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(scored(json.loads(sys.argv[1]))))
