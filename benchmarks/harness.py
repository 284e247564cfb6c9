"""Shared by all benchmarks: options, the machine and its limits, systems that take turns, tables and the JSON file.

A script has a function with the decorator `@benchmark(...)`, which names the common options of the script. The function
returns the content of the JSON file. The decorator adds and prints the machine, the versions and the machine's limits.
"""

from __future__ import annotations

import functools
import gc
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch

import prefold
from prefold.worker.torch.device import settle_threads

ROOT = Path(__file__).resolve().parents[1]


# Options


class Listed(click.ParamType):
    """A list of values with commas between them."""

    name = "LIST"

    def __init__(self, kind: type = str, among: Iterable[str] = ()):
        self.kind, self.among = kind, list(among)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> list[Any]:
        if not isinstance(value, str):
            return list(value)
        found = []
        for word in filter(None, value.split(",")):
            if self.among and word not in self.among:
                self.fail(f"there is no {word!r}; use {', '.join(self.among)}", param, context)
            try:
                found.append(self.kind(word))
            except ValueError:
                self.fail(f"{word!r} is not of type {self.kind.__name__}", param, context)
        return found


NUMBERS = Listed(int)
FOLDER = click.Path(path_type=Path)

# {name: (arguments of click.option, its defaults)}
_COMMON: dict[str, dict[str, Any]] = {
    "data": {"type": FOLDER, "required": True, "help": "Folder (or file) of the data sets."},
    "model": {"default": "smollm2-135m", "help": "Model to run."},
    "layers": {"type": int, "help": "Number of layers, fewer than the model has."},
    "dtype": {"default": "bfloat16", "help": "Dtype of the weights."},
    "device": {"default": "cpu", "help": "Device to run on."},
    "threads": {"type": int, "default": torch.get_num_threads, "show_default": "PyTorch's", "help": "CPU threads."},
    "repeats": {"type": int, "default": 3, "help": "Rounds; tables show medians over them."},
    "transformers": {"is_flag": True, "help": "Run transformers too."},
    "vllm": {"metavar": "VENV", "help": "Run vLLM from this virtual environment too."},
    "llama": {"metavar": "VENV", "help": "Run llama.cpp (llama-cpp-python) from this virtual environment too."},
    "blocks": {"type": Listed(), "default": "32", "help": "Block sizes of vLLM, each in its own process."},
    "smoke": {"is_flag": True, "help": "Run once at the smallest size, to see that the script works."},
}


class _Command(click.Command):
    """A command that prints its help text with the line breaks of the docstring."""

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{self.help}\n")


def benchmark(
    *names: str, limits: bool = True, called: str = "", **defaults: Any
) -> Callable[[Callable[[SimpleNamespace], dict[str, Any] | None]], click.Command]:
    """Make a command of a script's function. The command has the common options of these names, and `--json`.

    The function gets the options as attributes, and returns the content of the JSON file (or None, if the function
    has written the file itself). The script's docstring is the help text.

    Args:
        names: Common options; see `_COMMON`.
        limits: Whether to measure the machine's limits after the run.
        called: The benchmark's name in the file (default: the script's name).
        defaults: Other defaults of common options, such as `repeats=5`.
    """

    def decorate(run: Callable[[SimpleNamespace], dict[str, Any] | None]) -> click.Command:
        script = run.__globals__
        name = called or Path(script["__file__"]).stem

        @functools.wraps(run)
        def call(**given: Any) -> None:
            arguments = SimpleNamespace(**given)
            if getattr(arguments, "threads", None):
                settle_threads(arguments.threads)
            try:
                with _exits_on_signals():
                    content = run(arguments)
            except prefold.InputError as error:
                raise click.ClickException(str(error)) from None
            if content is None:
                return
            if limits:
                dtype = getattr(torch, str(getattr(arguments, "dtype", None)), torch.float32)
                content = {"machine_limits": machine_limits(dtype, smoke=getattr(arguments, "smoke", False))} | content
            write_json(arguments.json, **{"benchmark": name} | content)
            print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
            if limits:
                print(", ".join(f"{key} {value:.4g}" for key, value in content["machine_limits"].items()))

        command: Any = call
        given = {"metavar": "FILE", "help": "Write every round to this file."}
        for option in ("json", *reversed(names)):
            settings = {"show_default": True} | _COMMON.get(option, given)
            if option in defaults:
                settings = settings | {"default": defaults[option], "required": False}
            command = click.option(f"--{option}", **settings)(command)
        return click.command(name, cls=_Command, help=script["__doc__"])(command)

    return decorate


