"""Trains a small looped model to follow pointers, a hop a visit, and its gate to leave when the end is reached.

    python examples/looped_model.py --out FOLDER [--nodes 24 --chains 4 --hops 4] [--steps 1500] [--seed 0]

A prompt is a graph, as its edges in any order, and a query; the answer is the end of the query's chain. The chains are
cut out of a random permutation of the nodes, the end of a chain points to itself, and every node of 1 to `--hops` hops
from its end is asked for. After each visit t the model is read, and should say the node t hops on: so the model learns
a hop, and not the way to an answer. At first one block makes all visits; then the other goes on from its weights, and
which of them a visit goes through is drawn anew in each step. So either learns every hop, and not which hops are left
when its turn comes. Each visit ends with the final norm, so that a state does not tell how many visits made it. A pass
makes 6 visits in training and 8 in what is saved; in the end the model is also asked for what is a hop further than in
the training. All queries of a graph share its rows.

The gate learns whether a query had been answered a visit before: that the end of a chain points to itself shows when
one has gone there. It reads four features of what the model says (`"gate_reads": "features"`), which do not tell it how
many visits there were: it would learn that all queries of the training are answered after so many.

An interrupted run goes on when the same command is given again.
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
# The share of the steps in which the first block learns alone; the second goes on from its weights.
ALONE = 0.5
WARM_UP = 50
GATE_WEIGHT = 0.1
# The gate has five weights, which have far to go until it is sure.
GATE_RATE = 10
# How sure the gate may be that a query had been answered: so it says it twice before it is surer than that.
SURE = 0.9
SHOW_EVERY, SAVE_EVERY = 50, 100
# Queries are evaluated on graphs of a seed that no training has.
HELD_OUT = 10**6
THRESHOLD = 0.5


@dataclass(frozen=True)
class Task:
    """A Task makes graphs of so many nodes in so many chains, and queries about them.

    The token u * nodes + v is an edge from u to v; nodes * nodes + s asks for the end of the chain of s, and is the
    answer s. Where there are `marks`, one stands before each query, and says how many hops it asks for, up to so many.
    """

    nodes: int
    chains: int
    marks: int = 0

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens."""
        return self.nodes * (self.nodes + 1) + self.marks

    @property
    def longest(self) -> int:
        """Returns the most hops that each chain has."""
        return self.nodes // self.chains - 1

    def graph(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the node that each node points to, and how many hops each is from the end of its chain."""
        points, hops = np.empty(self.nodes, np.int64), np.empty(self.nodes, np.int64)
        for chain in np.array_split(rng.permutation(self.nodes), self.chains):
            points[chain] = chain[[0, *range(len(chain) - 1)]]
            hops[chain] = np.arange(len(chain))
        return points, hops

    def edges(self, points: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Returns the tokens of a graph's edges, in random order."""
        return rng.permutation(np.arange(self.nodes) * self.nodes + points).tolist()

    def query(self, node: int) -> int:
        """Returns the token that asks for the end of a node's chain, which is also the answer that names the node."""
        return self.nodes * self.nodes + int(node)

    def mark(self, hops: int) -> list[int]:
        """Returns what stands before queries of so many hops: a token, or none."""
        return [self.nodes * (self.nodes + 1) + hops - 1] if self.marks else []


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries holds queries about some graphs.

    prompts  token ids of each query: the graph's edges, and the query
    wanted   int64 [visits, queries]: the token to read after each visit
    hops     int64 [queries]: from the query's node to the end of its chain
    """

    prompts: list[list[int]]
    wanted: np.ndarray
    hops: np.ndarray

    @classmethod
    def make(cls, task: Task, graphs: int, most: int, visits: int, rng: np.random.Generator) -> Queries:
        """Returns every query of 1 to `most` hops about so many graphs."""
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
        """Returns whether a query had been answered the visit before, bool [visits, queries]."""
        return np.arange(1, len(self.wanted) + 1)[:, None] > self.hops

    def batch(self, model: LoopedLM) -> TrainBatch:
        """Returns the queries as rows of a model, with a target each."""
        sequences = [[*prompt, int(end)] for prompt, end in zip(self.prompts, self.wanted[-1], strict=True)]
        return TrainBatch.build(model.config, sequences, prompt_lengths=[len(prompt) for prompt in self.prompts])


def hf_config(task: Task, hidden: int, heads: int, visits: int) -> dict[str, Any]:
    """Returns the config.json of a model of two blocks, of a layer each, that are visited in turn."""
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
    """Returns a model that can be trained, of random weights."""
    model = load_model(Checkpoint.dummy(config), dtype=torch.float32)
    assert isinstance(model, LoopedLM)
    return model


@torch.no_grad()
def initialise(model: LoopedLM, task: Task, seed: int) -> None:
    """Gives a model the weights that training begins with: tokens that have to do with one node have a part in common,
    which is one vector for edges from the node, and another for edges to it and for queries."""
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
    """Gives the second block, of a layer, the weights of the first. Its q is a linear by itself."""
    first, second = (dict(layer.named_parameters()) for layer in model.layers)
    parts = first["qkv.weight"].split([model.config.q_size, 2 * model.config.kv_size])
    for name, parameter in second.items():
        parameter.copy_((dict(zip(("q.weight", "kv.weight"), parts, strict=True)) | first)[name])


@torch.no_grad()
def evaluate(model: LoopedLM, task: Task, most: int, graphs: int) -> dict[str, Any]:
    """Returns the share of right answers after the last visit by hops, and with exits at THRESHOLD, with the visits
    made until then."""
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
    """A Run is a training run, which can be written down and gone on with.

    options  what decides its course
    step     steps made
    """

    options: dict[str, Any]
    model: LoopedLM
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator
    step: int = 0

    def save(self, path: Path) -> None:
        """Writes the run down, whole or not at all."""
        part = path.with_suffix(".part")
        state = {
            "step": self.step,
            "options": json.dumps(self.options),
            "rng": json.dumps(self.rng.bit_generator.state),
        }
        torch.save(state | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Goes on with what was written down. Exits the program where that was a run with other options."""
        state = torch.load(path, weights_only=True)
        if json.loads(state["options"]) != self.options:
            raise SystemExit(f"{path} is of a run with other options, {state['options']}; give another --out")
        self.step, self.rng.bit_generator.state = state["step"], json.loads(state["rng"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def optimizer_of(groups: Sequence[tuple[list[torch.nn.Parameter], float]]) -> torch.optim.Optimizer:
    """Returns AdamW over groups of parameters, each with the highest learning rate that it gets."""
    return torch.optim.AdamW([{"params": some, "lr": most, "initial_lr": most} for some, most in groups])


def train(run: Run, written: Path, steps: int, loss_of: Callable[[], tuple[torch.Tensor, float]]) -> None:
    """Makes the steps that are left of a run, tells how it goes, and writes it down now and then.

    loss_of  gives the loss of the next step, and the share of right answers to show

    Exits the program where a loss is no finite number.
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
    """Saves a model, and in found.json what was found of it and the options of its training. Its weights come last: a
    folder with weights has all."""
    part = save_model(model, Checkpoint.dummy(config), folder / "part")
    (part / "found.json").write_text(json.dumps({"options": run.options} | found, indent=1), encoding="utf-8")
    for path in sorted(part.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        os.replace(path, folder / path.name)
    part.rmdir()


def rate(step: int, steps: int) -> float:
    """Returns the share of the learning rate at a step: a warm-up, and half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns what `evaluate` finds in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="the folder to save to")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--chains", type=int, default=4, help="a guess among their ends is right once in so many")
    parser.add_argument("--hops", type=int, default=4, help="the longest queries of the training")
    parser.add_argument("--marks", action="store_true", help="say before a query how many hops it asks for")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--graphs", type=int, default=32, help="of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    task = Task(options.nodes, options.chains, options.hops if options.marks else 0)
    if options.hops > task.longest:
        parser.error(f"--hops is {options.hops}; chains of {task.nodes // task.chains} nodes have {task.longest}")
    if (options.out / "model.safetensors").exists():
        parser.error(f"{options.out} holds a trained model already; give another --out")
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
        print(f"going on after step {run.step}")

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
