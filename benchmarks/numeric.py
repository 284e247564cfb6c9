"""Times the ways in which the numbers of a job are read: in the row stream, and in the slots of the KV store.

    python benchmarks/numeric.py [--model smollm2-135m] [--layers N] [--counts 300]      with a model
    python benchmarks/numeric.py --host [--counts 1000,10000,100000]                     the host alone
    python benchmarks/numeric.py --memory [--host]                                       peak memory, not times

`stream` is the row stream, `probes` are requests that are read one by one in the slots. With --host the worker computes
nothing and returns zeros, so that the processor time (of all threads) is that of planning, laying out, and handing
out results. The ways take turns, and a ratio is the median over the rounds of a way's time by the stream's in the same
round, so that other load concerns them alike; `of the best` is the ratio of the shortest processor times.
A job is sorted before, once for all ways. Of peak memory each figure is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from common import machine, write_json

from prefold.cache import CacheOptions
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.schedule.steps import SlotResult, SlotStep, StepResult, StreamStep
from prefold.stream import Spool, Window
from prefold.types import Readout, Request
from prefold.worker.protocol import Facts, Worker

VOCAB = 49_152
WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A Shape is a kind of job. `make` is called with a generator of random numbers and the number of requests."""

    readout: Readout
    make: Callable[[np.random.Generator, int], Iterator[Request]]


def ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(10, VOCAB - 10, count, dtype=np.int32)


