"""Time generation with looped models, by the rule with which rows exit the loop.

    python benchmarks/looped.py --out FOLDER --section decode --kinds random,oneblock --batches 1,8,64 --json FILE

A cell is a model, a number of sequences, and the lengths of prompts and outputs. Models:

    trained   follows pointers (examples/looped_model.py); it is trained if --out does not have it
    random    random weights: two blocks of one layer, visited alternately
    oneblock  random weights: one block of two layers

Paths:

    fixed          all visits
    template + KV  the route of all visits, given in the request
    + exits        rows exit by the gate (trained), or after 2 to 6 of 8 visits (random)

All paths of a cell take turns. TTFT is the time of a run with one token. TPOT is the rest of the time of a whole run,
divided by the number of the other tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from harness import FOLDER, NUMBERS, ROOT, Listed, benchmark, median, run_engine, spread, table, take_turns, write_json

from prefold import LLM
from prefold.checkpoint import Checkpoint
from prefold.spec.requests import Readout, Request, Sampling

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import looped_model as example  # noqa: E402

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# {nodes: (chains, hops in training)}
TASKS = {16: (3, 3), 24: (4, 4)}
EVALUATED_GRAPHS = 64
KINDS = ("trained", "random", "oneblock")


def held_out(nodes: int) -> Any:
    """Return queries about graphs that occur in no training, with up to one hop more."""
    chains, hops = TASKS[nodes]
    rng = np.random.default_rng(example.HELD_OUT)
    return example.Queries.make(example.Task(nodes, chains), EVALUATED_GRAPHS, hops + 1, 8, rng)


def train(script: str, **given: Any) -> float:
    """Run a training script of examples/. Return its processor seconds, or raise RuntimeError if it fails."""
    command = [sys.executable, str(EXAMPLES / script), *(f"--{name}={value}" for name, value in given.items())]
    before = os.times()
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def trained_with(folder: Path, **given: Any) -> bool:
    """Return whether a folder has a model that was trained with these options.

    Raise RuntimeError if its model was trained with other options.
    """
    if not (folder / "model.safetensors").exists():
        return False
    found = folder / "found.json"
    had = json.loads(found.read_text()).get("options", {}) if found.exists() else {}
    for name, value in given.items():
        if str(had.get(name)) != str(value):
            was = f"was trained with {name} {had[name]}" if name in had else f"has no record of its {name}"
            raise RuntimeError(f"{folder} {was}; but {value} is wanted; give another --out, or delete the folder")
    return True


def trained_model(out: Path, nodes: int, seed: int, steps: int) -> Path:
    """Return the folder of a model with a gate. Train the model if the folder is empty."""
    chains, hops = TASKS[nodes]
    folder = out / f"model-{nodes}-{seed}"
    given = {"nodes": nodes, "chains": chains, "hops": hops, "seed": seed, "steps": steps}
    if not trained_with(folder, **given):
        seconds = train("looped_model.py", out=folder, **given)
        print(f"training of {nodes} nodes took {seconds:.0f} processor seconds", flush=True)
    return folder


def requests(prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]] = (), **sampling: Any) -> list[Request]:
    """Return a greedy request for each prompt. `each` has further options of each request."""
    options: list[dict[str, Any]] = [{**GREEDY, **sampling, **one} for one in (each or [{}] * len(prompts))]
    pairs = zip(prompts, options, strict=True)
    return [Request(np.array(prompt, np.int32), sampling=Sampling(**one)) for prompt, one in pairs]


def tokens_of(llm: LLM, asked: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of requests, in input order. Raise the error of a request that cannot run."""
    found = []
    for answer in run_engine(llm.engine, asked, Readout("tokens"), "full"):
        if isinstance(answer, Exception):
            raise answer
        found.append(list(answer[0].tokens))
    return found


def random_config(hidden: int, visits: int, blocks: int = 2) -> dict[str, Any]:
    """Return the config.json of a model with a gate, and two layers in `blocks` blocks that are visited alternately."""
    config = example.hf_config(example.Task(24, 4), hidden, 4 if hidden < 256 else 8, visits)
    return config | {"max_position_embeddings": 1024, "loop": config["loop"] | {"blocks": blocks}}


