"""Two replicas of one thread on Ray beside one process: rows, excess, balance, seconds, and what a lost replica costs.

    python benchmarks/fleet.py [CASE ...] [--rows N] [--repeats N] [--json FILE]

alone     prefix repetition, embedding: one process of one thread, one of two, a fleet of one replica and of two; the
          seconds are those between the first step and the last, without loading; systems are interleaved
two       a stream of prefix repetition with outputs on two replicas whose KV stores do not hold all prefixes: every
          policy, with its hits, beside what the simulator says of it
idle      a source that is tokenised while two replicas run: when the first step is, and what share of the time between
          its first and last step each replica has nothing to do; then with one of them 20 s late
segments  cuts streams for 2 to 1,024 replicas: rows computed twice, and the costliest segment beside the mean; no model
vllm      one shuffled job on vLLM with little room for K/V, in our order and in its own; --model FOLDER, --groups N;
          run by an interpreter that has vLLM
faults    one table with nulls and rows that fail through prefold run, Daft and Ray Data, and a fleet whose replicas are
          killed (--seeds), stopped and slow; --model FOLDER of a tiny model

Needs prefold[ray]; faults needs prefold[daft] and prefold[parquet]; vllm needs prefold[vllm] and prefold[http].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import machine, median, spread, write_json

from prefold import LLM
from prefold.prefix import RowCost, StreamCost
from prefold.stream import Spool
from prefold.types import Readout, Request

PREFIXES, PREFIX, TAIL = 64, 96, 32
MODEL = "smollm2-135m"


def prompts(rows: int, vocab: int = 40_000) -> list[np.ndarray]:
    """Prompts that share one of a few prefixes, in random order."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, vocab, (PREFIXES, PREFIX))
    tails = rng.integers(0, vocab, (rows, TAIL))
    return [
        np.concatenate((prefixes[k], tail)).astype(np.int32)
        for k, tail in zip(rng.integers(0, PREFIXES, rows), tails, strict=True)
    ]


def run(engine: Any, found: list[np.ndarray]) -> dict[str, float]:
    """The seconds between the beginning of the first step and the end of the last, and rows."""
    engine.reset_stats()
    begun: list[tuple[float, float]] = []
    with Spool() as spool:
        for number, tokens in enumerate(found):
            spool.add(Request(tokens), str(number).encode())
        unique = spool.unique_tokens()
        results = engine.run(
            spool.windows(max_tokens=1 << 20),
            Readout("last"),
            on_step=lambda step: begun.append((step.started_at, step.started_at + step.seconds)),
        )
        count = len({tag for tag, _ in results})
    assert count == len(found)
    seconds = max(stop for _, stop in begun) - min(start for start, _ in begun)
    return {"seconds": seconds, "rows": engine.stats.rows_computed, "unique": unique}


def alone(rows: int, repeats: int) -> list[dict[str, Any]]:
    from prefold.cluster.fleet import Fleet
    from prefold.cluster.ray_replicas import RayReplicas

    found = prompts(rows)
    # One process has one number of threads, so the fleets and the two processes take turns.
    options = {"dtype": "float32", "device": "cpu"}

    def fleet(count: int) -> tuple[Any, Callable[[], None]]:
        made = Fleet(RayReplicas(MODEL, options | {"threads": 1}, count=count))
        while made.num_ready < count:
            run(made, found[:64])
        return made, made.close

    def process(threads: int) -> tuple[Any, Callable[[], None]]:
        llm = LLM(MODEL, threads=threads, **options)
        run(llm.engine, found[:64])
        return llm.engine, llm.close

    systems = {
        "one process, 1 thread": lambda: process(1), "fleet, 1 replica of 1 thread": lambda: fleet(1),
        "one process, 2 threads": lambda: process(2), "fleet, 2 replicas of 1 thread": lambda: fleet(2),
    }  # fmt: skip
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, make in systems.items():
            engine, close = make()
            runs[name].append(run(engine, found))
            close()
            del engine
    table = []
    for name, some in runs.items():
        seconds = [one["seconds"] for one in some]
        table.append(
            {
                "system": name,
                "seconds": median(seconds),
                "spread": spread(seconds),
                "rounds": seconds,
                "rows": int(some[0]["rows"]),
                "excess": int(max(one["rows"] - one["unique"] for one in some)),
                "rows/s": some[0]["unique"] / median(seconds),
            }
        )
    return table


def segments(rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = max(rows, 1_000_000)
    lengths = rng.integers(64, 1024, rows).astype(np.int32)
    # A few thousand prefixes of a few hundred tokens, and templates below them.
    shared = np.minimum(
        np.minimum(lengths, np.roll(lengths, 1)), rng.choice([0, 256, 400], rows, p=[0.004, 0.2, 0.796])
    )
    shared = shared.astype(np.int32)
    shared[0] = 0
    started = time.perf_counter()
    cost = StreamCost(lengths, shared, RowCost(1.0, 1e-3, (None,)))
    made = time.perf_counter() - started
    unique = int((lengths - shared).sum(dtype=np.int64))
    table = []
    for replicas in (2, 8, 32, 128, 1024):
        for name, speeds in (("equal", [1.0] * replicas), ("1:3", [1.0, 3.0] * (replicas // 2))):
            started = time.perf_counter()
            found = cost.cut(0, rows, speeds)
            seconds = time.perf_counter() - started
            times = [cost.of(*one) / speed for one, speed in zip(found, speeds, strict=True)]
            again = sum(int(shared[a]) for a, b in found if a < b)
            ideal = cost.total / sum(speeds)
            table.append(
                {
                    "replicas": replicas, "speeds": name, "last ends, of the ideal": max(times) / ideal,
                    "rows twice": again, "of the rows": again / unique, "seconds": seconds, "prompts": rows,
                    "prepared in": made,
                }
            )  # fmt: skip
    return table


def show(table: list[dict[str, Any]]) -> None:
    names = [name for name in table[0] if name != "rounds"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in table:
        shown = (v for name, v in row.items() if name != "rounds")
        cells = (f"{v:,.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in shown)
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["segments", "alone"])
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="of the cases vllm and faults: a folder")
    parser.add_argument("--groups", type=int, default=32, help="of the case vllm: prefixes")
    parser.add_argument("--ways", default="process,http", help="of the case vllm")
    parser.add_argument("--jobs", default="shared,single", help="of the case vllm")
    parser.add_argument("--seeds", type=int, default=20, help="of the case faults")
    parser.add_argument("--parts", default="ways,replicas", help="of the case faults")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    out: dict[str, Any] = {}
    print(machine())
    for case in arguments.cases:
        print(f"\n{case}")
        if case == "vllm":
            from fleet_vllm import vllm

            out[case] = vllm(
                arguments.model, arguments.groups, arguments.repeats, ways=arguments.ways, jobs=arguments.jobs
            )
        elif case == "faults":
            from fleet_faults import faults

            out[case] = faults(arguments.rows, arguments.model, arguments.seeds, arguments.parts)
            continue
        elif case in ("two", "idle"):
            import fleet_stream

            out[case] = getattr(fleet_stream, case)(arguments.rows, arguments.repeats)
        else:
            out[case] = alone(arguments.rows, arguments.repeats) if case == "alone" else segments(arguments.rows)
        show(out[case])
    write_json(arguments.json, benchmark="fleet", **out)


if __name__ == "__main__":
    main()
