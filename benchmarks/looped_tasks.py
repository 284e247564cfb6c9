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
import looped as example  # noqa: E402

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


def trained_model(out: Path, nodes: int, seed: int, steps: int) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a gated model, which is trained where there is none, and what its training took."""
    chains, hops = TASKS[nodes]
    folder = out / f"model-{nodes}-{seed}"
    took = folder / "took.json"
    if not (folder / "model.safetensors").exists():
        seconds = train("looped.py", out=folder, nodes=nodes, chains=chains, hops=hops, seed=seed, steps=steps)
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
    if not (folder / "found.json").exists():
        given = {"model": model, "out": folder, "chains": chains, "hops": hops, "seed": seed, "steps": router_steps}
        seconds = train("looped_router.py", **given, reads=reads)
        (folder / "took.json").write_text(json.dumps({"training processor seconds": seconds}))
    return json.loads((folder / "found.json").read_text())
