"""Measures looped models.

    python benchmarks/looped.py --section accuracy --out FOLDER [--nodes 16,24] [--seeds 0,1,2] [--steps N] [--smoke]
    python benchmarks/looped.py --section kv --out FOLDER [--repeats N] [--smoke]

`accuracy` trains models to follow pointers (examples/looped.py), one for each task and seed, and asks them through
`LLM`: each query is a prompt, and the token that it generates is right where it names the end of the query's chain.
`fixed` makes all visits; the others leave at a threshold of the gate.

`kv` generates with a model of random weights (width 64, 4 heads, 2 blocks of a layer that are visited in turn, batches
of 16 prompts that share nothing), and beside it computes each token from the whole text before it, as without K/V: one
pass over all texts a token, without the engine around it.

Every cell is written to FOLDER as a JSON file when it ends, and is not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, median, spread, table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import looped as example

# nodes: (chains, hops of the training)
TASKS = {16: (3, 3), 24: (4, 4)}
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
EVALUATED_GRAPHS = 64
BATCH = 16
EXAMPLE = Path(example.__file__)


def train(nodes: int, seed: int, folder: Path, steps: int, seconds: float) -> float:
    """Trains a model in a process of its own, and returns the processor seconds that it took. Raises RuntimeError."""
    chains, hops = TASKS[nodes]
    given = {"out": folder, "nodes": nodes, "chains": chains, "hops": hops, "seed": seed, "steps": steps}
    command = [sys.executable, str(EXAMPLE), *(f"--{name}={value}" for name, value in given.items())]
    before = os.times()
    done = subprocess.run(command, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"the training ended with {done.returncode}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(folder: Path, nodes: int) -> dict[str, Any]:
    """Returns the share of right answers by hops, and the visits that a query's row makes, for each way to leave."""
    from prefold import LLM
    from prefold.model.exits import RowExits, exit_visits
    from prefold.train import visit_logprobs

    chains, hops = TASKS[nodes]
    task, llm = example.Task(nodes, chains), LLM(str(folder), dtype="float32", kv_memory=1 << 28)
    visits = len(llm.config.loop.order)
    queries = example.Queries.make(task, EVALUATED_GRAPHS, hops + 1, visits, np.random.default_rng(example.HELD_OUT))
    with torch.no_grad():
        gate = visit_logprobs(llm.model, queries.batch(llm.model))[1]
    found = {}
    for name, threshold in (("fixed", 1.0), *((f"exit at {t:.2f}", t) for t in THRESHOLDS)):
        options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "exit_threshold": threshold}
        answers = llm.generate(queries.prompts, **options)
        right = np.array([answer.tokens[0] for answer in answers]) == queries.wanted[-1]
        made = exit_visits(gate, RowExits(threshold)).numpy() + 1
        found[name] = {
            "by hops": {str(far): float(right[queries.hops == far].mean()) for far in range(1, hops + 2)},
            "seen": float(right[queries.hops <= hops].mean()),
            "one more": float(right[queries.hops == hops + 1].mean()),
            "all": float(right.mean()),
            "visits": float(made.mean()),
        }
    stats = llm.stats
    found["prompt"] = {"tokens": stats.tokens, "rows": stats.rows_computed, "visits of each": visits}
    llm.close()
    return found


