"""What the benchmarks share: the machine, its limits, peers, tables."""

from __future__ import annotations

import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import prefold


def machine() -> dict:
    """What a table must say about where it was measured."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "prefold": prefold.__version__,
    }


def read_jsonl(path: str | Path) -> list[dict]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g}-{max(values):.3g}"


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def write_json(path: str | None, **content) -> None:
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


# Limits of the machine


def linear_rate(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, repeats: int = 5) -> float:
    """FLOP/s of a model's linear layers with packed weights: the best over several numbers of rows.

    shapes: (inputs, outputs) of each linear of one layer.
    """
    from prefold.model.linear import Linear

    best = 0.0
    for rows in (1024, 2048, 4096):
        layers = [Linear(torch.randn(n, k).to(dtype)) for k, n in shapes]
        inputs = [torch.randn(rows, k).to(dtype) for k, _ in shapes]
        with torch.inference_mode():
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
            for _ in range(repeats):
                started = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                seconds = time.perf_counter() - started
                best = max(best, sum(2 * rows * k * n for k, n in shapes) / seconds)
    return best


def visible_pairs(end: np.ndarray) -> int:
    """Pairs (query row, visible key row) of a stream: row j is seen by the rows j .. end[j] - 1."""
    return int((end - np.arange(len(end))).sum())


# Peers


def run_peer(python: str, system: str, job: dict) -> dict:
    """Run benchmarks/peers.py under `python`; raises with the system's own words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, out_file = Path(folder, "job.json"), Path(folder, "out.json")
        job_file.write_text(json.dumps(job))
        peers = Path(__file__).with_name("peers.py")
        done = subprocess.run(
            [python, str(peers), system, str(job_file), str(out_file)], capture_output=True, text=True, check=False
        )
        if not out_file.exists():
            raise RuntimeError(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out_file.read_text())


def export_folder(llm, folder: str | Path, dtype: torch.dtype) -> Path:
    """Write an LLM's weights as a Hugging Face folder, so that peers run the very same ones."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in llm.checkpoint.config.items() if v is not None}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    llm.tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    save_file(llm.checkpoint_tensors(dtype), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def python_of(environment: str | None) -> str:
    """The interpreter of a virtual environment, or this one."""
    return str(Path(environment, "bin", "python")) if environment else sys.executable
