"""Measures looped and routed models.

    python benchmarks/looped.py --out FOLDER [--section NAME] [--smoke] [--device cuda] [--go-on]
    python benchmarks/looped.py --out FOLDER --report [--json FILE]

    accuracy   trains models to follow pointers (examples/looped_model.py) and asks them through `LLM`: right answers
               and visits for each way to leave
    replay     ways through a routed model: soft, the router asked before each visit, plans and templates replayed; and
               a queue of 256 requests with 1, 4 and 16 templates
    kv         generating with K/V, and each token computed from the whole text before it
    decode     generating: all visits; a given template; exits; of trained models, and of
               random ones of two blocks of a layer and (oneblock) of one block of two
    routes     trains routers (examples/looped_router.py): right answers by threshold, routes and their frequencies, how
               well a planner foretells them, routes of rows
    paths      every path of one routed model through a grid: fixed, soft, hard, templates given, with exits, and
               without K/V: times, K/V, block calls, right answers
    once       rows that are computed once for each route

Without --section all of them. The short grid comes first (one seed, few sizes), and then the whole one where the seed's
stopping rules let it go on: templates are at least 1.20 times as fast as the generic router; K/V beats none from
prompts of 128 on; the gate's accuracy is within a deviation of that of all visits. --go-on does so regardless.

Each cell is computed in a process of its own, for at most --limit seconds, and written to FOLDER as a JSON file when it
ends, whole or not at all; one that failed or was late is written down as that. What is there is not computed again;
where it was computed with other options than are given now, or does not say with which, the run ends and names it.
--report makes report.md and report.html of what is in FOLDER, and --json one file of all its cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import looped_paths
import looped_replay
import looped_report
import looped_served
import numpy as np
import torch
from common import machine, write_json
from looped_tasks import TASKS, router_folder, trained_model, trained_router


@dataclass(frozen=True)
class Cell:
    """A Cell is one measurement.

    run      returns its figures
    options  what decides these beside the cell's name, as JSON
    """

    run: Callable[[], dict[str, Any]]
    options: dict[str, Any]

    @classmethod
    def of(cls, run: Callable[[], dict[str, Any]], options: argparse.Namespace, *names: str, **more: Any) -> Cell:
        """Returns a cell whose figures depend on the device, the options of these names, and what else is given."""
        return cls(run, {name: getattr(options, name) for name in ("device", *names)} | more)


Cells = dict[str, Cell]


def accuracy_cells(options: argparse.Namespace) -> Cells:
    def one(nodes: int, seed: int) -> dict[str, Any]:
        folder, took = trained_model(options.out, nodes, seed, options.steps)
        return took | {"result": looped_served.accuracy(folder, nodes, options.device)}

    return {
        f"accuracy-{nodes}-{seed}": Cell.of(partial(one, nodes, seed), options, "steps")
        for seed in options.seeds
        for nodes in options.nodes
    }


def replay_cells(options: argparse.Namespace) -> Cells:
    given = {"repeats": options.repeats, "device": options.device}
    cells: Cells = {}
    for batch in options.batches:
        for length in options.prompts:
            for visits in options.visits:
                size = {"batch": batch, "length": length, "visits": visits}
                name = f"replay-{visits}-{batch}-{length}"
                cells[name] = Cell.of(partial(looped_replay.seed_setting, **size, **given), options, "repeats")
    for templates in (1, 4, 16):
        size = {"requests": options.queue, "batch": 16, "length": options.prompts[0], "visits": options.visits[-1]}
        run = partial(looped_replay.queue, templates=templates, **size, **given)
        cells[f"queue-{templates}"] = Cell.of(run, options, "repeats", **size)
    return cells


def kv_cells(options: argparse.Namespace) -> Cells:
    sizes = [
        (batch, prompt, out, visits)
        for batch in options.batches
        for visits in options.visits
        for prompt in options.prompts
        for out in options.outs
    ]
    return {
        f"kv-{visits}-{batch}-{prompt}-{out}": Cell.of(
            partial(looped_served.kv, batch, prompt, out, visits, options.repeats, options.device), options, "repeats"
        )
        for batch, prompt, out, visits in sizes
    }


def decode_cells(options: argparse.Namespace) -> Cells:
    def one(nodes: int | None, hidden: int, batch: int, prompt: int, out: int, blocks: int = 2) -> dict[str, Any]:
        folder = trained_model(options.out, nodes, options.seeds[0], options.steps)[0] if nodes else None
        given = (hidden, batch, prompt, out, options.repeats, options.device)
        settings = {"blocks": blocks, "dtype": options.dtype, "only": options.paths}
        return looped_served.decode(folder, nodes or 0, *given, **settings)

    cells: Cells = {}
    for batch in options.batches:
        for out in options.outs:
            for nodes in options.nodes:
                run = partial(one, nodes, 0, batch, 0, out)
                selection = {"seed": options.seeds[0]}
                cells[f"decode-trained-{nodes}-{batch}-{out}"] = Cell.of(
                    run, options, "repeats", "paths", "steps", **selection
                )
            for hidden, prompt in itertools.product(options.hidden, options.prompts):
                size = hidden, batch, prompt, out
                name = "-".join(map(str, size))
                for kind, blocks in (("random", 2), ("oneblock", 1)):
                    run = partial(one, None, *size, blocks=blocks)
                    cells[f"decode-{kind}-{name}"] = Cell.of(run, options, "repeats", "paths", "dtype")
    return {name: cell for name, cell in cells.items() if name.split("-")[1] in options.kinds}


def routes_cells(options: argparse.Namespace) -> Cells:
    def one(nodes: int, seed: int, reads: str) -> dict[str, Any]:
        return trained_router(options.out, nodes, seed, options.steps, options.router_steps, reads)

    cells: Cells = {}
    for seed in options.seeds:
        for nodes in options.nodes:
            for reads in ("request", "row"):
                run = partial(one, nodes, seed, reads)
                cells[f"routes-{reads}-{nodes}-{seed}"] = Cell.of(run, options, "steps", "router_steps")
    return cells


def paths_cells(options: argparse.Namespace) -> Cells:
    given = (options.repeats, options.device)

    def one(nodes: int, seed: int, batch: int, out: int) -> dict[str, Any]:
        trained_router(options.out, nodes, seed, options.steps, options.router_steps, "request")
        return looped_paths.trained(router_folder(options.out, "request", nodes, seed), nodes, batch, out, *given)

    cells: Cells = {}
    for seed, nodes, batch in itertools.product(options.seeds, options.nodes, options.batches):
        out = options.outs[-1]
        run = partial(one, nodes, seed, batch, out)
        cells[f"paths-trained-{nodes}-{seed}-{batch}-{out}"] = Cell.of(run, options, "repeats", "steps", "router_steps")
    grid = [list(enumerate(some)) for some in (options.visits, options.batches, options.prompts, options.outs)]
    sizes = [
        (batch, prompt, out, visits)
        for (i, visits), (j, batch), (k, prompt), (n, out) in itertools.product(*grid)
        if not options.even or (i + j + k) % len(options.outs) == n
    ]
    for batch, prompt, out, visits in sorted(sizes, key=math.prod):
        name = f"paths-random-{visits}-{batch}-{prompt}-{out}"
        run = partial(looped_paths.random, batch, prompt, out, visits, *given)
        cells[name] = Cell.of(run, options, "repeats")
    return {name: cell for name, cell in cells.items() if name.split("-")[1] in options.kinds}


def once_cells(options: argparse.Namespace) -> Cells:
    return {"once": Cell.of(partial(looped_served.once, options.device), options)}


SECTIONS: Mapping[str, Callable[[argparse.Namespace], Cells]] = {
    "replay": replay_cells,
    "kv": kv_cells,
    "accuracy": accuracy_cells,
    "decode": decode_cells,
    "routes": routes_cells,
    "paths": paths_cells,
    "once": once_cells,
}


def stops(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Returns which of the seed's stopping rules say that a long run would chase a weak signal; results: by cell."""
    found = []
    gains = [
        one["gain of templates"] for name, one in results.items() if name.startswith("replay-") and "seconds" in one
    ]
    if gains and max(gains) < 1.2:
        found.append(f"templates are at most {max(gains):.2f} times as fast as the generic router; 1.20 was asked for")
    for name, one in results.items():
        if name.startswith("kv-") and "ratio" in one and int(name.split("-")[3]) >= 128 and one["ratio"] <= 1:
            found.append(f"K/V does not beat no cache in {name}: {one['ratio']:.2f}")
    for nodes in TASKS:
        some = [
            one["result"] for name, one in results.items() if name.startswith(f"accuracy-{nodes}-") and "result" in one
        ]
        if len(some) > 1:
            fixed = [one["fixed"]["all"] for one in some]
            ways = [name for name in some[0] if name.startswith("read")]
            best = max(float(np.mean([one[way]["all"] for one in some])) for way in ways)
            if best < np.mean(fixed) - np.std(fixed):
                found.append(f"{nodes} nodes: exits are right {best:.3f} of the time, all visits {np.mean(fixed):.3f}")
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    write_json(part, **result)
    os.replace(part, path)


