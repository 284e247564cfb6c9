"""Holds what the benchmarks share: the description of the machine, its limits, other systems, tables."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

import prefold

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict:
    """Returns what a table must say about where it was measured: the date, the processor and the versions."""
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


def commit() -> str | None:
    """Returns the short name of the checkout's commit, with "-dirty" where files differ from it; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def command_line() -> str:
    """Returns the command that runs, as one types it in the checkout. Of a file's absolute path only the last part
    stays, since the rest says nothing to others."""
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    name = f"-m {'.'.join(script.parent.parts)}" if script.name == "__main__.py" else str(script)
    files = {word for word in sys.argv[1:] if word.startswith("/") and Path(word).parent.is_dir()}
    arguments = (Path(word).name if word in files else word for word in sys.argv[1:])
    return shlex.join(["python", *name.split(" "), *arguments])


def write_json(path: str | Path | None, **content) -> None:
    """Writes the one file of a benchmark: the machine and its versions, the commit, the command, and all of `content`,
    which holds every round. Published figures are made of such files (`benchmarks/results/`, `scripts/figures.py`).

    Lists of numbers stand on one line. Nothing is written where there is no path.
    """
    if path:
        head = {"machine": machine(), "commit": commit(), "command": command_line()}
        text = json.dumps(head | content, indent=1, default=str)
        text = re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda match: "[" + re.sub(r",\n\s+", ", ", match[1]) + "]", text)
        Path(path).write_text(text + "\n", encoding="utf-8")


# Limits of the machine


def linear_rate(config, dtype: torch.dtype, repeats: int = 5) -> float:
    """FLOP/s of a model's linears with packed weights: the best over several numbers of rows, through one layer."""
    from prefold.model.layers import Linear

    q, kv = config.q_size, 2 * config.kv_size
    shapes = [
        (config.hidden, q + kv),
        (q, config.hidden),
        (config.hidden, 2 * config.intermediate),
        (config.intermediate, config.hidden),
    ]
    layers = [Linear(k, n, bias=False, dtype=dtype, device=torch.device("cpu")) for k, n in shapes]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.02)
        layer.pack()
    best = 0.0
    with torch.inference_mode():
        for rows in (768, 2048, 4096):
            inputs = [torch.randn(rows, k).to(dtype) for k, _ in shapes]
            # Layer by layer, the best of each: a limit, not what a model would see.
            seconds = 0.0
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
                seconds += min(timed(lambda layer=layer, x=x: layer(x), repeats))
            best = max(best, sum(2 * rows * k * n for k, n in shapes) / seconds)
    return best