@contextmanager
def _exits_on_signals() -> Iterator[None]:
    """Convert signals to exceptions, so that the benchmark ends its peers. A stopped peer would stay otherwise."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# The machine, and the file


def machine() -> dict[str, Any]:
    """Return the circumstances of a measurement: the date, the processor and the versions."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as f:
        cpu = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "prefold": prefold.__version__,
    }


def commit() -> str | None:
    """Return the short name of the commit, with "-dirty" if files differ from it. Return None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def command_line() -> str:
    """Return the running command as typed in the checkout, with absolute paths cut to their last part."""
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    name = f"-m {'.'.join(script.parent.parts)}" if script.name == "__main__.py" else str(script)
    files = {word for word in sys.argv[1:] if word.startswith("/") and Path(word).parent.is_dir()}
    arguments = (Path(word).name if word in files else word for word in sys.argv[1:])
    return shlex.join(["python", *name.split(" "), *arguments])


def write_json(path: str | Path | None, **content) -> None:
    """Write a benchmark's file: the machine and its versions, the commit, the command, and `content` with every round.

    `scripts/figures.py` makes the published figures from the files in `benchmarks/results/`. A list of numbers is
    written on one line. Without a path nothing is written.
    """
    if path:
        head = {"machine": machine(), "commit": commit(), "command": command_line()}
        text = json.dumps(head | content, indent=1, default=str)
        text = re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda match: "[" + re.sub(r",\n\s+", ", ", match[1]) + "]", text)
        Path(path).write_text(text + "\n", encoding="utf-8")


def read_jsonl(path: str | Path) -> list[dict]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


# Timing, tables


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g}-{max(values):.3g}"


def clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a run, and its result. If the run returns a float, that is its time."""
    started = time.perf_counter()
    found = run()
    return (found if isinstance(found, float) else time.perf_counter() - started), found


def step_seconds(run: Callable[[int], Any], tokens: int, first: int = 1) -> float:
    """Return the seconds of a decode step: a run of `tokens` tokens minus a run of the first tokens, per token.

    `run` generates this many tokens in each sequence. It may return its own seconds.
    """
    few, many = (clocked(lambda count=count: run(count))[0] for count in (first, tokens))
    return (many - few) / (tokens - first)


