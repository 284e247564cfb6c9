"""Score prompts layer by layer, with weights that are larger than the memory of the process.

    python benchmarks/layerwise.py --full --json FILE

Three systems score the same prompts, each in its own process:

1. with all weights in memory;
2. layer by layer, in a process that may map --share of the weights' bytes;
3. in such a process, where each step of --step rows reads all weights again, as steps over a mapped file do.

All results must be bit-equal. The limit is the time to read the weights once per window, from the disk or from the
system's cache.

Weights are random, in bfloat16, in files of a temporary folder that are deleted at the end. --full uses the shape of
Qwen3-4B (36 layers of 2,560; 8 GB) and 2,000 records, and limits the whole process, as `ulimit -v` does. Otherwise the
model has 40 layers of 1,024 (1.1 GB), and memory that Python and its libraries have mapped does not count. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import ml_dtypes
import numpy as np
from harness import Rounds, benchmark, compared
from memory import QWEN_4B
from resident import QWEN
from safetensors.numpy import save_file

CHILD = Path(__file__).with_name("limited.py")  # imports no PyTorch
SMALL = QWEN | {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
SYSTEMS = ("all weights in memory", "layer by layer", "weights read by each step")


def shapes_of(shape: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a layer of Qwen3."""
    hidden, wide, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    attention = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
    attention |= {"o_proj": (hidden, heads), "q_norm": (dim,), "k_norm": (dim,)}
    mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    named = {f"self_attn.{name}": size for name, size in attention.items()}
    named |= {f"mlp.{name}": size for name, size in mlp.items()}
    named |= {name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"model.layers.{layer}.{name}.weight": size for name, size in named.items()}


def random_weights(seed: int, size: tuple[int, ...]) -> np.ndarray:
    """Return a matrix of small random numbers, or ones for a norm, in bfloat16."""
    if len(size) == 1:
        return np.ones(size, ml_dtypes.bfloat16)
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size, np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)


def write_model(folder: Path, shape: dict[str, Any]) -> int:
    """Write a model of random weights, a file for each layer, and return the bytes of its weights. All layers have the
    same numbers."""
    hidden, total = shape["hidden_size"], 0
    ends = {"model.embed_tokens.weight": (shape["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    parts = [ends, *(shapes_of(shape, layer) for layer in range(shape["num_hidden_layers"]))]
    places: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number:05}.safetensors"
        if number < 2:
            drawn = [random_weights(number, size) for size in part.values()]
        tensors = dict(zip(part, drawn, strict=True))
        total += sum(values.nbytes for values in drawn)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    return total


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the system's cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rate(paths: Iterable[Path], most: int = 2 << 30) -> float:
    """Return the bytes per second of reading files, over the first files with this many bytes together."""
    started, size, room = time.perf_counter(), 0, bytearray(1 << 24)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(room):
                size += count
        if size >= most:
            break
    return size / (time.perf_counter() - started)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `limited.scored` in a new process."""
    child = [sys.executable, str(CHILD), json.dumps(settings)]
    done = subprocess.run(child, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(child)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@benchmark("layers", "threads", "repeats", "smoke", repeats=1, limits=False)
@click.option("--full", is_flag=True, help="Use the shape of Qwen3-4B, and limit the whole process.")
@click.option("--records", type=int, help="Number of prompts.  [default: 2,000 with --full, else 300]")
@click.option("--shared", type=int, default=256, show_default=True, help="Tokens of the shared prefix.")
@click.option("--own", type=int, default=8, show_default=True, help="Tokens of each prompt after the prefix.")
@click.option("--step", type=int, default=2048, show_default=True, help="Rows of a step.")
@click.option(
    "--share", type=float, default=0.4, show_default=True, help="Memory limit, as a share of the weights' bytes."
)
@click.option("--dtype", default="auto", show_default=True, help="Compute dtype.")
@click.option("--folder", help="Folder for the weights.  [default: the system's temporary folder]")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    records = arguments.records or (2000 if arguments.full else 300)
    step = arguments.step
    if arguments.smoke:
        records, step = 60, 128
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        shape = QWEN_4B if arguments.full else SMALL
        weights = write_model(folder, shape | ({"num_hidden_layers": arguments.layers} if arguments.layers else {}))
        paths, size = files_of(folder), int(weights * arguments.share)
        drop(paths)
        rates = {"disk": rate(paths), "cache": rate(paths)}
        limited = {"limit": size if arguments.full else 0, "free": 0 if arguments.full else size}
        common = {
            "model": name, "dtype": arguments.dtype, "threads": arguments.threads, "records": records,
            "shared": arguments.shared, "own": arguments.own, "step": step, "by_step": False, "limit": 0, "free": 0,
        }  # fmt: skip
        settings = {
            SYSTEMS[0]: common | {"layerwise": "off"},
            SYSTEMS[1]: common | limited | {"layerwise": "auto"},
            SYSTEMS[2]: common | limited | {"layerwise": "auto", "by_step": True},
        }
        rounds, found = Rounds(f"{records:,} records"), dict[str, Any]()
        for _ in range(arguments.repeats):
            for system, given in settings.items():
                drop(paths)
                found[system] = run(given)
                rounds.add(system, found[system]["seconds"], found[system])
    if len({one["digest"] for one in found.values()}) != 1:
        raise SystemExit("the results are not bit-equal")
    by_layer = found[SYSTEMS[1]]
    limits = {where: by_layer["bytes read"] / speed for where, speed in rates.items()}
    columns = {
        "weights read, GB": {system: f"{one['bytes read'] / 1e9:.2f}" for system, one in found.items()},
        "resident at peak, GB": {system: f"{one['resident peak'] / 1e9:.2f}" for system, one in found.items()},
    }
    shown = compared(rounds.seconds, limit=limits["disk"], columns=columns)
    print(shown)
    print(f"the limit: {by_layer['bytes read'] / 1e9:.2f} GB, read at {rates['disk'] / 1e9:.2f} GB/s from the disk"
          f" (from the cache: {rates['cache'] / 1e9:.2f} GB/s, {limits['cache']:.3g} s)")  # fmt: skip
    return {
        "weight bytes": weights, "limit bytes": size, "limit is of": "the process" if arguments.full else "the model",
        "records": records, "rows": by_layer["rows"], "same bits": True, "rates": rates, "limits": limits,
        "seconds": rounds.seconds, "systems": found, "tables": {"layerwise": shown},
    }  # fmt: skip


if __name__ == "__main__":
    main()