def rerank(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """One query of 80 tokens before documents of 40 to 160."""
    query, end = ids(rng, 80), ids(rng, 6)
    for _ in range(count):
        yield Request(np.concatenate((query, ids(rng, int(rng.integers(40, 161))), end)))


def classify(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """Examples of 600 tokens before texts of 8 to 30; one label token is read."""
    examples, end = ids(rng, 600), ids(rng, 3)
    for _ in range(count):
        tokens = np.concatenate((examples, ids(rng, int(rng.integers(8, 31))), end))
        yield Request(tokens, ids(rng, 1))


def deep(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """A template of 40 tokens, topics of 60, four documents a topic of 150, eight questions a document of 6 to 20."""
    template = ids(rng, 40)
    for number in range(count):
        if number % 32 == 0:
            topic = ids(rng, 60)
        if number % 8 == 0:
            document = ids(rng, 150)
        yield Request(np.concatenate((template, topic, document, ids(rng, int(rng.integers(6, 21))))))


def unrelated(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """Prompts of 30 to 130 tokens that share nothing."""
    for _ in range(count):
        yield Request(ids(rng, int(rng.integers(30, 131))))


def mean(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """An instruction of 20 tokens before texts of 20 to 100."""
    instruction = ids(rng, 20)
    for _ in range(count):
        yield Request(np.concatenate((instruction, ids(rng, int(rng.integers(20, 101))))))


def score(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """Four continuations of 2 to 8 tokens for each question of 60, after examples of 200."""
    examples = ids(rng, 200)
    for number in range(count):
        if number % 4 == 0:
            question = ids(rng, 60)
        target = ids(rng, int(rng.integers(2, 9)))
        yield Request(np.concatenate((examples, question, target[:-1])), target)


SHAPES = {
    "rerank": Shape(Readout("logits", ids=(9_000, 9_001)), rerank),
    "classify": Shape(Readout("logprobs"), classify),
    "deep trie": Shape(Readout("last"), deep),
    "unrelated": Shape(Readout("last"), unrelated),
    "mean": Shape(Readout("mean"), mean),
    "score": Shape(Readout("logprobs"), score),
}


class Silent(Worker):
    """A Silent worker computes nothing: what it reads are zeros."""

    facts = Facts(max_rows=4096, max_positions=1 << 20, vocab_size=VOCAB)

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        return 180_000  # as of SmolLM2 in bfloat16 and 4 GiB

    def start(self, message, prepared=None, between=None):
        return _Zeros(message)


class _Zeros:
    def __init__(self, message):
        self._message = message

    def result(self):
        message = self._message
        if isinstance(message, SlotStep):
            numbers = tuple(_zeros(some.readout, len(some.reads)) for some in message.numbers)
            return SlotResult(np.full(len(message.reads), -1), numbers=numbers)
        if isinstance(message, StreamStep):
            by_reads = message.readout.kind in ("mean", "logprobs")
            return _zeros(message.readout, len(message.reads if by_reads else message.read_rows))
        return None


def _zeros(readout: Readout, count: int) -> StepResult:
    if readout.kind == "logprobs":
        return StepResult(np.zeros(count, np.float32), np.zeros(count, bool))
    return StepResult(np.zeros((count, 2), np.float32))


def windows_of(shape: Shape, count: int) -> list[Window]:
    with Spool() as spool:
        for number, request in enumerate(shape.make(np.random.default_rng(0), count)):
            spool.add(request, number.to_bytes(4, "little"))
        return list(spool.windows(max_tokens=WINDOW_TOKENS))


Way = Callable[[ModelEngine, list[Window], Readout], Iterator]


def in_stream(engine: ModelEngine, windows: list[Window], readout: Readout) -> Iterator:
    return engine.run(windows, readout, cache_prefill=False)


def as_probes(engine: ModelEngine, windows: list[Window], readout: Readout) -> Iterator:
    return engine.run(windows, readout, cache_prefill=True)


WAYS: dict[str, Way] = {"stream": in_stream, "probes": as_probes}


def can(way: str, readout: Readout, windows: list[Window]) -> bool:
    """Returns whether a way reads all of this by itself: probes read last rows only."""
    several = readout.kind == "logprobs" and any((np.diff(window.target_offsets) != 1).any() for window in windows)
    return way != "probes" or not (readout.kind == "mean" or several)


@dataclass
class Figures:
    wall: float
    cpu: float
    rows: int
    steps: int
    results: dict[bytes, np.ndarray]


def run(way: Way, engine: ModelEngine, windows: list[Window], readout: Readout, keep: bool) -> Figures:
    fresh = [replace(window) for window in windows]  # without the properties that earlier runs computed
    engine.reset_stats()
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    results = {}
    for tag, result in way(engine, fresh, readout):
        if keep:
            results[tag] = result.values
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Figures(wall, cpu, engine.stats.rows_computed, engine.stats.steps, results)


def engine_of(worker: Worker, rows: int | None) -> ModelEngine:
    # The cache keeps nothing: K/V is freed with the last prompt that needs it.
    options = GenerateOptions(cache=CacheOptions(max_tokens=1))
    return ModelEngine(worker, EngineOptions(max_batch_rows=rows, generation=options))


def compare(
    shape: Shape, count: int, make: Callable[[], ModelEngine], ways: list[str], *, rounds: int, keep: bool
) -> list[dict]:
    """Returns the figures of each way. keep: whether results are compared with the stream's."""
    windows = windows_of(shape, count)
    ways = [way for way in ways if can(way, shape.readout, windows)]
    engines = {way: make() for way in ways}
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first is not counted
        for way in ways if turn % 2 else ways[::-1]:
            runs[way].append(run(WAYS[way], engines[way], windows, shape.readout, keep and not turn))
    expected, base = runs["stream"][0].results, runs["stream"][1:]
    rows = []
    for way in ways:
        first, *others = runs[way]
        differences = [float(np.abs(expected[tag] - values).max()) for tag, values in first.results.items()]
        pairs = list(zip(others, base, strict=True))
        rows.append(
            {
                "way": way,
                "prompts": count,
                "rows": others[0].rows,
                "steps": others[0].steps,
                "wall": statistics.median(figures.wall for figures in others),
                "wall_ratio": statistics.median(a.wall / b.wall for a, b in pairs),
                "cpu": statistics.median(figures.cpu for figures in others),
                "cpu_ratio": statistics.median(a.cpu / b.cpu for a, b in pairs),
                "best_ratio": min(figures.cpu for figures in others) / min(figures.cpu for figures in base),
                "difference": max(differences, default=None),
            }
        )
    return rows


def cells_of(name: str, row: dict) -> list[str]:
    return [
        name,
        row["way"],
        f"{row['prompts']:,}",
        f"{row['rows']:,}",
        f"{row['steps']:,}",
        f"{row['wall']:.3f}",
        f"{row['wall_ratio']:.3f}",
        f"{row['cpu']:.3f}",
        f"{row['cpu_ratio']:.3f}",
        f"{row['best_ratio']:.3f}",
        f"{1e6 * row['cpu'] / row['prompts']:.1f}",
        "" if row["difference"] is None else f"{row['difference']:.1e}",
    ]


HEAD = [
    "shape", "way", "prompts", "rows", "steps", "wall s", "ratio", "processor s", "ratio", "of the best",
    "us a prompt", "difference",
]  # fmt: skip


def maker(options: argparse.Namespace) -> Callable[[], ModelEngine]:
    if options.host:
        return lambda: engine_of(Silent(), options.max_batch_rows)
    from prefold import LLM
    from prefold.worker.local import LocalWorker

    llm = LLM(options.model, dtype=options.dtype, threads=options.threads)
    worker = llm.engine.worker
    if options.layers:
        model, config = worker.model, worker.model.config
        model.config = replace(config, layers=options.layers, planes=config.planes[: options.layers])
        model.layers = model.layers[: options.layers]
        worker = LocalWorker(model)
    return lambda: engine_of(worker, options.max_batch_rows)


def peak(options: argparse.Namespace) -> None:
    """Prints the peak of resident memory before and after one run, in MB."""
    name, way, count = options.one.split(":")
    shape = SHAPES[name]
    make = maker(options)
    windows = windows_of(shape, int(count))
    engine = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(WAYS[way], engine, windows, shape.readout, False)
    print(before / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="with a worker that computes nothing")
    parser.add_argument("--memory", action="store_true", help="peak memory in place of times")
    parser.add_argument("--counts", help="numbers of prompts (300; with --host 1000,10000,100000)")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch-rows", type=int, help="the most rows of a step")
    parser.add_argument("--layers", type=int, help="only so many layers of the model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.one:
        peak(options)
        return
    counts = [int(n) for n in (options.counts or ("1000,10000,100000" if options.host else "300")).split(",")]
    print(", ".join(f"{key} {value}" for key, value in machine().items()), "\n")
    measure = measure_memory if options.memory else measure_times
    results = measure(options, options.shapes.split(","), counts, options.ways.split(","))
    write_json(options.json, benchmark="numeric", results=results)


def measure_times(options: argparse.Namespace, shapes: list[str], counts: list[int], ways: list[str]) -> dict:
    make, results = maker(options), {}
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for name in shapes:
        for count in counts:
            rows = compare(SHAPES[name], count, make, ways, rounds=options.rounds, keep=not options.host)
            results[f"{name}:{count}"] = rows
            for row in rows:
                print("| " + " | ".join(cells_of(name, row)) + " |", flush=True)
    return results


def measure_memory(options: argparse.Namespace, shapes: list[str], counts: list[int], ways: list[str]) -> dict:
    again, results = [argument for argument in sys.argv[1:] if argument != "--memory"], {}
    for name in shapes:
        for count in counts:
            for way in ways:
                command = [sys.executable, __file__, *again, "--one", f"{name}:{way}:{count}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                before, after = map(float, done.stdout.split()[-2:])
                results[f"{name}:{way}:{count}"] = before, after
                print(f"{name:<10} {way:<8} {count:>8,} {before:8.0f} MB before {after - before:+8.0f} MB", flush=True)
    return results


if __name__ == "__main__":
    main()