def random_llm(
    hidden: int, visits: int, device: str, *, blocks: int = 2, dtype: str = "float32", **options: Any
) -> LLM:
    """Return an LLM with random weights."""
    config = random_config(hidden, visits, blocks)
    options |= {"cache": "off"}  # a round must not reuse rows of an earlier round
    return LLM(Checkpoint.dummy(config), dtype=dtype, device=device, kv_memory=1 << 30, **options)


def calls_of(llm: LLM, whole: Callable[[int], Any], leaving: Callable[[int], Any], out: int) -> dict[str, int]:
    """Return the block calls of a run with all visits and with exits."""
    counts = []
    for run in (whole, leaving):
        llm.engine.reset_stats()
        run(out)
        counts.append(llm.engine.reset_stats().generation)
    return {"block calls": counts[0].block_calls, "block calls with exits": counts[1].block_calls}


def decode(
    folder: Path | None,
    nodes: int,
    hidden: int,
    batch: int,
    prompt: int,
    out: int,
    repeats: int,
    device: str,
    *,
    blocks: int = 2,
    dtype: str = "float32",
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Run all paths of a cell in turn.

    Args:
        folder: A trained model. It gets real queries, and its tokens are scored. None: random weights with width
            `hidden`. Their rows exit after 2 to 6 visits, as in a trained model.
        blocks: Blocks of the random model.
        dtype: Dtype of the random model.
        only: Paths to run in addition to "fixed" and "+ exits"; empty: all.
    """

    def make(**options: Any) -> LLM:
        if folder is None:
            return random_llm(hidden, 8, device, blocks=blocks, dtype=dtype, **options)
        settings = {"dtype": "float32", "device": device, "kv_memory": 1 << 30, "cache": "off"}
        return LLM(str(folder), **settings, max_running=max(256, batch), **options)

    read, save = make(), make(looped={"exits": "save"})
    order = tuple(read.config.loop.order)
    rng = np.random.default_rng(batch)
    if folder:
        queries = held_out(nodes)
        some = rng.permutation(len(queries.prompts))[:batch]
        prompts = [queries.prompts[n] for n in some]
        wanted = queries.wanted[-1][some]
    else:
        prompts = rng.integers(0, read.config.vocab_size, (batch, prompt)).tolist()
    each: list[dict[str, Any]] = [{"exit_threshold": 0.7}] * batch
    if not folder:
        each = [{"exit_visits": tuple(rng.integers(2, 7, out).tolist())} for _ in range(batch)]
    paths: dict[str, Callable[[int], list[list[int]]]] = {
        "fixed": lambda many: tokens_of(read, requests(prompts, max_tokens=many)),
        "template + KV": lambda many: tokens_of(read, requests(prompts, max_tokens=many, route=order)),
        "+ exits": lambda many: tokens_of(save, requests(prompts, each, max_tokens=many)),
    }
    if only:
        paths = {name: path for name, path in paths.items() if name in ("fixed", "+ exits", *only)}
    ways = {(name, many): partial(path, many) for name, path in paths.items() for many in (1, out)}
    rounds = take_turns(ways, repeats)
    seconds, given = rounds.seconds, rounds.found
    found: dict[str, Any] = {
        "counts": calls_of(
            save, lambda many: tokens_of(save, requests(prompts, max_tokens=many)), paths["+ exits"], out
        )
    }
    for name in paths:
        first, whole = median(seconds[name, 1]), median(seconds[name, out])
        of_tokens = [(b - a) / max(1, out - 1) for a, b in zip(seconds[name, 1], seconds[name, out], strict=True)]
        found[name] = {
            "ttft": first,
            "tpot": (whole - first) / max(1, out - 1),
            "tpots": of_tokens,
            "seconds": seconds[name, out],
            "tokens/s": batch * out / whole,
            "as fixed": float(np.mean([a == b for a, b in zip(given[name, out], given["fixed", out], strict=True)])),
        }
        if folder:
            found[name]["right"] = float((np.array(given[name, out]) == wanted[:, None]).mean())
            found[name]["first right"] = float((np.array(given[name, out])[:, 0] == wanted).mean())
    for llm in (read, save):
        llm.close()
    return found


def cells_of(options: SimpleNamespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return {name: cell}. Names are KIND-WIDTH-BATCH-PROMPT-OUT, or trained-NODES-BATCH-OUT."""
    rest = {"repeats": options.repeats, "device": options.device, "only": options.paths}
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for batch, out in itertools.product(options.batches, options.outs):
        for nodes in options.nodes if "trained" in options.kinds else ():

            def trained(nodes: int = nodes, batch: int = batch, out: int = out) -> dict[str, Any]:
                folder = trained_model(options.out, nodes, options.seed, options.steps)
                return decode(folder, nodes, 0, batch, 0, out, **rest)

            cells[f"trained-{nodes}-{batch}-{out}"] = trained
        for hidden, prompt in itertools.product(options.hidden, options.prompts):
            for kind, blocks in (("random", 2), ("oneblock", 1)):
                if kind in options.kinds:
                    size, more = (hidden, batch, prompt, out), {"blocks": blocks, "dtype": options.dtype}
                    cells[f"{kind}-{hidden}-{batch}-{prompt}-{out}"] = partial(decode, None, 0, *size, **rest, **more)
    return cells


def lines_of(name: str, cell: dict[str, Any]) -> list[list[object]]:
    """Return the lines of a cell in the table."""
    lines = []
    for path in [key for key in cell if key != "counts"]:
        row, fixed = cell[path], cell["fixed"]
        calls = {"fixed": "block calls", "+ exits": "block calls with exits"}.get(path)
        right = f"{row['first right']:.3f} / {row['right']:.3f}" if "right" in row else ""
        lines.append([
            name, path, f"{1e3 * row['ttft']:.1f}", f"{1e3 * row['tpot']:.2f}",
            f"{1e3 * median(row['seconds']):.1f} ({spread([1e3 * one for one in row['seconds']])})",
            f"{row['tokens/s']:.0f}", f"{median(fixed['seconds']) / median(row['seconds']):.2f}",
            cell["counts"][calls] if calls else "", right, f"{row['as fixed']:.2f}",
        ])  # fmt: skip
    return lines


HEADERS = ["cell", "path", "TTFT, ms", "TPOT, ms", "end to end, ms", "tokens/s", "over fixed", "block calls",
           "right: first / all tokens", "outputs as fixed"]  # fmt: skip


@benchmark("device", "dtype", "repeats", "smoke", dtype="float32", repeats=5)
@click.option("--out", type=FOLDER, required=True, help="Folder for trained models.")
@click.option("--section", type=click.Choice(["decode"]), default="decode", show_default=True, help="Table.")
@click.option("--kinds", type=Listed(among=KINDS), default=",".join(KINDS), show_default=True, help="Models.")
@click.option(
    "--batches", type=NUMBERS, default="1,8,16,64", show_default=True, help="Numbers of sequences that decode together."
)
@click.option(
    "--prompts", type=NUMBERS, default="64,128,256,512", show_default=True, help="Lengths of prompts in tokens."
)
@click.option("--outs", type=NUMBERS, default="16,32,64", show_default=True, help="Lengths of outputs in tokens.")
@click.option("--hidden", type=NUMBERS, default="512", show_default=True, help="Widths of random models.")
@click.option("--paths", default="", help="Paths in addition to `fixed` and `+ exits`, separated by ;  [default: all]")
@click.option("--nodes", type=NUMBERS, default="16,24", show_default=True, help="Nodes of trained models' graphs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the training.")
@click.option("--steps", type=int, default=1500, show_default=True, help="Steps of the training.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    options.paths = [path for path in options.paths.split(";") if path]
    if unknown := set(options.nodes) - set(TASKS):
        raise click.UsageError(f"--nodes has {min(unknown)}; use {', '.join(map(str, TASKS))}")
    if options.smoke:
        options.nodes, options.steps, options.repeats, options.hidden = [16], 3, 1, [32]
        options.prompts, options.outs, options.batches = [16], [4], [2]
    found: dict[str, dict[str, Any]] = {}
    for name, run in cells_of(options).items():
        found[name] = run()
        print(table(HEADERS, lines_of(name, found[name])), flush=True)
        # After every cell: a later cell may fail.
        write_json(options.json, benchmark="looped", cells=found)
    shown = table(HEADERS, [line for name, cell in found.items() for line in lines_of(name, cell)])
    print(shown)
    return {"cells": found, "tables": {"decode": shown}}


if __name__ == "__main__":
    main()
