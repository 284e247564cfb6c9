"""Measures everything there is to measure on a GPU in one command, with random weights of real shapes and no network.

    python benchmarks/gpu.py [--sections correctness,grid,rerank,decode,kernels] [--models qwen3-0.6b,qwen3-4b,qwen3-8b]
                             [--data msmarco.jsonl.gz] [--json FILE] [--repeats 3]
    python benchmarks/gpu.py --smoke --device cpu        the same code at tiny sizes, on any machine

correctness  every kernel, and whole models in three modes, beside float32 on the CPU
grid         forward passes of 32 prompts, a shared prefix and own suffixes, in three modes (RadixMLP's grid)
rerank       pairs a second, peak memory, where the time goes; transformers beside it
decode       a step of generation with and without grouping, and a whole job
kernels      attention and the other kernels alone, beside FlexAttention, torch's flash attention and other tile sizes

A section that fails is reported, and the others are measured all the same. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from common import machine, write_json
from gpu_common import Bench

SECTIONS = ("correctness", "grid", "rerank", "decode", "kernels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-4b,qwen3-8b")
    parser.add_argument(
        "--data", help="lines of {query, passages: [{text}]}; by default pairs of such lengths are made"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    unknown = set(sections) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    if arguments.smoke:
        torch.set_num_threads(1)
    bench = Bench(
        torch.device(arguments.device),
        smoke=arguments.smoke,
        repeats=1 if arguments.smoke else arguments.repeats,
        models=("tiny",) if arguments.smoke else tuple(arguments.models.split(",")),
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
    for name in sections:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        section = __import__(f"gpu_{name}")
        bench.attempt(name, lambda section=section: section.run(bench))
        bench.result.setdefault("seconds", {})[name] = time.perf_counter() - started
        print(f"== {name} took {time.perf_counter() - started:.0f} s", flush=True)
        write_json(arguments.json, **bench.result)  # after every section: a later one may not end
    if bench.failures:
        print(f"\nFAILED: {', '.join(bench.failures)}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
