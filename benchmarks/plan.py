"""Times the planning of a batch: prefold's Trie and PrefixMap beside the index maps of PyPI's `radix-mlp`.

    python benchmarks/plan.py [--repeats N] [--json FILE]

Needs prefold only; with `pip install radix-mlp` its column appears, its maps are checked to be equivalent to ours,
and both are timed alternately in one run. `limit` is what the machine needs to copy as many bytes as the tokens
read and the maps written have, in NumPy: no planner with these outputs is faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import machine, write_json

from prefold.prefix import PrefixMap, Trie

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from books import check_books

try:
    import radix_mlp
except ImportError:
    radix_mlp = None

VOCAB = 150_000


class Case(NamedTuple):
    name: str
    tokens: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [B + 1]


def grouped(rng: np.random.Generator, num: int, length: int, groups: int, shared: int, common: int = 0) -> list:
    """`num` sequences; the first `shared` tokens are one of `groups` prefixes, the first `common` the same for all."""
    tokens = rng.integers(0, VOCAB, (num, length), dtype=np.int32)
    prefixes = rng.integers(0, VOCAB, (groups, shared), dtype=np.int32)
    prefixes[:, :common] = prefixes[0, :common]
    tokens[:, :shared] = prefixes[rng.integers(0, groups, num)]
    return list(tokens)


def mixed(rng: np.random.Generator, num_tokens: int) -> list:
    """RaggedLists: prompts out of a few templates, some of them going on from an earlier one, some repeated."""
    templates = [rng.integers(0, VOCAB, rng.integers(20, 300), dtype=np.int32) for _ in range(6)]
    sequences: list[np.ndarray] = []
    total = 0
    while total < num_tokens:
        kind = rng.random()
        if sequences and kind < 0.3:
            start = sequences[rng.integers(len(sequences))]
        else:
            start = templates[rng.integers(len(templates))]
        rest = rng.integers(0, VOCAB, 0 if kind < 0.05 else rng.integers(5, 120), dtype=np.int32)
        sequences.append(np.concatenate((start, rest))[: num_tokens - total])
        total += len(sequences[-1])
    return sequences


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)

    def case(name: str, sequences: list) -> Case:
        return Case(name, np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]))

    for percent in (0, 50, 90, 100):
        yield case(f"32 x 512, {percent} % shared", grouped(rng, 32, 512, 1, 512 * percent // 100))
    yield case("mixed trie, 16,384 tokens", mixed(rng, 16_384))
    yield case("another, 16,384 tokens", mixed(rng, 16_384))
    yield case("512 x 32, 8 groups of 20", grouped(rng, 512, 32, 8, 20, 4))
    yield case("16,384 x 1", grouped(rng, 16_384, 1, 1, 0))
    yield case("2,000 x 500, 20 groups of 300", grouped(rng, 2000, 500, 20, 300, 40))
    yield case("20,000 x 50, 200 groups of 25", grouped(rng, 20_000, 50, 200, 25, 5))
    yield case("100,000 x 10, 1,000 groups of 5", grouped(rng, 100_000, 10, 1000, 5, 2))
    yield case("10 x 100,000, 2 groups of 50,000", grouped(rng, 10, 100_000, 2, 50_000))


def systems(case: Case) -> dict[str, Callable[[], object]]:
    """What is timed, by column. Each gets its input in its own type, ready made."""
    num_tokens, num_rows = len(case.tokens), Trie.build(case.tokens, case.offsets).num_rows
    source = np.zeros(num_tokens * 12 + num_rows * 8, np.uint8)  # tokens; gather and scatter as int64
    target = np.zeros_like(source)
    found: dict[str, Callable[[], object]] = {
        "trie": lambda: Trie.build(case.tokens, case.offsets),
        "map": lambda: PrefixMap.build(case.tokens, case.offsets),
        "limit": lambda: np.copyto(target, source),
    }
    if radix_mlp is not None:
        arguments = radix_arguments(case)
        found["radix-mlp"] = lambda: radix_mlp.compute_fold_and_scatter(*arguments, pad_multiple_of=None)
    return found


def radix_arguments(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = np.arange(len(case.tokens)) - np.repeat(case.offsets[:-1], np.diff(case.offsets))
    return case.tokens.astype(np.uint32), positions.astype(np.uint32), case.offsets.astype(np.uint32)


def check(case: Case) -> None:
    """The maps are right by themselves, and those of radix-mlp but for the order of the rows."""
    trie, maps = Trie.build(case.tokens, case.offsets), PrefixMap.build(case.tokens, case.offsets)
    check_books(trie)
    assert np.array_equal(case.tokens[maps.gather], trie.tokens)
    assert np.array_equal(maps.unfold(maps.fold(case.tokens)), case.tokens)
    if radix_mlp is not None:
        _, _, scatter, gather = radix_mlp.compute_fold_and_scatter(*radix_arguments(case), pad_multiple_of=None)
        assert len(gather) == maps.num_rows, f"{case.name}: {len(gather)} rows there, {maps.num_rows} here"
        assert np.array_equal(gather[scatter], maps.gather[maps.scatter]), f"{case.name}: the maps differ"


def measure(case: Case, repeats: int, budget: float) -> dict[str, list[float]]:
    """Seconds of each system, run in turn, until `repeats` rounds are done or `budget` seconds are over."""
    runs = systems(case)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    stop = time.perf_counter() + budget
    for done in range(repeats):
        if done >= 5 and time.perf_counter() > stop:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def quartiles(times: list[float]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(times, [25, 50, 75]) * 1e3
    return float(low), float(middle), float(high)


def row_of(case: Case, repeats: int, budget: float) -> dict:
    times = measure(case, repeats, budget)
    spread = {name: quartiles(t) for name, t in times.items()}
    medians = {name: s[1] for name, s in spread.items()}
    row = {
        "case": case.name,
        "tokens": len(case.tokens),
        "rows": Trie.build(case.tokens, case.offsets).num_rows,
        "repeats": len(times["map"]),
        "median_ms": medians,
        "rounds_ms": {name: [round(1e3 * one, 4) for one in t] for name, t in times.items()},
        "quartiles_ms": {name: [s[0], s[2]] for name, s in spread.items()},
    }
    if "radix-mlp" in medians:
        row["map_over_radix_mlp"] = medians["map"] / medians["radix-mlp"]
    return row


def print_row(row: dict) -> None:
    def cell(name: str) -> str:
        if name not in row["median_ms"]:
            return f"{'-':>22}"
        low, high = row["quartiles_ms"][name]
        return f"{row['median_ms'][name]:>8.3f} ({low:.3f}-{high:.3f})".rjust(22)

    ratio = f"{row['map_over_radix_mlp']:>6.2f}" if "map_over_radix_mlp" in row else f"{'-':>6}"
    cells = "".join(map(cell, ("limit", "trie", "map", "radix-mlp")))
    print(f"{row['case']:<33}{row['tokens']:>10,}{row['rows']:>10,}{cells}{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300, help="rounds of each case, at most (300)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for a case, once 5 rounds are done (3)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    versions = {"numpy": np.__version__} | ({"radix-mlp": version("radix-mlp")} if radix_mlp else {})
    print(", ".join(f"{key} {value}" for key, value in (machine() | versions).items()))
    if radix_mlp is None:
        print("radix-mlp is not installed: no comparison (pip install radix-mlp)")
    print("ms: median (quartiles). limit: copying as many bytes. ratio: map / radix-mlp.\n")
    heads = "".join(f"{name:>22}" for name in ("limit", "trie", "map", "radix-mlp"))
    print(f"{'case':<33}{'tokens':>10}{'rows':>10}{heads}{'ratio':>6}")
    rows = []
    for case in cases():
        check(case)
        rows.append(row_of(case, options.repeats, options.seconds))
        print_row(rows[-1])
    write_json(options.json, benchmark="plan", versions=versions, results=rows)


if __name__ == "__main__":
    main()
