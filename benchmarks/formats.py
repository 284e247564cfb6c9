"""Times products of rows with a matrix by the number format that it has in memory, on variants of the compiled kernels.

    python benchmarks/formats.py [--variants avx512-bf16,avx2] [--formats float32,bfloat16,Q8_0,Q4_K] [--rows 1,8,512]
        [--copies 12] [--repeats 3] [--json FILE]

A variant is named as for PREFOLD_ISA, and is compiled where it is not in the cache. Matrices are random, 9728 x 2560,
as the MLP of a model of 4 billion parameters has them; so many copies are multiplied one after the other that no cache
holds them. Rows are bfloat16 where the variant has products of bfloat16, else float32. A format of two or four bytes is
packed in the dtype of the rows, or kept in 16 bits where that is shorter; `int8` has rows of int8, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from common import machine, median, table, write_json

from prefold import kernels
from prefold.kernels import Kernels, StoredRows, loader
from prefold.kernels.build import build
from prefold.kernels.compile import runnable

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from blocks import dequantized, stored_bytes

OUTPUTS, INPUTS = 9728, 2560


def matrices(loaded: Kernels, kind: str, dtype: torch.dtype, copies: int) -> tuple[list, float]:
    """Returns a matrix in a format, several times, and its bytes a weight."""
    if kind == "int8":
        weight = torch.randn(OUTPUTS, INPUTS)
        packed = [loaded.pack_int8(weight) for _ in range(copies)]
    elif kind == "float32" or (kind == "bfloat16" and dtype == torch.bfloat16):
        weight = dequantized("BF16", stored_bytes("BF16", OUTPUTS, INPUTS)).to(dtype)
        packed = [kernels.pack_words(weight) for _ in range(copies)]
    else:
        stored = "BF16" if kind == "bfloat16" else kind
        rows = StoredRows(stored, stored_bytes(stored, OUTPUTS, INPUTS))
        packed = [loaded.pack_blocks([rows], INPUTS) for _ in range(copies)]
    return packed, packed[0].nbytes / (OUTPUTS * INPUTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", help="all that run on this machine, where it is left out")
    parser.add_argument("--formats", default="float32,bfloat16,int8,Q8_0,Q6_K,Q4_K")
    parser.add_argument("--rows", default="1,8,512")
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    runs = []
    here = {variant.name: variant for variant in runnable(loader._probe())}
    for name in arguments.variants.split(",") if arguments.variants else here:
        loaded = Kernels(build(flags=here[name].flags))
        dtype = torch.bfloat16 if any("bf16" in flag for flag in here[name].flags) else torch.float32
        for kind in arguments.formats.split(","):
            if (kind == "int8" and not loaded.has_int8) or (kind == "float32" and dtype == torch.bfloat16):
                continue
            every, size = matrices(loaded, kind, dtype, arguments.copies)
            for count in map(int, arguments.rows.split(",")):
                x, taken, some = torch.randn(count, INPUTS).to(dtype), [], every[: 3 if count > 64 else None]
                for _ in range(arguments.repeats + 1):
                    started = time.perf_counter()
                    for matrix in some:
                        loaded.linear(x, matrix, OUTPUTS)
                    taken.append((time.perf_counter() - started) / len(some))
                runs.append({"variant": name, "format": kind, "rows": count, "bytes": size, "seconds": taken[1:]})
    write_json(arguments.json, benchmark="formats", outputs=OUTPUTS, inputs=INPUTS, runs=runs)
    cells = [
        [run["variant"], run["format"], run["rows"], f"{run['bytes']:.2f}", f"{1e3 * median(run['seconds']):.2f}"]
        for run in runs
    ]
    print(table(["variant", "format", "rows", "bytes a weight", "ms"], cells))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
