"""Score prompts in a process with limited address space, and print the seconds as JSON. `layerwise.py` runs it.

    python benchmarks/limited.py SETTINGS

SETTINGS is JSON; see `scored`. The script imports only what a user's program imports.
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
    """Limit the bytes that the process may map, as `ulimit -v` does (0: no limit)."""
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def mapped() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident_peak() -> int:
    """Return the peak of the resident bytes, without memory that was resident before this program started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def prompts(records: int, shared: int, own: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts with a shared prefix, and a continuation of each, as token ids."""
    import numpy as np

    rng = np.random.default_rng(0)
    stem = rng.integers(1000, 30_000, shared).tolist()
    every = [[*stem, *rng.integers(1000, 30_000, own).tolist()] for _ in range(records)]
    return every, [rng.integers(1000, 30_000, 2).tolist() for _ in range(records)]


def scored(settings: dict[str, Any]) -> dict[str, Any]:
    """Score the prompts. Return the seconds, a digest of the scores, and the bytes read.

    Settings:

    - model, layerwise, dtype, threads: options of LLM
    - records, shared, own: the number of prompts, and the tokens of their prefix and of the rest
    - step: rows of a step
    - by_step: whether each step reads the weights, as with a mapped file
    - limit: bytes of the address space (0: no limit)
    - free: bytes of the address space beyond what imports have mapped (0: no limit)
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
