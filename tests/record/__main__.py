from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from .normal import compare

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "PYTHONPATH": str(TESTS.parent),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "NO_COLOR": "1",
    "COLUMNS": "120",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where recordings differ, or could not be made."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.record", description="Record what prefold answers, or compare."
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="make a recording in a new folder")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="of it: jobs/NAME or SERVER/NAME, with * and ?"
    )
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="jobs and servers that run at once (2)")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER", help="print what differs between recordings")
    given = parser.parse_args(arguments)
    if (given.out is None) == (given.compare is None):
        parser.error("give --out or --compare")
    if given.compare is not None:
        lines = 0
        for line in compare(*given.compare):
            print(line)
            lines += 1
        return int(lines > 0)
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty")
    return record(given.out, given.only or ["*"], given.at_once)


def record(out: Path, patterns: list[str], at_once: int) -> int:
    """Makes a recording of what the patterns name; returns the exit status."""
    sys.path.insert(0, str(TESTS / "support"))  # the helpers of all tests
    os.environ |= ENVIRONMENT  # before torch is imported, here and in what jobs begin
    from .exchanges import SERVERS
    from .jobs import JOBS
    from .running import Recorder

    def chosen(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(at_once) as pool:
        recorder = Recorder(out, Path(work).resolve())
        work_of: dict[str, Callable[[], None]] = {}
        for server, one in SERVERS.items():
            names = [exchange.name for exchange in one.exchanges if chosen(f"{server}/{exchange.name}")]
            if names:
                work_of[f"{len(names)} exchanges with {server}"] = partial(recorder.exchanges, server, names)
        work_of |= {job.name: partial(recorder.job, job) for job in JOBS if chosen(f"jobs/{job.name}")}
        if not work_of:
            print("nothing has such a name", file=sys.stderr)
            return 1
        running = {pool.submit(run): name for name, run in work_of.items()}
        for number, done in enumerate(as_completed(running), 1):
            wrong = done.exception()
            failed += wrong is not None
            said = "" if wrong is None else f": {wrong!r}"
            print(f"{number}/{len(running)} {running[done]}{said}", file=sys.stderr, flush=True)
    print(f"recorded in {time.monotonic() - began:.0f} seconds", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
