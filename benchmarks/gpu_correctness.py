"""Compare kernels and whole models on the device with float32 and float64 on the CPU: `correctness` of gpu.py.

An error is the norm of the difference divided by the norm of the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_common import TINY, Bench, random_model
from harness import run_engine

from prefold.checkpoint import GEOMETRIES
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.spec.requests import Readout, Request, Sampling
from prefold.spec.task import filters_of
from prefold.trie import Trie
from prefold.worker.attention import KeyRuns, visibility
from prefold.worker.torch.arrays import TorchArrays
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.attention.store import KVStore
from prefold.worker.torch.model import CausalLM
from prefold.worker.torch.ops import choose_ops
from prefold.worker.torch.worker import TorchWorker

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
MODEL_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# heads, kv_heads, head_dim, window
SHAPES = (
    (16, 8, 128, None), (32, 8, 128, None), (9, 3, 64, None), (4, 1, 256, None), (4, 1, 256, 40), (6, 2, 80, 100),
    (8, 8, 96, None), (14, 2, 64, 7),
)  # fmt: skip


class Report:
    def __init__(self, bench: Bench):
        self.bench, self.rows, self.bad = bench, [], []

    def check(self, what: str, dtype: torch.dtype, limit: float, run: Callable[[], tuple[Any, Any]]) -> None:
        """Compare the two results (found, wanted) of `run`, and record a failure or an error above the limit."""
        started = time.perf_counter()
        pair = self.bench.attempt(f"correctness {what} {dtype}", run)
        error = None if pair is None else distance(*pair)
        good = error is not None and error <= limit  # False for NaN
        if pair is not None and not good:
            self.bench.failures.append(f"correctness {what} {dtype}: {error:.1e}")
        shown = "failed" if error is None else f"{error:.1e}"
        self.rows.append([what, str(dtype).removeprefix("torch."), shown, f"{limit:.0e}", "" if good else "NO"])
        print("  ", *self.rows[-1], f"({time.perf_counter() - started:.1f} s)", flush=True)


def distance(found: Any, wanted: Any) -> float:
    found, wanted = (torch.as_tensor(x).detach().cpu().double() for x in (found, wanted))
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def run(bench: Bench) -> None:
    report = Report(bench)
    dtypes = (torch.float32, torch.bfloat16) if bench.smoke else (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        check_ops(report, bench, dtype)
        # Each shape is compiled. To save time, only bfloat16 runs all shapes.
        shapes = SHAPES if dtype == torch.bfloat16 else (SHAPES[0], SHAPES[2], SHAPES[4])
        for shape in SHAPES[:2] if bench.smoke else shapes:
            check_rows(report, bench, dtype, shape)
            check_slots(report, bench, dtype, shape)
        for shape in SHAPES[:3] if dtype == torch.bfloat16 and not bench.smoke else SHAPES[:1]:
            check_gradients(report, bench, dtype, shape)
    check_draws(report, bench)
    for name, config in ({"tiny qwen3": TINY} if bench.smoke else models()).items():
        for dtype in (torch.float32, bench.dtype):
            check_model(report, bench, name, config, dtype)
    bench.show("correctness", ["what", "dtype", "error", "limit", "wrong"], report.rows)


def check_ops(report: Report, bench: Bench, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, hidden = (20, 96) if bench.smoke else (777, 2560)
    x, delta, weight = (
        torch.randn(s, generator=generator).to(dtype) for s in ((rows, hidden), (rows, hidden), (hidden,))
    )
    heads = torch.randn(rows, 12, 128, generator=generator).to(dtype)
    norm = torch.randn(128, generator=generator).to(dtype)
    angles = torch.rand(rows, 64, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    calls = {
        "add_rms_norm": (lambda ops, x, d, w: ops.add_rms_norm(x, d, w, 1e-6)[1], (x, delta, weight)),
        "rope": (lambda ops, h, c, n: ops.rope(h, c, n, 1e-6), (heads, cos_sin, norm)),
        "rope, no norm": (lambda ops, h, c: ops.rope(h, c), (heads, cos_sin)),
        "silu_mul": (lambda ops, x: ops.gate(x, "silu"), (x,)),
        "gelu_mul": (lambda ops, x: ops.gate(x, "gelu_tanh"), (x,)),
    }
    for name, (call, tensors) in calls.items():

        def both(call=call, tensors=tensors):
            with torch.inference_mode():
                found = call(choose_ops(dtype, bench.device), *(t.to(bench.device, copy=True) for t in tensors))
                return found, call(choose_ops(torch.float32, x.device), *(t.float() for t in tensors))

        report.check(name, dtype, LIMITS[dtype], both)


def check_draws(report: Report, bench: Bench) -> None:
    """Compare tokens sampled from equal logits on the device and on the CPU, which sums in another order."""
    rows, vocab = (4, 300) if bench.smoke else (64, 151_936)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)) * 3
    keys = np.random.default_rng(8).integers(0, 2**64, rows, np.uint64)
    three = {"temperature": 1.2, "min_p": 0.02, "top_k": 100, "top_p": 0.8}
    for one in ({"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9}, three):
        filters = np.array([filters_of(Sampling(**{"temperature": 1.0} | one))] * rows, np.float64)

        def both(filters=filters):
            found = TorchArrays(bench.device).draw(logits.to(bench.device), np.arange(rows), filters, keys)
            wanted = TorchArrays(logits.device).draw(logits, np.arange(rows), filters, keys)
            return 1 + (found.cpu() != wanted).double().mean().item(), 1.0

        what = f"draw, {', '.join(f'{name} {value}' for name, value in one.items())}"
        report.check(what, torch.float32, 0.02, both)


class Step:
    """A trie of random prompts with common prefixes. Its first rows are the carried path."""

    def __init__(self, bench: Bench, shape: tuple, dtype: torch.dtype, seed: int = 0):
        self.heads, self.kv_heads, self.dim, self.window = shape
        rng = np.random.default_rng(seed)
        stem = rng.integers(0, 90, 12 if bench.smoke else 240)
        prompts = []
        for _ in range(3 if bench.smoke else 6):
            keep = int(rng.integers(len(stem) // 2, len(stem)))
            prompts.append(np.concatenate((stem[:keep], rng.integers(0, 90, int(rng.integers(1, len(stem)))))))
        trie = Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]))
        self.end, self.positions = trie.end.astype(np.int64), trie.positions.astype(np.int64)
        self.rows = len(self.end)
        self.path = len(stem) // 3
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(self.rows, heads, self.dim, generator=generator).to(dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.scale = self.dim**-0.5

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: np.ndarray, path: int = 0):
        """Run attention of the rows `queries`. The first `path` keys come from the carried path."""
        attention = RowAttention(Heads(self.heads, self.kv_heads, self.dim, q.dtype), q.device)
        plan = attention.plan(self.end, queries, self.positions, self.window, path=path)
        carried = {"path_k": k[:path], "path_v": v[:path]} if path else {}
        return attention.attend(q, k[path:], v[path:], plan, scale=self.scale, **carried)

    def wanted(self, queries: np.ndarray) -> torch.Tensor:
        """Return attention by its definition, in float64, one head at a time."""
        hidden = ~torch.from_numpy(visibility(self.end, queries, self.positions, self.window))
        q, k, v = (x.double() for x in (self.q[queries], self.k, self.v))
        group, out = self.heads // self.kv_heads, torch.empty_like(q)
        for head in range(self.heads):
            scores = (q[:, head] @ k[:, head // group].T * self.scale).masked_fill_(hidden, -torch.inf)
            out[:, head] = scores.softmax(-1) @ v[:, head // group]
        return out


def name_of(shape: tuple) -> str:
    heads, kv_heads, dim, window = shape
    return f"{heads}/{kv_heads} x {dim}" + (f", window {window}" if window else "")


def check_rows(report: Report, bench: Bench, dtype: torch.dtype, shape: tuple) -> None:
    step = Step(bench, shape, dtype)
    for what, queries in (
        ("rows", np.arange(step.path, step.rows)),
        ("read rows", np.arange(step.path, step.rows)[::17]),
    ):

        def both(queries=queries):
            q, k, v = (x.to(bench.device) for x in (step.q[queries], step.k, step.v))
            with torch.inference_mode():
                found = step.attend(q, k, v, queries, step.path)
            return found, step.wanted(queries)

        report.check(f"{what} {name_of(shape)}", dtype, LIMITS[dtype], both)


def check_gradients(report: Report, bench: Bench, dtype: torch.dtype, shape: tuple) -> None:
    step = Step(bench, shape, dtype, seed=1)
    queries = np.arange(step.rows)

    def both():
        leaves = [x.to(bench.device).requires_grad_(True) for x in (step.q, step.k, step.v)]
        out = step.attend(*leaves, queries)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        found = torch.autograd.grad((out.float() * weights.to(bench.device)).sum(), leaves)
        doubles = [x.double().requires_grad_(True) for x in (step.q, step.k, step.v)]
        group = step.heads // step.kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in doubles[1:])
        hidden = ~torch.from_numpy(visibility(step.end, queries, step.positions, step.window))
        scores = (torch.einsum("ihd,jhd->hij", doubles[0], k) * step.scale).masked_fill(hidden, -torch.inf)
        exact = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        wanted = torch.autograd.grad((exact * weights.double()).sum(), doubles)
        return tuple(torch.cat([g.detach().cpu().double().flatten() for g in all_of]) for all_of in (found, wanted))

    report.check(f"gradients {name_of(shape)}", dtype, 3 * LIMITS[dtype], both)


def check_slots(report: Report, bench: Bench, dtype: torch.dtype, shape: tuple) -> None:
    """Check attention over slots in shuffled runs. The rows after the path are queries."""
    step = Step(bench, shape, dtype, seed=3)
    rng = np.random.default_rng(4)
    pieces = np.array_split(np.arange(step.rows), 9)
    slots = np.empty(step.rows, np.int64)
    slots[np.concatenate([pieces[i] for i in rng.permutation(9)])] = np.arange(step.rows) + 1
    queries = np.arange(step.path, step.rows)
    first = np.searchsorted(queries, np.arange(step.rows))
    last = np.searchsorted(queries, step.end)
    runs = KeyRuns(slots, np.ones(step.rows, np.int64), step.positions, first, last)

    def both():
        store = KVStore([Heads(step.heads, step.kv_heads, step.dim, dtype)] * 1, step.rows + 1, bench.device)
        plan = store.plan(runs, len(queries), step.positions[queries], step.window)
        with torch.inference_mode():
            k, v, q = (x.to(bench.device) for x in (step.k, step.v, step.q[queries]))
            store.write(0, torch.from_numpy(slots).to(bench.device), k, v)
            return store.attend(0, q, plan, step.scale), step.wanted(queries)

    report.check(f"slots {name_of(shape)}", dtype, LIMITS[dtype], both)


def models() -> dict[str, dict[str, Any]]:
    small = {"num_hidden_layers": 3, "vocab_size": 512}
    gemma = GEOMETRIES["gemma3-270m"] | small | {"num_hidden_layers": 6, "sliding_window": 24}
    return {
        "tiny qwen3": TINY,
        "qwen3, 3 layers": GEOMETRIES["qwen3-0.6b"] | small,
        "llama, 3 layers": GEOMETRIES["smollm2-135m"] | small,
        "gemma3, 6 layers": gemma,
    }


def check_model(report: Report, bench: Bench, name: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Compare read-outs of all modes, and greedy tokens, with the same weights in float32 on the CPU."""
    exact = random_model(config, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype).float())
    model = CausalLM(exact.config, dtype=dtype, device=bench.device).eval()
    model.load_state_dict(exact.state_dict())
    rng = np.random.default_rng(5)
    stem = rng.integers(0, 500, 60)
    prompts = [
        np.concatenate((stem[: int(rng.integers(5, 60))], rng.integers(0, 500, int(rng.integers(1, 30))))).astype(
            np.int32
        )
        for _ in range(20)
    ]

    def vectors(model: CausalLM, mode: str, kind: str) -> np.ndarray:
        engine = ModelEngine(TorchWorker(model), EngineOptions(sharing=mode, max_batch_rows=150))
        return np.stack([r.values for r in run_engine(engine, [Request(p) for p in prompts], Readout(kind))])

    for kind in ("last", "mean"):
        wanted = vectors(exact, "off", kind)
        for mode in ("full", "mlp", "off"):
            report.check(
                f"{name}: {kind}, {mode}",
                dtype,
                MODEL_LIMITS[dtype],
                lambda m=mode, k=kind, w=wanted: (vectors(model, m, k), w),
            )
    if dtype == torch.float32:
        wanted_tokens = tokens_of(exact, prompts)
        report.check(f"{name}: greedy tokens", dtype, 0.0, lambda: (tokens_of(model, prompts), wanted_tokens))


def tokens_of(model: CausalLM, prompts: list[np.ndarray], count: int = 12) -> np.ndarray:
    options = EngineOptions(max_batch_rows=64, generation=GenerateOptions(kv_memory=1 << 26))
    engine = ModelEngine(TorchWorker(model), options)
    found: dict[int, Any] = {}
    for number, prompt in enumerate(prompts):
        request = Request(prompt, sampling=Sampling(max_tokens=count, ignore_eos=True))
        engine.generator.add(request, None, lambda answer, number=number: found.__setitem__(number, answer))
    while engine.generator.step():
        pass
    return np.array([found[number][0].tokens for number in range(len(prompts))], float)
