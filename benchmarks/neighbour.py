"""Times generation and reranking on a CPU beside other processes that keep the same cores busy.

    python benchmarks/neighbour.py [--rounds 3] [--neighbours 0,1,2] [--checkouts NAME=FOLDER ...] [--json FILE]

What is measured: seconds of generating `--tokens` tokens for one prompt, of a quarter as many for 64 prompts, and of
reranking `--pairs` documents for one query, each in a process that has loaded the built-in model and warmed up. What
differs is how threads wait for each other: those of prefold's kernels; and without the kernels PyTorch's, which are
OpenMP's, where OMP_WAIT_POLICY=PASSIVE lets nobody spin. The settings take turns, so that a drift of the machine's
speed hits all. Ratios are to the same setting with the fewest neighbours.

With --checkouts other versions of prefold are measured beside this one, each as it sets its threads itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SPINNING = "while True: pass"
SETTINGS: dict[str, dict[str, str]] = {
    "prefold": {},
    "PyTorch, passive": {"PREFOLD_KERNELS": "0", "OMP_WAIT_POLICY": "PASSIVE"},
}
THREADING = (
    "PREFOLD_KERNELS",
    "PREFOLD_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "OMP_NUM_THREADS",
    "KMP_BLOCKTIME",
)
# A case is not repeated once its runs have taken so long together.
MOST_SECONDS = 5.0
CASES = ("decode", "decode 64", "rerank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", default="0,1,2", help="how many other processes spin")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkouts", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="one more setting: a variable")
    parser.add_argument("--json")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return

    systems = {name: (HERE, variables) for name, variables in SETTINGS.items()}
    systems |= {pair: (HERE, dict([pair.split("=", 1)])) for pair in arguments.env}
    systems |= {name: (Path(folder), {}) for name, folder in (pair.split("=", 1) for pair in arguments.checkouts)}
    seconds: dict[tuple[int, str], dict[str, list[float]]] = {}
    for count in map(int, arguments.neighbours.split(",")):
        with spinning(count):
            for _ in range(arguments.rounds):
                for name, (folder, variables) in systems.items():
                    found = measured(folder, variables)
                    for case in CASES:
                        seconds.setdefault((count, name), {}).setdefault(case, []).append(found[case])
                    print(f"  {count} neighbours, {name}: {found}", file=sys.stderr, flush=True)
    report(seconds, arguments.json)


def report(seconds: dict[tuple[int, str], dict[str, list[float]]], path: str | None) -> None:
    from common import machine, table, write_json

    rows = []
    for (count, name), found in seconds.items():
        alone = seconds[min(count for count, of in seconds if of == name), name]
        cells = []
        for case in CASES:
            own, other = statistics.median(found[case]), statistics.median(alone[case])
            cells += [f"{own:.3f}", f"{min(found[case]):.3f}-{max(found[case]):.3f}", f"{own / other:.2f}"]
        rows.append([count, name, *cells])
    print(machine())
    headers = [part for case in CASES for part in (f"{case} s", "spread", "x")]
    print(table(["neighbours", "threads", *headers], rows))
    write_json(path, seconds=[{"neighbours": c, "setting": n, **found} for (c, n), found in seconds.items()])


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", SPINNING]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(folder: Path, variables: dict[str, str]) -> dict[str, float]:
    """What `measure` says in a process of its own, with the prefold of a folder."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADING}
    environment |= variables | {"PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, "--measure", *sys.argv[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {folder} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds of each case: the median of up to five runs in this process."""
    import time

    from prefold import LLM

    llm = LLM("smollm2-135m", dtype=arguments.dtype, cache="off")
    text = "the moon pulls on the water of the seas and so there are tides twice in a day, "
    documents = [f"{i}: {text * 4}" for i in range(arguments.pairs)]

    def decode() -> None:
        llm.generate("Tell me a long story", max_tokens=arguments.tokens, ignore_eos=True)

    def decode_many() -> None:
        llm.generate([f"Story {i}" for i in range(64)], max_tokens=max(1, arguments.tokens // 4), ignore_eos=True)

    def rerank() -> None:
        llm.rerank("what causes tides", documents)

    found = {}
    for case, run in (("decode", decode), ("decode 64", decode_many), ("rerank", rerank)):
        run()
        times: list[float] = []
        while len(times) < 5 and sum(times) < MOST_SECONDS:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        found[case] = statistics.median(times)
    return found


if __name__ == "__main__":
    main()