def compute(name: str, cell: Cell, options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Returns a cell's result: read from its file where it has been computed, else computed in a process of its own and
    written there. Exits the program where what is there has other options."""
    path = options.out / f"{name}.json"
    if not path.exists():
        print(f"{name} ...", flush=True)
        command = [sys.executable, __file__, *arguments, "--cell", name]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(options.limit)
            if code and not path.exists():
                write(path, {"failed": f"its process ended with {code}", "options": cell.options})
        except subprocess.TimeoutExpired:
            write(path, {"failed": f"it took longer than {options.limit:g} s", "options": cell.options})
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("options") != cell.options:
        of = f"was computed with {found['options']}" if "options" in found else "does not say its options"
        raise SystemExit(f"{path} {of}; asked for are {cell.options}: give another --out, or remove it")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True, help="the folder of models and cells")
    parser.add_argument("--report", action="store_true", help="write the report of what is in the folder, and end")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nodes", default="16,24")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1500, help="of the training of a model")
    parser.add_argument("--router-steps", type=int, default=400)
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a cell may take")
    parser.add_argument("--batches", default="1,8,16,64")
    parser.add_argument("--prompts", default="64,128,256,512", help="tokens of a prompt")
    parser.add_argument("--outs", default="16,32,64", help="tokens that are generated")
    parser.add_argument("--visits", default="4,8")
    parser.add_argument(
        "--even", action="store_true", help="one of --outs for each of the other sizes of `paths`, in turn"
    )
    parser.add_argument("--hidden", default="512", help="widths of the random models of `decode`")
    parser.add_argument("--dtype", default="float32", help="of these models")
    parser.add_argument(
        "--paths", default="", help="of `decode`, with ; between them, beside fixed and + exits; all unless given"
    )
    parser.add_argument("--kinds", default="trained,random,oneblock", help="of the models of `decode` and `paths`")
    parser.add_argument("--queue", type=int, default=256, help="requests of a queue")
    parser.add_argument("--repeats", type=int, default=5, help="runs that a median is of")
    parser.add_argument("--go-on", action="store_true", help="do not stop where a stopping rule says so")
    parser.add_argument("--smoke", action="store_true", help="the smallest cell of each kind, to see that it runs")
    parser.add_argument("--json", help="write all cells of the folder to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.nodes, options.seeds, options.steps, options.router_steps = "16", "0", 3, 3
        options.prompts, options.outs, options.batches, options.visits = "16", "4", "2", "4"
        options.repeats, options.queue, options.hidden = 1, 32, "32"
    for name in ("nodes", "seeds", "prompts", "outs", "batches", "visits", "hidden"):
        setattr(options, name, [int(number) for number in getattr(options, name).split(",")])
    options.paths, options.kinds = (
        [one for one in text.split(by) if one] for text, by in ((options.paths, ";"), (options.kinds, ","))
    )
    if unknown := set(options.nodes) - set(TASKS):
        parser.error(f"--nodes has {min(unknown)}; tasks have {', '.join(map(str, TASKS))} nodes")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and PyTorch sees no GPU")
    return options


def short(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options of the short grid: one seed, and the ends of what is long."""
    less = {"seeds": options.seeds[:1], "batches": options.batches[-2:-1] or options.batches}
    less |= {"prompts": options.prompts[:2], "outs": options.outs[:1], "visits": options.visits[-1:]}
    return argparse.Namespace(**{**vars(options), **less})


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 3 where a stopping rule ended the run."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cell:
        options.even = False  # it may be of the short grid
        cell = {name: one for section in SECTIONS.values() for name, one in section(options).items()}[options.cell]
        write(options.out / f"{options.cell}.json", cell.run() | {"options": cell.options})
        return 0
    sections = [options.section] if options.section else list(SECTIONS)
    if not options.report:
        print(", ".join(f"{key} {value}" for key, value in machine().items()))
        results: dict[str, dict[str, Any]] = {}
        for grid in (short(options), options):
            for section in sections:
                for name, cell in SECTIONS[section](grid).items():
                    results[name] = compute(name, cell, options, given)
                    if "failed" in results[name]:
                        print(f"{name}: {results[name]['failed']}")
            if (weak := stops(results)) and not options.go_on:
                looped_report.write(options.out, sections)
                print("stopped: " + "; ".join(weak) + ". --go-on goes on.")
                return 3
    print(looped_report.write(options.out, sections))
    write_json(options.json, benchmark="looped", cells=looped_report.read(options.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
