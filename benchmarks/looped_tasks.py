"""The tasks that benchmarks/looped.py trains models for, and the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import looped_model as example  # noqa: E402

# nodes: (chains, hops of the training)
TASKS = {16: (3, 3), 24: (4, 4)}
EVALUATED_GRAPHS = 64


def held_out(nodes: int) -> Any:
    """Returns queries about graphs that no training has, of up to a hop more."""
    chains, hops = TASKS[nodes]
    rng = np.random.default_rng(example.HELD_OUT)
    return example.Queries.make(example.Task(nodes, chains), EVALUATED_GRAPHS, hops + 1, 8, rng)


def train(script: str, **given: Any) -> float:
    """Runs one of the trainings of examples/, and returns the processor seconds that it took. Raises RuntimeError."""
    command = [sys.executable, str(EXAMPLES / script), *(f"--{name}={value}" for name, value in given.items())]
    before = os.times()
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def trained_with(folder: Path, **given: Any) -> bool:
    """Returns whether a folder holds a model that was trained with these options; False: it holds none. Raises
    RuntimeError where it was trained with others."""
    if not (folder / "model.safetensors").exists():
        return False
    found = folder / "found.json"
    had = json.loads(found.read_text()).get("options", {}) if found.exists() else {}
    for name, value in given.items():
        if str(had.get(name)) != str(value):
            was = f"was trained with {name} {had[name]}" if name in had else f"does not say its {name}"
            raise RuntimeError(f"{folder} {was}; asked for is {value}: give another --out, or remove it")
    return True


def trained_model(out: Path, nodes: int, seed: int, steps: int) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a gated model, which is trained where there is none, and what its training took."""
    chains, hops = TASKS[nodes]
    folder = out / f"model-{nodes}-{seed}"
    took = folder / "took.json"
    given = {"nodes": nodes, "chains": chains, "hops": hops, "seed": seed, "steps": steps}
    if not trained_with(folder, **given):
        seconds = train("looped_model.py", out=folder, **given)
        took.write_text(json.dumps({"training processor seconds": seconds, "steps": steps}))
    return folder, json.loads(took.read_text()) if took.exists() else {}


def router_folder(out: Path, reads: str, nodes: int, seed: int) -> Path:
    """Returns the folder of a trained router and its model."""
    return out / f"router-{reads}-{nodes}-{seed}"


def trained_router(out: Path, nodes: int, seed: int, steps: int, router_steps: int, reads: str) -> dict[str, Any]:
    """Returns what examples/looped_router.py finds of a router, which is trained where there is none."""
    chains, hops = TASKS[nodes]
    model, _ = trained_model(out, nodes, seed, steps)
    folder = router_folder(out, reads, nodes, seed)
    given = {"chains": chains, "hops": hops, "seed": seed, "steps": router_steps, "reads": reads}
    if not trained_with(folder, **given):
        seconds = train("looped_router.py", model=model, out=folder, **given)
        (folder / "took.json").write_text(json.dumps({"training processor seconds": seconds}))
    return {name: one for name, one in json.loads((folder / "found.json").read_text()).items() if name != "options"}
