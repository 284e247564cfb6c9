"""Time products of rows with a matrix, by the matrix's number format and the variant of the compiled kernels.

    python benchmarks/formats.py --variants avx512-bf16,avx2 --formats float32,bfloat16,Q8_0 --rows 1,8,512 --json FILE

A variant is a value of PREFOLD_ISA. Variants that are not in the cache are compiled. Matrices are random, 9728 x 2560,
as in the MLP of a model with 4 billion parameters. Many copies are multiplied one after the other, so that they do not
fit in a cache. Rows are bfloat16 if the variant multiplies bfloat16, else float32. Matrices of two or four bytes per
weight are packed in the dtype of the rows, or in 16 bits if that is smaller. For `int8` the rows are int8 too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from harness import NUMBERS, Listed, benchmark, median, table, timed

from prefold.kernels import Kernels, StoredRows, loader
from prefold.kernels.build import build
from prefold.kernels.compile import runnable
from prefold.worker.torch.tensors import array_of

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from blocks import dequantized, stored_bytes

OUTPUTS, INPUTS = 9728, 2560


def matrices(loaded: Kernels, kind: str, dtype: torch.dtype, copies: int) -> tuple[list, float]:
    """Return copies of a matrix in a format, and the bytes per weight."""
    if kind == "int8":
        weight = torch.randn(OUTPUTS, INPUTS)
        packed = [loaded.pack_int8(array_of(weight)) for _ in range(copies)]
    elif kind == "float32" or (kind == "bfloat16" and dtype == torch.bfloat16):
        weight = dequantized("BF16", stored_bytes("BF16", OUTPUTS, INPUTS)).to(dtype)
        packed = [loaded.pack_words(array_of(weight)) for _ in range(copies)]
    else:
        stored = "BF16" if kind == "bfloat16" else kind
        rows = StoredRows(stored, stored_bytes(stored, OUTPUTS, INPUTS))
        packed = [loaded.pack_blocks([rows], INPUTS) for _ in range(copies)]
    return packed, packed[0].nbytes / (OUTPUTS * INPUTS)


@benchmark("repeats")
@click.option("--variants", type=Listed(), default="", help="Variants of the kernels.  [default: all that run here]")
@click.option("--formats", type=Listed(), default="float32,bfloat16,int8,Q8_0,Q6_K,Q4_K", show_default=True,
              help="Number formats of the matrix.")  # fmt: skip
@click.option("--rows", type=NUMBERS, default="1,8,512", show_default=True, help="Numbers of rows of a product.")
@click.option("--copies", type=int, default=12, show_default=True, help="Number of copies of the matrix.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    runs = []
    here = {variant.name: variant for variant in runnable(loader.process.probe())}
    for name in arguments.variants or here:
        loaded = Kernels(build(flags=here[name].flags))
        dtype = torch.bfloat16 if any("bf16" in flag for flag in here[name].flags) else torch.float32
        for kind in arguments.formats:
            if (kind == "int8" and not loaded.has_int8) or (kind == "float32" and dtype == torch.bfloat16):
                continue
            every, size = matrices(loaded, kind, dtype, arguments.copies)
            for count in arguments.rows:
                x, some = array_of(torch.randn(count, INPUTS).to(dtype)), every[: 3 if count > 64 else None]

                def products(x: np.ndarray = x, some: list = some, loaded: Kernels = loaded) -> None:
                    for matrix in some:
                        loaded.linear(x, matrix, OUTPUTS)

                seconds = [taken / len(some) for taken in timed(products, arguments.repeats, warm=1)]
                runs.append({"variant": name, "format": kind, "rows": count, "bytes": size, "seconds": seconds})
    cells = [
        [run["variant"], run["format"], run["rows"], f"{run['bytes']:.2f}", f"{1e3 * median(run['seconds']):.2f}"]
        for run in runs
    ]
    print(table(["variant", "format", "rows", "bytes a weight", "ms"], cells))
    return {"outputs": OUTPUTS, "inputs": INPUTS, "runs": runs}


if __name__ == "__main__":
    main()
