"""Times attention over slots, as generation runs it: decode with and without shared prefixes, and prefill over a store.

    python benchmarks/slots.py [--heads 9 --kv-heads 3 --head-dim 64] [--planes P] [--threads T] [--repeats N]

A run goes through all planes once, as a step does, so that K/V comes from memory; times are those of a plane. `useful
GFLOP/s` count 4 x head_dim operations for each key, query and head. `GB/s` count the K/V of the
runs that are read; where several runs cover the same slots they may exceed what memory delivers. Prefill is also timed
with the interval kernel, which packs its keys at every call. `plan` is the host's part of a step, `write` the time to
put its rows into slots.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from attention import Shape, alternate, figure
from common import machine, median, spread, table, write_json

from prefold import kernels
from prefold.attention import Heads, KeyRuns, KVStore, RowAttention, plan_slots


@dataclass(frozen=True)
class Case:
    """A step: runs of keys, and how many queries; rows and ends for the interval kernel where it can do the same."""

    name: str
    runs: KeyRuns
    queries: int
    end: np.ndarray | None = None

    @property
    def slots(self) -> int:
        return int((self.runs.start + self.runs.count).max())

    @property
    def pairs(self) -> int:
        return int((self.runs.count * (self.runs.last - self.runs.first)).sum())


class Runs:
    """Collects runs; slots are handed out as they come, each run from an even one on."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.next = 2

    def add(self, count: int, position: int, first: int, last: int) -> None:
        self.rows.append((self.next, count, position, first, last))
        self.next += count + count % 2

    def done(self) -> KeyRuns:
        return KeyRuns(*np.array(self.rows, np.int64).T.copy())


def decoding(common: int, groups: int, size: int, shared: int, own: int, tail: int) -> tuple[KeyRuns, int]:
    """`common` keys for all, `groups` of `size` queries with `shared` keys each, and each query's own in two runs."""
    runs, queries = Runs(), groups * size
    if common:
        runs.add(common, 0, 0, queries)
    for group in range(groups):
        if shared:
            runs.add(shared, common, group * size, (group + 1) * size)
        for query in range(group * size, (group + 1) * size):
            if own:
                runs.add(own, common + shared, query, query + 1)
            runs.add(tail, common + shared + own, query, query + 1)
    return runs.done(), queries


def prefill(before: int, rows: int) -> tuple[KeyRuns, int, np.ndarray]:
    """A chunk of `rows` rows of one prompt, after `before` rows that lie in the store."""
    runs = Runs()
    if before:
        runs.add(before, 0, 0, rows)
    for row in range(rows):
        runs.rows.append((runs.next + row, 1, before + row, row, rows))
    return runs.done(), rows, np.full(before + rows, before + rows)


def cases() -> list[Case]:
    return [
        Case("decode 64, 8 share 256, own 64 + 32", *decoding(0, 8, 8, 256, 64, 32)),
        Case("decode 64, unrelated, 192", *decoding(0, 64, 1, 0, 160, 32)),
        Case("decode 64, unrelated, 1024", *decoding(0, 64, 1, 0, 992, 32)),
        Case("decode 256, all share 2048, own 32", *decoding(2048, 256, 1, 0, 0, 32)),
        Case("decode 64, all share 512, 4 share 64, own 40", *decoding(512, 16, 4, 64, 8, 32)),
        Case("decode 1, 8192", *decoding(0, 1, 1, 0, 8160, 32)),
        Case("prefill 512", *prefill(0, 512)),
        Case("prefill 512 after 1536", *prefill(1536, 512)),
        Case("prefill 4096", *prefill(0, 4096)),
    ]


def heads_of(shape: Shape, dtype: torch.dtype) -> Heads:
    return Heads(shape.heads, shape.kv_heads, shape.head_dim, dtype)


def filled_store(shape: Shape, planes: int, slots: int, dtype: torch.dtype) -> KVStore:
    store = KVStore(planes, heads_of(shape, dtype), slots)
    for plane in range(planes):
        for part in torch.arange(slots).split(4096):
            _, k, v = shape.tensors(len(part), dtype)
            store.write(plane, part, k, v)
    return store


def systems_of(case: Case, shape: Shape, planes: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    store = filled_store(shape, planes, case.slots, dtype)
    plan = store.plan(case.runs, case.queries)
    q, k, v = shape.tensors(case.queries, dtype)
    scale = shape.head_dim**-0.5
    slots = torch.arange(1, case.queries + 1)

    def attend() -> None:
        for plane in range(planes):
            store.attend(plane, q, plan, scale)

    def write() -> None:
        for plane in range(planes):
            store.write(plane, slots, k, v)

    systems = {"slots": attend, "write": write}
    if case.end is not None:
        rows = np.arange(len(case.end) - case.queries, len(case.end))
        attention = RowAttention(heads_of(shape, dtype), torch.device("cpu"))
        interval = attention.plan(case.end, rows)
        _, keys, values = shape.tensors(len(case.end), dtype)

        def over_rows() -> None:
            for _ in range(planes):
                attention.attend(q, keys, values, interval, scale=scale)

        systems["interval"] = over_rows
    return systems


def measure(shape: Shape, planes: int, dtype: torch.dtype, repeats: int, only: str) -> list[dict]:
    found = []
    for case in cases():
        if only not in case.name:
            continue
        few = 2 if case.pairs > 2_000_000 else planes
        group = shape.heads // shape.kv_heads
        planning = {"plan": lambda case=case, group=group: plan_slots(case.runs, case.queries, group=group)}
        flops = case.pairs * 4 * shape.heads * shape.head_dim
        held = int(case.runs.count.sum()) * KVStore.bytes_per_slot(1, heads_of(shape, dtype))
        times = alternate(planning, repeats)
        for name, seconds in alternate(systems_of(case, shape, few, dtype), repeats).items():
            times[name] = [s / few for s in seconds]
        for system, seconds in times.items():
            more = {"flops": flops, "bytes": held} if system in ("slots", "interval") else {}
            found.append(figure(case.name, system, dtype, seconds, rows=case.queries, **more))
    return found


def row_of(entry: dict) -> list[str]:
    milliseconds = [s * 1e3 for s in entry["seconds"]]
    middle = median(milliseconds)
    rates = ["", ""]
    if "flops" in entry:
        rates = [f"{entry['flops'] / middle / 1e6:.0f}", f"{entry['bytes'] / middle / 1e6:.1f}"]
    return [entry["what"], entry["dtype"], entry["system"], f"{middle:.3f}", spread(milliseconds), *rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--planes", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="all by default")
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if kernels.load() is None:
        print(kernels.status())
    shape = Shape(options.heads, options.kv_heads, options.head_dim)
    found = []
    with torch.inference_mode():
        for dtype in options.dtype.split(","):
            found += measure(shape, options.planes, getattr(torch, dtype), options.repeats, options.only)
    print(
        f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}; ms: median (range) of {options.repeats}\n"
    )
    head = ["what", "dtype", "system", "ms", "range", "useful GFLOP/s", "GB/s"]
    print(table(head, [row_of(f) for f in found]))
    write_json(options.json, benchmark="slots", shape=vars(shape), results=found)


if __name__ == "__main__":
    main()