def cell(name: str, options: argparse.Namespace, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns a cell's result: read from its file where it has been computed, else computed and written there. What
    failed or took too long is written down as that."""
    path = options.out / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    try:
        result = compute()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        result = {"failed": str(error)}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result | {"machine": machine()}, indent=2), encoding="utf-8")
    os.replace(part, path)
    return result


def trained(nodes: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of a model that is trained, where its folder does not hold it yet."""
    folder, result, began = options.out / f"model-{nodes}-{seed}", {"steps": options.steps}, time.perf_counter()
    if not (folder / "model.safetensors").exists():
        result["training processor seconds"] = train(nodes, seed, folder, options.steps, options.limit)
    return result | {"training seconds": time.perf_counter() - began, "result": measure(folder, nodes)}


def accuracy(options: argparse.Namespace) -> str:
    """Returns the table of right answers: for each task and way to leave the mean over seeds, and the deviation."""
    lines: list[list[Any]] = []
    for nodes in options.nodes:
        cells = {
            seed: cell(f"accuracy-{nodes}-{seed}", options, partial(trained, nodes, seed, options))
            for seed in options.seeds
        }
        done = [one["result"] for one in cells.values() if "result" in one]
        for seed, one in cells.items():
            if "failed" in one:
                print(f"{nodes} nodes, seed {seed}: {one['failed']}")
        for name in done[0] if done else ():
            if name != "prompt":
                shares = {key: [one[name][key] for one in done] for key in ("seen", "one more", "all", "visits")}
                spread = {key: f"{np.mean(values):.3f} ± {np.std(values):.3f}" for key, values in shares.items()}
                lines.append([nodes, name, spread["seen"], spread["one more"], spread["all"], spread["visits"]])
        if done:
            guess = f"{1 / TASKS[nodes][0]:.3f}"
            lines.append([nodes, "an end by guessing", guess, guess, guess, ""])
    return table(["nodes", "way", "hops of training", "one hop more", "all", "visits of a query's row"], lines)


def kv_seconds(prompt: int, out: int, visits: int, repeats: int) -> dict[str, Any]:
    """Returns the seconds of generating with K/V and without, run in turn, and the bytes of K/V."""
    from prefold import LLM
    from prefold.checkpoint import Checkpoint
    from prefold.train import TrainBatch
    from prefold.worker.attend import Path as KVPath
    from prefold.worker.attend import StepAttend

    config = example.hf_config(example.Task(24, 4), 64, 4, visits)
    llm = LLM(Checkpoint.dummy(config | {"max_position_embeddings": 1024}), dtype="float32", kv_memory=1 << 29)
    rng = np.random.default_rng(prompt)
    prompts = rng.integers(0, llm.config.vocab_size, (BATCH, prompt)).tolist()
    options = {"temperature": 0.0, "ignore_eos": True}

    def with_kv() -> list[list[int]]:
        return [list(answer.tokens) for answer in llm.generate(prompts, max_tokens=out, **options)]

    @torch.inference_mode()
    def without_kv() -> list[list[int]]:
        texts, model, config = [list(text) for text in prompts], llm.model, llm.config
        for _ in range(out):
            # The last token is a place for the one to come.
            given = {"prompt_lengths": [len(texts[0])] * BATCH, "sharing": "off"}
            batch = TrainBatch.build(config, [[*text, 0] for text in texts], **given)
            rows = batch.prepared(model.device, model.dtype)
            attend = StepAttend(rows, KVPath(), config.planes, config.scale)
            hidden = model(rows.tokens, rows.positions, attend, rows.read_rows)
            for text, token in zip(texts, model.logits(hidden)[batch.target_reads].argmax(-1).tolist(), strict=True):
                text.append(token)
        return [text[prompt:] for text in texts]

    found: dict[str, list[float]] = {"with": [], "without": []}
    equal = with_kv() == without_kv()
    for _ in range(repeats):
        for name, run in (("with", with_kv), ("without", without_kv)):
            began = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - began)
    row_bytes = 2 * llm.config.kv_size * len(llm.config.planes) * 4
    llm.close()
    return {"seconds": found, "equal tokens": equal, "kv bytes": BATCH * (prompt + out - 1) * row_bytes}


def kv(options: argparse.Namespace) -> str:
    """Returns the table of generating with K/V over recomputing every text: medians, and the spread of the seconds."""
    lines = []
    for visits in (4, 8):
        for prompt in options.prompts:
            for out in options.outs:
                name, run = f"kv-{visits}-{prompt}-{out}", partial(kv_seconds, prompt, out, visits, options.repeats)
                one = cell(name, options, run)
                if "failed" in one:
                    lines.append([visits, prompt, out, one["failed"], "", "", "", ""])
                    continue
                slow, fast = (one["seconds"][name] for name in ("without", "with"))
                ratios = f"{median(slow) / median(fast):.2f}"
                shown = [f"{1e3 * median(values):.0f} ({spread([1e3 * v for v in values])})" for values in (slow, fast)]
                lines.append([visits, prompt, out, *shown, ratios, f"{one['kv bytes'] / 1e6:.1f}", one["equal tokens"]])
    return table(["visits", "prompt", "out", "ms without K/V", "ms with", "ratio", "MB of K/V", "equal tokens"], lines)


SECTIONS = {"accuracy": accuracy, "kv": kv}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of models and cells")
    parser.add_argument("--nodes", default="16,24")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a training may take")
    parser.add_argument("--prompts", default="64,128,256,512", help="tokens of a prompt")
    parser.add_argument("--outs", default="16,32,64", help="tokens that are generated")
    parser.add_argument("--repeats", type=int, default=5, help="runs that a median is of")
    parser.add_argument("--smoke", action="store_true", help="a few steps of one cell, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.nodes, options.seeds, options.steps, options.repeats = "16", "0", 3, 1
        options.prompts, options.outs = "16", "4"
    for name in ("nodes", "seeds", "prompts", "outs"):
        setattr(options, name, [int(number) for number in getattr(options, name).split(",")])
    options.out.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(SECTIONS[options.section](options))


if __name__ == "__main__":
    main()