def timed(
    run: Callable[[], object], repeats: int, *, warm: int = 0, sync: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the seconds of each run, after `warm` untimed runs. `sync` waits for a device."""
    seconds = []
    for number in range(warm + repeats):
        sync()
        started = time.perf_counter()
        run()
        sync()
        if number >= warm:
            seconds.append(time.perf_counter() - started)
    return seconds


class Rounds:
    """The times of systems that take turns, so that a change of the machine's speed affects all of them.

    Attributes:
        seconds: {system: seconds of each round}.
        found: {system: result of its last run}.
    """

    def __init__(self, about: str = "") -> None:
        self.about = about
        self.seconds: dict[str, list[float]] = {}
        self.found: dict[str, Any] = {}

    def run(self, system: str, call: Callable[[], Any]) -> Any:
        """Time one run of a system, and return its result."""
        return self.add(system, *clocked(call))

    def add(self, system: str, seconds: float, found: Any = None) -> Any:
        """Add a run that was timed elsewhere, such as a `Peer`'s."""
        self.seconds.setdefault(system, []).append(seconds)
        self.found[system] = found
        print(f"  {self.about} round {len(self.seconds[system])}: {system}: {seconds:.4g} s", flush=True)
        return found


def take_turns(systems: Mapping[Any, Callable[[], Any]], repeats: int, *, warm: int = 1) -> Rounds:
    """Run the systems round by round, after untimed rounds.

    If a system returns a float, that is its time. As in a server, Python's garbage collector skips objects from before
    the first round, because a pass over them would delay a random system.
    """
    gc.collect()
    gc.freeze()
    rounds = Rounds()
    try:
        for number in range(warm + repeats):
            for name, run in systems.items():
                seconds, rounds.found[name] = clocked(run)
                if number >= warm:
                    rounds.seconds.setdefault(name, []).append(seconds)
    finally:
        gc.unfreeze()
    return rounds


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    cells = [[str(c) for c in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def compared(
    seconds: Mapping[str, Sequence[float]],
    *,
    limit: float | None = None,
    unit: str = "s",
    columns: Mapping[str, Mapping[str, object]] | None = None,
) -> str:
    """Return a table of medians, spread, and ratios to the first system.

    Args:
        seconds: {system: seconds of each round}.
        limit: The machine's limit, in seconds.
        unit: "s" or "ms".
        columns: {header: {system: cell}} of more columns.
    """
    first, factor, columns = next(iter(seconds)), 1e3 if unit == "ms" else 1.0, columns or {}
    headers = ["system", f"median, {unit}", "least to most", "rounds", f"time, {first} = 1"]
    headers += ["of the limit"] * (limit is not None) + list(columns)
    rows = []
    for system, values in seconds.items():
        middle = median(values)
        row = [system, f"{factor * middle:.4g}", spread([factor * one for one in values]), len(values)]
        row += [f"{middle / median(seconds[first]):.2f}"] + ([f"{limit / middle:.0%}"] if limit is not None else [])
        rows.append([*row, *(cells.get(system, "") for cells in columns.values())])
    if limit is not None:
        of_first = f"{limit / median(seconds[first]):.2f}"
        rows.append(["limit of the machine", f"{factor * limit:.4g}", "", "", of_first, "100%", *[""] * len(columns)])
    return table(headers, rows)


# Limits of the machine


def machine_limits(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> dict[str, float]:
    """Return the machine's rates: GB/s of reading memory, GFLOP/s of PyTorch's matrix product in dtype and float32.

    `smoke` selects small sizes, with meaningless rates.
    """
    size = 256 if smoke else 1024
    product = 0.0
    for kind in {dtype, torch.float32}:  # a CPU may be unable to multiply in the dtype
        a, b = (torch.randn(size, size).to(kind) for _ in range(2))
        seconds = timed(lambda a=a, b=b: a @ b, 1 if smoke else 3, warm=1)
        product = max(product, 2 * size**3 / min(seconds))
    bandwidth = read_bandwidth(1, rows=1 << 8) if smoke else read_bandwidth()
    return {"memory GB/s": bandwidth / 1e9, "product GFLOP/s": product / 1e9}


def rates_of(config, dtype: torch.dtype) -> dict[str, float]:
    """Return the best rates for a model's work: FLOP/s of linears and of attention, and bytes/s of memory."""
    return {
        "linear": linear_rate(config, dtype),
        "attention": attention_rate(config, dtype),
        "bandwidth": read_bandwidth(),
    }


def linear_rate(config, dtype: torch.dtype, repeats: int = 5) -> float:
    """Return the best FLOP/s of a model's linears with packed weights, over several numbers of rows, in one layer."""
    from prefold.worker.torch.layers import Linear

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
            # The best time of each layer: a limit that a whole model does not reach.
            seconds = 0.0
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)
                seconds += min(timed(lambda layer=layer, x=x: layer(x), repeats))
            best = max(best, sum(2 * rows * k * n for k, n in shapes) / seconds)
    return best


def attention_rate(config, dtype: torch.dtype, repeats: int = 5) -> float:
    """Return the best FLOP/s of prefold's attention kernel: causal prompts of 1,024 tokens."""
    from prefold.worker.torch.attention.heads import Heads
    from prefold.worker.torch.attention.row_attention import RowAttention

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
    """Return the FLOPs of one layer: a multiplication and an addition for each element of q k and of p v."""
    return 4.0 * pairs * config.heads * config.head_dim


def read_bandwidth(repeats: int = 5, *, rows: int = 1 << 15) -> float:
    """Return the bytes/s at which all threads read memory: the best of a sum and a matrix-vector product over 1 GiB."""
    columns = 1 << 13
    matrix = torch.ones(rows, columns, dtype=torch.float32)
    vector = torch.ones(columns)
    seconds = [*timed(lambda: matrix.sum(), repeats), *timed(lambda: torch.mv(matrix, vector), repeats)]
    return rows * columns * 4 / min(seconds)


def limit_seconds(config, trie, dtype: torch.dtype, num_reads: int | None = None) -> dict:
    """Return the machine's limit for a stream: linear FLOPs over their best rate, plus attention FLOPs over theirs.

    With `num_reads`, the last layer computes only K and V for all rows, and the rest for this many read rows.
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
    """Return the machine's limit for generating `max_tokens` tokens after each prompt, in seconds.

    generate.py has the formula, `rates_of` the rates.
    """
    from prefold.trie import Trie

    trie = Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]))
    # Equal prompts have equal outputs.
    ends, first = np.unique(trie.last_row, return_index=True)
    lengths = np.array([len(prompts[i]) for i in first])
    steps = max_tokens - 1  # the prompt's last row yields the first token, and the last token needs no row
    decode_rows = len(ends) * steps
    head = 2 * config.hidden * config.vocab_size
    flops = (trie.num_rows + decode_rows) * config.linear_flops + len(ends) * max_tokens * head
    # A decode row sees its prompt, the tokens before it and itself.
    pairs = visible_pairs(trie.end) + int(steps * lengths.sum() + len(ends) * steps * (steps + 1) // 2)
    row_bytes = len(config.planes) * 2 * config.kv_size * dtype.itemsize
    tails = len(ends) * steps * (steps + 1) // 2
    weights = (config.linear_flops + head) // 2 * dtype.itemsize  # two FLOPs per weight and row
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
        # K/V of the trie and of all running tails, and the same without sharing.
        "kv_bytes": row_bytes * (trie.num_rows + decode_rows),
        "kv_bytes_unshared": row_bytes * (sum(map(len, prompts)) + len(prompts) * steps),
    }


def visible_pairs(end: np.ndarray) -> int:
    """Count the pairs (query row, visible key row) of a stream: the rows j .. end[j] - 1 see row j."""
    return int((end - np.arange(len(end))).sum())


# Peers


class Peer:
    """Another system in its own process, which is stopped between its runs. A context manager.

    Raises RuntimeError with the end of the system's error output if the system fails.
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
                start_new_session=True,  # signals to the session reach its workers too
            )
        try:
            self.version = self._read()["version"]
        except RuntimeError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, case: str = "all") -> tuple[float, list]:
        """Return the seconds of a run, and the tokens of each output or the values of each prompt."""
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


def open_peers(
    stack: ExitStack, arguments: SimpleNamespace, job: dict[str, Any], *, files: Mapping[str, str | Path] = {}
) -> dict[str, Peer]:
    """Start the systems that the common options name. Return {name in the tables: system}.

    llama.cpp runs once for each entry of `files`, {name: GGUF file}.
    """
    wanted: list[tuple[str, str, str | None, dict[str, Any]]] = []
    if getattr(arguments, "transformers", False):
        wanted.append(("transformers, batches of 16", "transformers", None, {"batch": 16}))
    if getattr(arguments, "vllm", None):
        for size in arguments.blocks:
            options = {} if size == "default" else {"block": int(size)}
            wanted.append((f"vLLM, block {size}", "vllm", arguments.vllm, options))
    if getattr(arguments, "llama", None):
        for name, file in files.items():
            wanted.append((f"llama.cpp {name}".strip(), "llama", arguments.llama, {"gguf": str(file)}))
    opened = {}
    for name, system, environment, options in wanted:
        peer = stack.enter_context(Peer(python_of(environment), system, job | options))
        opened[f"{name} ({'llama-cpp-python' if system == 'llama' else system} {peer.version})"] = peer
    return opened


def export_folder(checkpoint, folder: str | Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint as a Hugging Face folder, so that all systems run the same weights."""
    from prefold.train import save_model
    from prefold.worker.torch.load import load_model

    return save_model(load_model(checkpoint, dtype=dtype, device="cpu", pack=False), checkpoint, folder)


def run_engine(engine, requests, readout, sharing: str | None = None) -> list:
    """Return the results of requests in input order. The run includes sorting and planning."""
    from prefold.trie import Spool

    results = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, number.to_bytes(8, "little"))
        windows = spool.windows(max_tokens=1 << 20, share=(sharing or engine.facts.sharing) == "full")
        for tag, result in engine.run(windows, readout, sharing=sharing):
            results[int.from_bytes(tag, "little")] = result
    return results


def python_of(environment: str | None) -> str:
    """Return the interpreter of a virtual environment, or this interpreter."""
    return str(Path(environment, "bin", "python")) if environment else sys.executable
