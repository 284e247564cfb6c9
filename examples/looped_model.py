"""Train a small looped model to follow pointers, one hop per visit. Its gate learns to exit when the end is reached.

    python examples/looped_model.py --out FOLDER [--nodes 24 --chains 4 --hops 4] [--steps 1500] [--seed 0]

The task: a prompt has the edges of a graph, in random order, and a query. The answer is the end of the query's chain.
The chains are parts of a random permutation of the nodes, and the end of a chain points to itself. There is a query for
every node that is 1 to `--hops` hops from its end. All queries of a graph share the graph's rows.

The model: after visit t, the model should predict the node that is t hops further. So it learns single hops. First one
block makes all visits. Then a second block starts from a copy of its weights, and each visit of a training step uses
one of the two blocks at random. So both blocks learn every hop, independent of their position in the loop. Each visit
ends with the final norm, so that a state does not reveal the number of visits. Training makes 6 visits, the saved model
8. In the end, the model is also tested on queries that are one hop longer than in training.

The gate learns whether the query was already answered at the visit before. This is visible, because the end of a chain
points to itself. The gate reads four features of the model's prediction (`"gate_reads": "features"`). These do not
reveal the number of visits. Otherwise the gate would learn that training queries are always answered after a certain
number.

Give the same command again to continue an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from prefold.checkpoint import Checkpoint
from prefold.features.looped.model import LoopedLM, RowExits, visits_at_exit
from prefold.features.looped.train import visit_logprobs
from prefold.train import TrainBatch, load_model, save_model

TRAINED_VISITS, VISITS = 6, 8
# Share of the steps in which only the first block is trained. Then the second block starts from its weights.
ALONE = 0.5
WARM_UP = 50
GATE_WEIGHT = 0.1
# Factor of the gate's learning rate: its five weights must become large before it is sure.
GATE_RATE = 10
# Target probability of the gate for an answered query. The exit probability only exceeds it after a second such visit.
SURE = 0.9
SHOW_EVERY, SAVE_EVERY = 50, 100
# Seed of the graphs for evaluation. No training uses it.
HELD_OUT = 10**6
THRESHOLD = 0.5


@dataclass(frozen=True)
class Task:
    """Graphs of nodes in chains, and queries about them.

    The token u * nodes + v is an edge from u to v. The token nodes * nodes + s asks for the end of the chain of s, and
    is also the answer s. With `marks`, a token before each query says how many hops it needs, at most `marks`.
    """

    nodes: int
    chains: int
    marks: int = 0

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return self.nodes * (self.nodes + 1) + self.marks

    @property
    def longest(self) -> int:
        """Return the number of hops that every chain has at least."""
        return self.nodes // self.chains - 1

    def graph(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (the node that each node points to, the hops from each node to the end of its chain)."""
        points, hops = np.empty(self.nodes, np.int64), np.empty(self.nodes, np.int64)
        for chain in np.array_split(rng.permutation(self.nodes), self.chains):
            points[chain] = chain[[0, *range(len(chain) - 1)]]
            hops[chain] = np.arange(len(chain))
        return points, hops

    def edges(self, points: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Return the tokens of a graph's edges, in random order."""
        return rng.permutation(np.arange(self.nodes) * self.nodes + points).tolist()

    def query(self, node: int) -> int:
        """Return the token that asks for the end of a node's chain. The same token is the answer that names the
        node."""
        return self.nodes * self.nodes + int(node)

    def mark(self, hops: int) -> list[int]:
        """Return the mark for queries of this many hops, as a list of one token or none."""
        return [self.nodes * (self.nodes + 1) + hops - 1] if self.marks else []


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries about some graphs."""

    prompts: list[list[int]]  # token ids of each query: the graph's edges, and the query
    wanted: np.ndarray  # int64 [visits, queries]: the token to predict after each visit
    hops: np.ndarray  # int64 [queries]: hops from the query's node to the end of its chain

    @classmethod
    def make(cls, task: Task, graphs: int, most: int, visits: int, rng: np.random.Generator) -> Queries:
        """Return all queries of 1 to `most` hops about `graphs` graphs."""
        prompts, wanted, hops = [], [], []
        for _ in range(graphs):
            points, far = task.graph(rng)
            edges = task.edges(points, rng)
            for node in np.flatnonzero((far >= 1) & (far <= most)).tolist():
                way = [node]
                for _ in range(visits):
                    way.append(int(points[way[-1]]))
                prompts.append([*edges, *task.mark(far[node]), task.query(node)])
                wanted.append([task.query(node) for node in way[1:]])
                hops.append(far[node])
        return cls(prompts, np.array(wanted, np.int64).T, np.array(hops))

    @property
    def settled(self) -> np.ndarray:
        """Return whether a query was already answered at the visit before, bool [visits, queries]."""
        return np.arange(1, len(self.wanted) + 1)[:, None] > self.hops

    def batch(self, model: LoopedLM) -> TrainBatch:
        """Return the queries as rows of a model, with one target each."""
        sequences = [[*prompt, int(end)] for prompt, end in zip(self.prompts, self.wanted[-1], strict=True)]
        return TrainBatch.build(model.config, sequences, prompt_lengths=[len(prompt) for prompt in self.prompts])


def hf_config(task: Task, hidden: int, heads: int, visits: int) -> dict[str, Any]:
    """Return the config.json of a model with two blocks of one layer each, visited in turn."""
    return {
        "architectures": ["PrefoldLoopedForCausalLM"],
        "model_type": "prefold_looped",
        "vocab_size": task.vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 2 * hidden,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "loop": {"blocks": 2, "visits": visits, "gate": True, "gate_reads": "features", "between": "norm"},
    }


def make_model(config: dict[str, Any]) -> LoopedLM:
    """Return a trainable model with random weights."""
    model = load_model(Checkpoint.dummy(config), dtype=torch.float32)
    assert isinstance(model, LoopedLM)
    return model


@torch.no_grad()
def initialise(model: LoopedLM, task: Task, seed: int) -> None:
    """Set the initial weights of training.

    Embeddings of tokens that involve the same node have a common part: one vector for edges from the node, another one
    for edges to it and for its query.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(normal(*parameter.shape) * parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(1.0)
    counts = (task.nodes, task.nodes, 1, task.marks)
    source, target, query, marks = (0.5 * normal(count, model.config.hidden) for count in counts)
    model.embedding.copy_(torch.cat(((source[:, None] + target).flatten(0, 1), target + query, marks)))
    assert model.gate is not None and model.gate.bias is not None
    model.gate.bias.zero_()


@torch.no_grad()
def copy_block(model: LoopedLM) -> None:
    """Copy the weights of the first block to the second, of one layer. Its q is a separate linear layer."""
    first, second = (dict(layer.named_parameters()) for layer in model.layers)
    parts = first["qkv.weight"].split([model.config.q_size, 2 * model.config.kv_size])
    for name, parameter in second.items():
        parameter.copy_((dict(zip(("q.weight", "kv.weight"), parts, strict=True)) | first)[name])


@torch.no_grad()
def evaluate(model: LoopedLM, task: Task, most: int, graphs: int) -> dict[str, Any]:
    """Return the share of right answers after the last visit, by hops, and with exits at THRESHOLD, with the visits
    made."""
    queries = Queries.make(task, graphs, most, len(model.loop.order), np.random.default_rng(HELD_OUT))
    batch = queries.batch(model)
    nodes = np.arange(task.nodes) + task.query(0)
    scores = [visit_logprobs(model, batch, np.full_like(queries.wanted, node))[0] for node in nodes]
    said = nodes[torch.stack(scores).argmax(0).numpy()]
    gate = visit_logprobs(model, batch)[1]
    assert gate is not None
    visit = visits_at_exit(gate, RowExits(THRESHOLD)).numpy()
    right = said == queries.wanted[-1]
    at_exit = right[visit, np.arange(len(visit))]
    return {
        "by hops": {hops: float(right[-1][queries.hops == hops].mean()) for hops in range(1, most + 1)},
        "at exit": float(at_exit.mean()),
        "visits": float(visit.mean()) + 1,
    }


@dataclass
class Run:
    """A training run that can be saved and continued."""

    options: dict[str, Any]  # everything that determines the run
    model: LoopedLM
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator
    step: int = 0  # number of finished steps

    def save(self, path: Path) -> None:
        """Write the run to a file, atomically."""
        part = path.with_suffix(".part")
        state = {
            "step": self.step,
            "options": json.dumps(self.options),
            "rng": json.dumps(self.rng.bit_generator.state),
        }
        torch.save(state | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Continue from a saved run. Exit the program if its options differ."""
        state = torch.load(path, weights_only=True)
        if json.loads(state["options"]) != self.options:
            raise SystemExit(f"{path} belongs to a run with other options, {state['options']}; give another --out")
        self.step, self.rng.bit_generator.state = state["step"], json.loads(state["rng"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def optimizer_of(groups: Sequence[tuple[list[torch.nn.Parameter], float]]) -> torch.optim.Optimizer:
    """Return AdamW over groups of parameters, each with its maximum learning rate."""
    return torch.optim.AdamW([{"params": some, "lr": most, "initial_lr": most} for some, most in groups])


def train(run: Run, written: Path, steps: int, loss_of: Callable[[], tuple[torch.Tensor, float]]) -> None:
    """Make the remaining steps of a run, print progress, and save the run from time to time.

    loss_of: returns the loss of the next step, and the share of right answers to print. Exit the program if a loss is
    not finite.
    """
    rates = [group["initial_lr"] for group in run.optimizer.param_groups]
    began, first = time.perf_counter(), run.step
    while run.step < steps:
        loss, right = loss_of()
        if not torch.isfinite(loss):
            raise SystemExit(f"the loss is {loss.item()} at step {run.step} of seed {run.options['seed']}")
        for group, highest in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = highest * rate(run.step, steps)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.step += 1
        if run.step % SHOW_EVERY == 0 or run.step == steps:
            left = (time.perf_counter() - began) / (run.step - first) * (steps - run.step)
            print(f"step {run.step}: loss {loss.item():.3f}, p(answer) {right:.3f}, {left:.0f} s left", flush=True)
        if run.step % SAVE_EVERY == 0:
            run.save(written)


def save(model: LoopedLM, config: dict[str, Any], run: Run, found: dict[str, Any], folder: Path) -> None:
    """Save a model, and its results and training options in found.json.

    The weights come last, so a folder with weights is complete.
    """
    part = save_model(model, Checkpoint.dummy(config), folder / "part")
    (part / "found.json").write_text(json.dumps({"options": run.options} | found, indent=1), encoding="utf-8")
    for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    part.rmdir()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step: a warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Return the results of `evaluate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to save to")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument(
        "--chains",
        type=int,
        default=4,
        help="number of chains; a random guess among their ends is right with probability 1/CHAINS",
    )
    parser.add_argument("--hops", type=int, default=4, help="maximum hops of training queries")
    parser.add_argument(
        "--marks", action="store_true", help="put a token before each query that says how many hops it needs"
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--graphs", type=int, default=32, help="graphs per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    task = Task(options.nodes, options.chains, options.hops if options.marks else 0)
    if options.hops > task.longest:
        parser.error(f"--hops is {options.hops}; chains of {task.nodes // task.chains} nodes have {task.longest}")
    if (options.out / "model.safetensors").exists():
        parser.error(f"{options.out} already has a trained model; give another --out")
    options.out.mkdir(parents=True, exist_ok=True)

    model = make_model(hf_config(task, options.hidden, options.heads, TRAINED_VISITS))
    initialise(model, task, options.seed)
    assert model.gate is not None
    gate = list(model.gate.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in gate)]
    optimizer = optimizer_of([(rest, options.learning_rate), (gate, GATE_RATE * options.learning_rate)])
    course = {name: value for name, value in vars(options).items() if name != "out"}
    run, written = Run(course, model, optimizer, np.random.default_rng(options.seed)), options.out / "training.pt"
    if written.exists():
        run.load(written)
        print(f"continuing after step {run.step}")

    def loss() -> tuple[torch.Tensor, float]:
        queries = Queries.make(task, options.graphs, options.hops, TRAINED_VISITS, run.rng)
        alone = int(ALONE * options.steps)
        if run.step == alone:
            copy_block(model)
        order = run.rng.integers(0, model.loop.blocks if run.step >= alone else 1, TRAINED_VISITS).tolist()
        logprobs, gate = visit_logprobs(model, queries.batch(model), queries.wanted, order)
        assert gate is not None
        settled = SURE * torch.from_numpy(queries.settled).float()
        right = float(torch.exp(logprobs.detach())[-1].mean())
        return -logprobs.mean() + GATE_WEIGHT * F.binary_cross_entropy_with_logits(gate, settled), right

    train(run, written, options.steps, loss)
    config = hf_config(task, options.hidden, options.heads, VISITS)
    final = make_model(config)
    final.load_state_dict(model.state_dict())
    found = evaluate(final, task, task.marks or min(options.hops + 1, task.longest), 2 * options.graphs)
    save(final, config, run, found, options.out)
    written.unlink(missing_ok=True)
    shares = ", ".join(f"{hops}: {share:.3f}" for hops, share in found["by hops"].items())
    print(f"right after {VISITS} visits, by hops: {shares}; by guessing an end: {1 / task.chains:.3f}")
    print(f"right at exits: {found['at exit']:.3f}, after {found['visits']:.2f} visits")
    print(f"saved to {options.out}")
    return found


if __name__ == "__main__":
    main()
