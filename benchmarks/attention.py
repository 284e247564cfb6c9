"""Times attention and the element-wise operations of a layer, with the compiled kernels and with PyTorch.

    python benchmarks/attention.py [--heads 9 --kv-heads 3 --head-dim 64] [--threads T] [--repeats N] [--json FILE]

`trie` is a step of a reranking job: a head of 60 rows, 4 queries, 8 passages each. `reads` is the same with one
query row in 120, as in the last layer. `causal` is 4 plain sequences of 1024 rows, the easiest case: other benchmarks
take its rate (`attention_rate`) for the machine's limit. Useful GFLOP/s count 4 x head_dim operations for each visible
pair and head, and none for pairs that are computed and thrown away; the time includes packing keys and values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import machine, median, spread, table, visible_pairs, write_json

from prefold import kernels
from prefold.attention import Heads, RowAttention, RowPlan, plan_rows
from prefold.attention.row_attention import blocked_attention
from prefold.model.ops import PYTORCH, choose_ops


@dataclass(frozen=True)
class Shape:
    """Heads of a model and their size; hidden and intermediate for the element-wise operations."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def intermediate(self) -> int:
        return self.hidden * 8 // 3

    def tensors(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k, v as views of one fused buffer, as the model gives them."""
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        return torch.randn(rows, sum(sizes), self.head_dim).to(dtype).split(sizes, 1)


def reranker_trie(seed: int = 0) -> np.ndarray:
    """`end` of a head of 60 rows, 4 queries of 12 to 28 rows, 8 passages of 84 to 144 rows each."""
    rng = np.random.default_rng(seed)
    end: list[int] = []
    for _ in range(4):
        start, length = 60 + len(end), int(rng.integers(12, 29))
        passages = rng.integers(84, 145, 8)
        stops = start + length + np.cumsum(passages)
        end += [int(stops[-1])] * length
        end += np.repeat(stops, passages).tolist()
    return np.array([60 + len(end)] * 60 + end, np.int64)


def causal(sequences: int, length: int) -> np.ndarray:
    return np.repeat(np.arange(1, sequences + 1) * length, length)


def alternate(systems: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each system, run in turn, so that what else the machine does hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(repeats + 2):
        for name, run in systems.items():
            started = time.perf_counter()
            run()
            if turn >= 2:  # the first two warm up
                times[name].append(time.perf_counter() - started)
    return times


def attention_rate(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, repeats: int = 9) -> float:
    """The best useful FLOP/s of attention here: plain causal sequences, the fastest of `repeats` runs."""
    shape, end = Shape(heads, kv_heads, head_dim), causal(4, 1024)
    attention = attention_of(shape, dtype)
    plan = attention.plan(end, np.arange(len(end)))
    q, k, v = shape.tensors(len(end), dtype)
    seconds = alternate({"it": lambda: attention.attend(q, k, v, plan, scale=head_dim**-0.5)}, repeats)["it"]
    return visible_pairs(end) * 4 * heads * head_dim / min(seconds)


def attention_of(shape: Shape, dtype: torch.dtype) -> RowAttention:
    return RowAttention(Heads(shape.heads, shape.kv_heads, shape.head_dim, dtype), torch.device("cpu"))


def measure_attention(shape: Shape, dtype: torch.dtype, repeats: int) -> list[dict]:
    trie, plain = reranker_trie(), causal(4, 1024)
    cases = {
        "trie": (trie, np.arange(len(trie))),
        "reads": (trie, np.arange(119, len(trie), 120)),
        "causal": (plain, np.arange(len(plain))),
    }
    found = []
    for name, (end, rows) in cases.items():
        attention = attention_of(shape, dtype)
        plan = attention.plan(end, rows)
        pairs = sum(int(np.count_nonzero(end[: row + 1] > row)) for row in rows.tolist())
        q, k, v = shape.tensors(len(end), dtype)
        q = q if len(rows) == len(end) else q[torch.from_numpy(rows)]
        systems = attention_systems(attention, q, k, v, plan)
        flops = pairs * 4 * shape.heads * shape.head_dim
        for system, seconds in alternate(systems, repeats).items():
            found.append(figure(f"attention, {name}", system, dtype, seconds, rows=len(rows), flops=flops))
    return found


def attention_systems(
    attention: RowAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RowPlan
) -> dict[str, Callable]:
    scale = q.shape[-1] ** -0.5
    systems: dict[str, Callable] = {"pytorch": lambda: blocked_attention(q, k, v, plan, scale=scale)}
    if kernels.load():
        systems["compiled"] = lambda: attention.attend(q, k, v, plan, scale=scale)
    return systems


def measure_elementwise(shape: Shape, dtype: torch.dtype, repeats: int) -> list[dict]:
    rows = len(reranker_trie())
    x, delta = torch.randn(rows, shape.hidden).to(dtype), torch.zeros(rows, shape.hidden, dtype=dtype)
    q, k, _ = shape.tensors(rows, dtype)
    weight = torch.ones(shape.hidden, dtype=dtype)
    half = torch.ones(rows, shape.head_dim // 2)
    cos_sin = torch.cat((half, half * 0), 1)
    gate_up = torch.randn(rows, 2 * shape.intermediate).to(dtype)
    operations = {
        "add + RMSNorm": lambda ops: ops.add_rms_norm(x, delta, weight, 1e-5),
        "RoPE of q and k": lambda ops: (ops.rope(q, cos_sin), ops.rope(k, cos_sin)),
        "SiLU x up": lambda ops: ops.gate(gate_up, "silu"),
    }
    found = []
    for name, run in operations.items():
        systems = {"pytorch": lambda run=run: run(PYTORCH)}
        if kernels.load():
            systems["compiled"] = lambda run=run: run(choose_ops(dtype, x.device))
        for system, seconds in alternate(systems, repeats).items():
            found.append(figure(name, system, dtype, seconds, rows=rows))
    return found


def measure_planning(repeats: int) -> list[dict]:
    cases = {"plan, trie": reranker_trie(), "plan, one prompt of 100,000": causal(1, 100_000)}
    found = []
    for name, end in cases.items():
        rows = np.arange(len(end))
        seconds = alternate({"it": lambda end=end, rows=rows: plan_rows(end, rows)}, repeats)["it"]
        found.append(figure(name, "compiled" if kernels.load() else "pytorch", None, seconds, rows=len(end)))
    return found


def figure(name: str, system: str, dtype: torch.dtype | None, seconds: list[float], **more: int) -> dict:
    return {"what": name, "system": system, "dtype": str(dtype).removeprefix("torch."), "seconds": seconds, **more}


def row_of(entry: dict) -> list[str]:
    milliseconds = [s * 1e3 for s in entry["seconds"]]
    middle = median(milliseconds)
    rate = f"{entry['flops'] / middle / 1e6:.0f}" if "flops" in entry else ""
    dtype = entry["dtype"].replace("None", "")
    return [entry["what"], f"{entry['rows']:,}", dtype, entry["system"], f"{middle:.2f}", spread(milliseconds), rate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="all by default")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if kernels.load() is None:
        print(kernels.status())
    shape = Shape(options.heads, options.kv_heads, options.head_dim)
    found = measure_planning(options.repeats)
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            found += measure_attention(shape, dtype, options.repeats)
            found += measure_elementwise(shape, dtype, options.repeats)
    print(
        f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}; ms: median (range) of {options.repeats}\n"
    )
    print(table(["what", "rows", "dtype", "system", "ms", "range", "useful GFLOP/s"], [row_of(f) for f in found]))
    write_json(options.json, benchmark="attention", shape=vars(shape), results=found)


if __name__ == "__main__":
    main()