def attention_rate(config, dtype: torch.dtype, repeats: int = 5) -> float:
    """Useful FLOP/s of our kernel where it is best: plain causal prompts of 1,024 tokens."""
    from prefold.attention import Heads, RowAttention

    rows = 4096
    end = (np.arange(rows) // 1024 + 1) * 1024
    heads = Heads(config.heads, config.kv_heads, config.head_dim, dtype)
    attention = RowAttention(heads, torch.device("cpu"))
    plan = attention.plan(end, np.arange(rows))
    q = torch.randn(rows, config.heads, config.head_dim).to(dtype)
    k, v = (torch.randn(rows, config.kv_heads, config.head_dim).to(dtype) for _ in range(2))
    with torch.inference_mode():
        attention.attend(q, k, v, plan, scale=config.scale)
        seconds = min(timed(lambda: attention.attend(q, k, v, plan, scale=config.scale), repeats))
    return attention_flops(config, visible_pairs(end)) / seconds


def attention_flops(config, pairs: int) -> float:
    """One layer: a product and a sum for each of q k and p v."""
    return 4.0 * pairs * config.heads * config.head_dim


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes/s at which all threads together read memory: the best of a sum and a matrix-vector product of 1 GiB."""
    rows, columns = 1 << 15, 1 << 13
    matrix = torch.ones(rows, columns, dtype=torch.float32)
    vector = torch.ones(columns)
    seconds = [*timed(lambda: matrix.sum(), repeats), *timed(lambda: torch.mv(matrix, vector), repeats)]
    return rows * columns * 4 / min(seconds)


def limit_seconds(config, trie, dtype: torch.dtype, num_reads: int | None = None) -> dict:
    """The machine's limit for a stream: linear FLOPs over the packed rate plus attention FLOPs over the best rate.

    num_reads: rows read, when the last layer need compute no more (K and V of all rows remain).
    """
    linear, attention = linear_rate(config, dtype), attention_rate(config, dtype)
    layer = config.linear_flops / len(config.planes)
    layers = len(config.planes)
    flops = trie.num_rows * config.linear_flops
    if num_reads is not None:
        kv = 2 * config.hidden * 2 * config.kv_size
        flops = trie.num_rows * (layer * (layers - 1) + kv) + num_reads * (layer - kv)
        layers -= 1
    pairs = visible_pairs(trie.end)
    return {
        "linear_gflops": linear / 1e9,
        "attention_gflops": attention / 1e9,
        "linear_seconds": flops / linear,
        "attention_seconds": layers * attention_flops(config, pairs) / attention,
        "seconds": flops / linear + layers * attention_flops(config, pairs) / attention,
        "all_rows_linear_seconds": trie.num_rows * config.linear_flops / linear,
    }


def generation_limit(
    config, prompts: Sequence[Sequence[int]], max_tokens: int, rates: dict[str, float], dtype: torch.dtype
) -> dict:
    """The machine's limit for prompts continued greedily by `max_tokens` tokens each, in seconds; see generate.py.

    rates: "linear" and "attention" in FLOP/s, "bandwidth" in bytes/s; dtype: of weights and K/V.
    """
    from prefold.prefix import Trie

    trie = Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]))
    # Prompts that are the same go on in the same way.
    ends, first = np.unique(trie.last_row, return_index=True)
    lengths = np.array([len(prompts[i]) for i in first])
    steps = max_tokens - 1  # the first token comes out of the prompt's last row, and the last one is no row
    decode_rows = len(ends) * steps
    head = 2 * config.hidden * config.vocab_size
    flops = (trie.num_rows + decode_rows) * config.linear_flops + len(ends) * max_tokens * head
    # A decode row sees its prompt, the tokens before it and itself.
    pairs = visible_pairs(trie.end) + int(steps * lengths.sum() + len(ends) * steps * (steps + 1) // 2)
    row_bytes = len(config.planes) * 2 * config.kv_size * dtype.itemsize
    tails = len(ends) * steps * (steps + 1) // 2
    weights = (config.linear_flops + head) // 2 * dtype.itemsize  # two operations of a row for each
    moved = steps * weights + row_bytes * (steps * trie.num_rows + tails)
    parts = {
        "linear_seconds": flops / rates["linear"],
        "attention_seconds": len(config.planes) * attention_flops(config, pairs) / rates["attention"],
        "bytes_seconds": moved / rates["bandwidth"],
    }
    return parts | {
        "seconds": sum(parts.values()),
        "prompt_tokens": sum(map(len, prompts)),
        "prompt_rows": trie.num_rows,
        "decode_rows": decode_rows,
        # What the trie and all running tails take, and what they would without sharing.
        "kv_bytes": row_bytes * (trie.num_rows + decode_rows),
        "kv_bytes_unshared": row_bytes * (sum(map(len, prompts)) + len(prompts) * steps),
    }


def visible_pairs(end: np.ndarray) -> int:
    """Pairs (query row, visible key row) of a stream: row j is seen by the rows j .. end[j] - 1."""
    return int((end - np.arange(len(end))).sum())


# Peers


def run_peer(python: str, system: str, job: dict, repeats: int = 1) -> dict:
    """Returns the seconds of each run of a system in a process of its own, what the last one found, and the version."""
    with Peer(python, system, job) as peer:
        runs = [peer.run() for _ in range(repeats)]
        return {"seconds": [seconds for seconds, _ in runs], "values": runs[-1][1], "version": peer.version}


class Peer:
    """A system that scores or generates, in a process of its own that stays; it is stopped between its runs, so that it
    takes no processor.

    Raises RuntimeError with the system's own words when it does not start or fails. A context manager.
    """

    def __init__(self, python: str, system: str, job: dict):
        self._folder = tempfile.TemporaryDirectory()
        job_file, self._errors = Path(self._folder.name, "job.json"), Path(self._folder.name, "errors.txt")
        job_file.write_text(json.dumps(job))
        self._system = system
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("peers.py")), system, str(job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # its workers are stopped and ended with it
            )
        try:
            self.version = self._read()["version"]
        except RuntimeError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, case: str = "all") -> tuple[float, list]:
        """Returns the seconds, and what was found: the tokens of each output, or the values of each prompt."""
        self._signal(signal.SIGCONT)
        print(case, file=self._process.stdin, flush=True)
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer["seconds"], answer["found"]

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"{self._system} failed with status {status}:\n{self._errors.read_text()[-4000:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def export_folder(checkpoint, folder: str | Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint's weights as a Hugging Face folder, so that peers run the very same ones."""
    from prefold.model import load_model
    from prefold.train import save_model

    return save_model(load_model(checkpoint, dtype=dtype, device="cpu", pack=False), checkpoint, folder)


def run_engine(engine, requests, readout, sharing: str | None = None) -> list:
    """Results of requests in their order; the time to sort them and to plan is part of the run."""
    from prefold.stream import Spool

    results = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, number.to_bytes(8, "little"))
        windows = spool.windows(max_tokens=1 << 20, share=(sharing or engine.facts.sharing) == "full")
        for tag, result in engine.run(windows, readout, sharing=sharing):
            results[int.from_bytes(tag, "little")] = result
    return results


def python_of(environment: str | None) -> str:
    """The interpreter of a virtual environment, or this one."""
    return str(Path(environment, "bin", "python")) if environment else sys.executable
