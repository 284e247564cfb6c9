"""Time RadixMLP's grid, and compare it with the published times (H100, fp16): the section `grid` of gpu.py."""

from __future__ import annotations

import time
from functools import partial

from gpu_common import Bench, floor_seconds, forward, grid_prompts, one_step, trie_of
from harness import clocked, median

from prefold.spec.requests import Readout

MODES = ("full", "mlp", "off")
# Milliseconds at 32 x (2048 + 256): published times of off and mlp, and the target of full on an H200.
PUBLISHED = {"qwen3-0.6b": (394, 144, 35), "qwen3-4b": (1656, 400, 170), "qwen3-8b": (2866, 576, 310)}
PREFIXES, SUFFIXES = (256, 512, 1024, 2048, 4096), (64, 128, 256, 512)
# Maximum seconds per model. The cell with published times runs first.
BUDGET = 150.0


def run(bench: Bench) -> None:
    for name in bench.models:
        bench.attempt(f"grid {name}", lambda name=name: measure(bench, name))


def measure(bench: Bench, name: str) -> None:
    model = bench.model(name)
    batch = 4 if bench.smoke else 32
    prefixes, suffixes = ((24,), (8,)) if bench.smoke else (PREFIXES, SUFFIXES)
    cells = [(p, s) for p in prefixes for s in suffixes]
    if not bench.smoke:
        cells = [(2048, 256), *(cell for cell in cells if cell != (2048, 256))]
    print(f"{name}: {batch} prompts, forward of all rows, {bench.dtype}", flush=True)
    rows, started = [], time.perf_counter()
    for prefix, suffix in cells:
        if time.perf_counter() - started > BUDGET:
            print("  out of time for further cells", flush=True)
            break
        prompts = grid_prompts(batch, prefix, suffix, min(model.config.vocab_size, 100_000))
        times, planned = {}, {}
        for mode in MODES:
            plan = partial(bench.attempt, f"plan {mode}", partial(one_step, model, prompts, mode, Readout("last")))
            planned[mode], step = clocked(plan)
            found = bench.attempt(
                f"grid {name} {prefix}+{suffix} {mode}",
                lambda step=step: bench.seconds(lambda: forward(model, step)),
            )
            times[mode] = median(found) if found else float("nan")
        full, off = trie_of(prompts), trie_of(prompts, share=False)
        floor = floor_seconds(bench, model.config, full)
        rows.append(
            [
                prefix,
                suffix,
                *(f"{1e3 * times[mode]:.1f}" for mode in MODES),
                f"{times['off'] / times['mlp']:.2f}",
                f"{times['off'] / times['full']:.2f}",
                f"{floor_seconds(bench, model.config, off) / floor:.2f}",
                f"{1e3 * floor:.1f}",
                f"{floor / times['full']:.0%}",
                f"{1e3 * planned['full']:.1f}",
            ]
        )
        print("  ", *rows[-1], flush=True)
    headers = ["prefix", "suffix", *(f"{m} ms" for m in MODES), "off/mlp", "off/full", "cap", "floor ms", "of floor"]
    bench.show("grid", [*headers, "planned ms"], rows, model=name, dtype=str(bench.dtype))
    if name in PUBLISHED and rows:
        off, mlp, wanted = PUBLISHED[name]
        print(f"  published at 2048 + 256 (H100, fp16): off {off} ms, mlp {mlp} ms; full is to take {wanted} ms here")
