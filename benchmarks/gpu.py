"""Run all GPU measurements, with random weights of real shapes and without a network.

    python benchmarks/gpu.py --sections correctness,grid,rerank,decode,kernels --data msmarco.jsonl.gz --json FILE
    python benchmarks/gpu.py --smoke --device cpu        the same code at tiny sizes, on any machine

correctness  every kernel, and whole models in three modes, compared with float32 on the CPU
grid         forward passes of 32 prompts with a shared prefix, in three modes (RadixMLP's grid)
rerank       pairs per second, peak memory and shares of time, of prefold and transformers
decode       a decode step with and without grouping, and a whole job
kernels      attention and other kernels alone, beside FlexAttention, torch's flash attention and other tile sizes

A section that fails is reported, and the other sections still run. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import click
import torch
from gpu_common import Bench
from harness import Listed, benchmark, machine, write_json

SECTIONS = ("correctness", "grid", "rerank", "decode", "kernels")


@benchmark("data", "device", "dtype", "repeats", "smoke", data=None, device="cuda", limits=False)
@click.option("--sections", type=Listed(among=SECTIONS), default=",".join(SECTIONS), show_default=True, help="Tables.")
@click.option("--models", type=Listed(), default="qwen3-0.6b,qwen3-4b,qwen3-8b", show_default=True, help="Shapes.")
def main(arguments: SimpleNamespace) -> None:
    if arguments.smoke:
        torch.set_num_threads(1)
    bench = Bench(
        torch.device(arguments.device),
        smoke=arguments.smoke,
        repeats=1 if arguments.smoke else arguments.repeats,
        models=("tiny",) if arguments.smoke else tuple(arguments.models),
        data=arguments.data,
        dtype=getattr(torch, arguments.dtype),
    )
    where = machine()
    if bench.on_gpu:
        where |= {"gpu": torch.cuda.get_device_name(bench.device), "cuda": torch.version.cuda}
        where["gpu_memory"] = torch.cuda.get_device_properties(bench.device).total_memory
    try:
        import triton

        where["triton"] = triton.__version__
    except ImportError:
        where["triton"] = None
    print(where, flush=True)
    bench.result["where"] = where
    for name in arguments.sections:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        section = __import__(f"gpu_{name}")
        bench.attempt(name, lambda section=section: section.run(bench))
        bench.result.setdefault("seconds", {})[name] = time.perf_counter() - started
        print(f"== {name} took {time.perf_counter() - started:.0f} s", flush=True)
        # After every section: a later section may fail.
        write_json(arguments.json, benchmark="gpu", **bench.result)
    if bench.failures:
        print(f"\nFAILED: {', '.join(bench.failures)}")
    sys.exit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()
