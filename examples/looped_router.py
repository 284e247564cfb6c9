"""Train the router of a looped model from examples/looped_model.py, and a planner that predicts the router's routes.

    python examples/looped_router.py --model FOLDER --out FOLDER [--reads request|row] [--steps 400] [--seed 0]

The router chooses the block of each visit, or the end of the loop. At first routing is soft: every block is computed,
and the results are averaged by probability, so that all choices get gradients. After `--soft` of its steps routing is
hard: only the chosen block counts, and its probability gets the gradient (straight through). The router is rewarded for
right answers. It pays for visits (`--cost` each), and for choosing other blocks for different requests (`--alike`),
because requests on the same route are served together. The model's own weights are not changed.

A router that reads requests reads whole sequences, so all queries of one graph in a prompt must have the same number of
hops. For a router that reads rows they may differ. The planner learns the routes of the hard router from the embeddings
of a prompt alone, before any attention. There it cannot see how many hops a query needs, unless `--marks` says it. It
also cannot predict choices that the router itself is undecided about. With `--sure` the router pays for being
undecided.

Give the same command again to continue an interrupted run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from looped_model import HELD_OUT, Run, Task, make_model, optimizer_of, rate, save, train
from torch.nn import functional as F

from prefold.checkpoint import resolve
from prefold.features.looped.config import Routing
from prefold.features.looped.gates import choose, planner_logits, summary
from prefold.features.looped.model import LoopedLM
from prefold.features.looped.train import routed, routed_logprobs, whole_sequences
from prefold.train import TrainBatch, load_model

THRESHOLDS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7)
LEAVING_BIAS = -2.0
# A router's choice is decided if its probability leads by at least this much.
MARGIN = 0.2


@dataclass(frozen=True, eq=False)
class Packs:
    """Sequences of a graph and a number of queries about it."""

    prompts: list[list[int]]  # token ids of each sequence
    asked: list[int]  # number of queries at the end of each sequence
    wanted: np.ndarray  # int64 [queries]: the token to predict at each query, sequence by sequence
    hops: np.ndarray  # int64 [queries]: hops from the query's node to the end of its chain

    @classmethod
    def make(cls, task: Task, hops: Sequence[range], together: int, rng: np.random.Generator) -> Packs:
        """Return a sequence for each entry of `hops`, the allowed hops of its queries.

        A sequence has at most `together` queries, of different random nodes.
        """
        prompts, asked, wanted, far_of = [], [], [], []
        for among in hops:
            points, far = task.graph(rng)
            edges = task.edges(points, rng)
            nodes = rng.permutation(np.flatnonzero(np.isin(far, among)))[:together].tolist()
            marks = task.mark(among[0]) if len(among) == 1 else []
            prompts.append([*edges, *marks, *map(task.query, nodes)])
            asked.append(len(nodes))
            for node in nodes:
                far_of.append(int(far[node]))
                while points[node] != node:
                    node = int(points[node])
                wanted.append(task.query(node))
        return cls(prompts, asked, np.array(wanted, np.int64), np.array(far_of, np.int64))

    def batch(self, model: LoopedLM) -> TrainBatch:
        """Return the sequences as rows, with a target at each query."""
        sequences = [[*prompt, prompt[-1]] for prompt in self.prompts]
        masks = [
            [False] * (len(one) - count) + [True] * count for one, count in zip(sequences, self.asked, strict=True)
        ]
        return TrainBatch.build(model.config, sequences, masks=masks, sharing="off")


def with_router(base: LoopedLM, config: dict[str, Any], seed: int) -> LoopedLM:
    """Return a model of this config, with the weights of `base` and a random router."""
    model, generator = make_model(config), torch.Generator().manual_seed(seed)
    assert model.router is not None
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert all(name.startswith(("router.", "planner.")) for name in missing)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("router."))
        if name in missing:
            with torch.no_grad():
                fan = parameter.shape[-1] if parameter.ndim == 2 else 1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (parameter.ndim - 1) * fan**-0.5)
    with torch.no_grad():
        model.router.outer.bias[-1] = LEAVING_BIAS  # a router that exits at once learns nothing
    return model


def visits_of(weights: torch.Tensor) -> torch.Tensor:
    """Return the number of visits of each sequence or row, [n]. weights: [visits, n, blocks + 1]"""
    return weights[..., :-1].sum((0, 2))


def information(choices: torch.Tensor) -> torch.Tensor:
    """Return how much the choice of a block depends on the sequence or row, in nats.

    This is the entropy of the mean choice minus the mean entropy of the single choices, averaged over visits. choices:
    a router's logits [visits, n, blocks + 1]
    """
    scores = torch.log_softmax(choices[..., :-1], -1)
    of_each = -(scores.exp() * scores).sum(-1).mean(1)
    of_all = scores.exp().mean(1)
    return (-(of_all * of_all.clamp(min=1e-9).log()).sum(-1) - of_each).mean()


def indecision(choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy of the choices of sequences or rows that have not left the loop, in nats.

    choices, weights: the router's logits before each visit, and the weights made from them, [visits, n, blocks + 1]
    """
    # No sequence exits before the first visit: the logarithm of that probability is not finite.
    scores = torch.log_softmax(choices, -1).clamp(min=-30)
    there = torch.cat((torch.ones_like(weights[:1, :, 0]), weights[:-1, :, :-1].sum(-1))).detach()
    return -((scores.exp() * scores).sum(-1) * there).sum() / there.sum()


@torch.no_grad()
def evaluate(model: LoopedLM, task: Task, most: int, count: int, routing: Routing) -> dict[str, Any]:
    """Return the share of right answers, the visits and the routes for `count` queries of each number of hops.

    Each sequence has one query. If rows have their own routes, visits are given for the rows of queries and for the
    rows of the graph. Otherwise they are given for sequences.
    """
    hops = [range(far, far + 1) for far in range(1, most + 1) for _ in range(count)]
    packs = Packs.make(task, hops, 1, np.random.default_rng(HELD_OUT))
    batch = packs.batch(model)
    visits = list(routed(model, *whole_sequences(model, batch), routing=routing))
    nodes = range(task.query(0), task.query(task.nodes))
    reads = torch.from_numpy(batch.step.read_rows)
    said = model.logits(visits[-1].state[reads], nodes).argmax(-1).numpy() + task.query(0)
    right, weights = said == packs.wanted, torch.stack([visit.weights for visit in visits])
    made = visits_of(weights)
    found: dict[str, Any] = {"right": float(right.mean())}
    found["by hops"] = {far: float(right[packs.hops == far].mean()) for far in range(1, most + 1)}
    by_row = routing.reads == "row" and routing.kind != "fixed"
    if by_row:
        graph = np.setdiff1d(np.arange(len(made)), batch.step.read_rows)
        found["graph visits"] = float(made[graph].mean())
        made = made[reads]
        found["routes of rows"] = histogram(weights[:, graph])
    found["visits"] = {far: float(made.numpy()[packs.hops == far].mean()) for far in range(1, most + 1)}
    if routing.kind not in ("soft", "top"):
        found["routes"] = histogram(weights[:, reads] if by_row else weights)
    return found


def histogram(weights: torch.Tensor) -> dict[str, int]:
    """Return how often each route (such as "0,1,0") was used, the most frequent first. weights: [visits, n, blocks +
    1]"""
    picks, blocks = weights.argmax(-1).T.tolist(), weights.shape[-1] - 1
    return dict(Counter(",".join(str(block) for block in one if block < blocks) for one in picks).most_common())


def prompt_states(model: LoopedLM, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what a planner reads from prompts, float32 [prompts, 2 * hidden], for a model without a prelude."""
    states = [model.embedding[torch.tensor(prompt)] for prompt in prompts]
    last, mean = (torch.stack(some) for some in ([one[-1] for one in states], [one.mean(0) for one in states]))
    return summary(model.arrays, last, mean)


def distil(model: LoopedLM, task: Task, most: int, prompts: int, steps: int, seed: int) -> dict[str, float]:
    """Train the planner on the routes of the hard router, and return how well it predicts the routes of other prompts.

    The results are the shares of whole routes and of visits that are equal, and the share of the router's most frequent
    route. "where decided": the same, counting only prompts and visits with a decided router (see MARGIN); "decided":
    their share.
    """
    assert model.planner is not None and model.router is not None and model.loop.router is not None
    hard, rng = replace(model.loop.router, kind="hard"), np.random.default_rng(seed)
    hops = [range(1 + n % most, 2 + n % most) for n in range(prompts)]
    packs = Packs.make(task, hops, 1, rng)
    with torch.no_grad():
        visits = list(routed(model, *whole_sequences(model, packs.batch(model)), routing=hard))
        read = prompt_states(model, packs.prompts)
    picks = torch.stack([visit.weights.argmax(-1) for visit in visits])
    margins = torch.stack([margin(visit.logits, hard.threshold) for visit in visits if visit.logits is not None])
    # Choices after the end of a route do not count.
    counts = torch.cat((torch.ones_like(picks[:1]), (picks[:-1] < model.loop.blocks).long()))
    held = prompts // 4
    optimizer = torch.optim.AdamW(model.planner.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        some = torch.from_numpy(rng.integers(held, prompts, 256))
        losses = F.cross_entropy(
            planner_logits(model, read[some]).flatten(0, 1), picks[:, some].flatten(), reduction="none"
        )
        loss = (losses * counts[:, some].flatten()).sum() / counts[:, some].sum()
        if not torch.isfinite(loss):
            raise SystemExit(f"the planner's loss is {loss.item()} at step {step} of seed {seed}")
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step, steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        said = torch.from_numpy(
            np.stack([choose(one, hard.threshold) for one in planner_logits(model, read[:held]).numpy()])
        )
    same = (said == picks[:, :held]) | (counts[:, :held] == 0)
    frequent = histogram(F.one_hot(picks, model.loop.blocks + 1)[:, :held])
    # Visits after the end of a route count as decided.
    decided = (margins[:, :held] >= MARGIN) | (counts[:, :held] == 0)
    clear, clear_visits = decided.all(0), decided * counts[:, :held]
    return {
        "whole routes": float(same.all(0).float().mean()),
        "visits": float((same * counts[:, :held]).sum() / counts[:, :held].sum()),
        "by the most frequent route": max(frequent.values()) / held,
        "whole routes where decided": float((same.all(0) & clear).sum() / clear.sum().clamp(min=1)),
        "visits where decided": float((same * clear_visits).sum() / clear_visits.sum().clamp(min=1)),
        "decided routes": float(clear.float().mean()),
        "decided visits": float(clear_visits.sum() / counts[:, :held].sum()),
    }


def margin(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return by how much a router's choices lead in probability, [n].

    The lead is the distance of the exit probability from the threshold. If the router does not exit, it is at most the
    lead of the best block over the next one.
    """
    shares = torch.softmax(logits, -1)
    leaving, (best, next_best) = shares[:, -1], shares[:, :-1].topk(2, -1).values.T
    of_blocks = torch.where(leaving >= threshold, torch.inf, best - next_best)
    return torch.minimum((leaving - threshold).abs(), of_blocks)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Return the results: the router's answers and routes for each kind of routing, and the quality of the planner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder that examples/looped_model.py saved")
    parser.add_argument("--out", required=True, type=Path, help="folder to save to")
    parser.add_argument("--reads", choices=("request", "row"), default="request")
    parser.add_argument("--hops", type=int, default=4, help="maximum hops of training queries")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--marks", action="store_true", help="give it if the model was trained with it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--soft", type=float, default=0.6, help="share of the steps with soft routing")
    parser.add_argument("--sequences", type=int, default=48, help="sequences per step")
    parser.add_argument("--cost", type=float, default=0.02, help="cost of a visit, in nats")
    parser.add_argument(
        "--alike", type=float, default=0.1, help="cost per nat of choosing other blocks for different requests"
    )
    parser.add_argument("--sure", type=float, default=0.0, help="cost per nat of being undecided")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--planner-prompts", type=int, default=8192)
    parser.add_argument("--planner-steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.marks and options.reads == "row":
        parser.error("--marks needs --reads request: with --reads row, one prompt has queries of different hops")
    if (options.out / "model.safetensors").exists():
        parser.error(f"{options.out} already has a trained model; give another --out")
    checkpoint = resolve(str(options.model))
    base = load_model(checkpoint, dtype=torch.float32)
    assert isinstance(base, LoopedLM)
    marks = options.hops if options.marks else 0
    task = Task(round((base.config.vocab_size - marks + 0.25) ** 0.5 - 0.5), options.chains, marks)
    options.out.mkdir(parents=True, exist_ok=True)

    routing = {"kind": "hard", "reads": options.reads, "planner": options.reads == "request"}
    config = dict(checkpoint.config) | {"loop": dict(checkpoint.config["loop"]) | {"router": routing}}
    model = with_router(base, config, options.seed)
    hard = model.loop.router
    assert hard is not None and model.router is not None
    optimizer = optimizer_of([(list(model.router.parameters()), options.learning_rate)])
    course = {name: str(value) for name, value in vars(options).items() if name != "out"}
    run, written = Run(course, model, optimizer, np.random.default_rng(options.seed)), options.out / "training.pt"
    if written.exists():
        run.load(written)
        print(f"continuing after step {run.step}")

    def loss() -> tuple[torch.Tensor, float]:
        kind: Any = "soft" if run.step < options.soft * options.steps else "hard"
        every = range(1, options.hops + 1)
        drawn = run.rng.integers(1, options.hops + 1, options.sequences).tolist()
        hops = [range(far, far + 1) if options.reads == "request" else every for far in drawn]
        packs = Packs.make(task, hops, int(run.rng.integers(1, task.chains + 1)), run.rng)
        batch, visits = packs.batch(model), len(model.loop.order)
        ids = np.broadcast_to(packs.wanted, (visits, batch.num_targets))
        found = routed_logprobs(model, batch, ids, routing=replace(hard, kind=kind))
        assert found.choices is not None
        right = found.logprobs[-1]
        loss = options.cost * visits_of(found.weights).mean() + options.alike * information(found.choices)
        loss = loss + options.sure * indecision(found.choices, found.weights)
        return loss - right.mean(), float(right.detach().exp().mean())

    train(run, written, options.steps, loss)
    results: dict[str, Any] = {}
    if model.planner is not None:
        model.planner.requires_grad_(True)
        results["planner"] = distil(
            model, task, options.hops, options.planner_prompts, options.planner_steps, options.seed
        )
    most = task.marks or min(options.hops + 1, task.longest)
    ways = {"fixed": replace(hard, kind="fixed"), "soft": replace(hard, kind="soft")}
    ways |= {f"hard at {threshold:.2f}": replace(hard, threshold=threshold) for threshold in THRESHOLDS}
    if model.planner is not None:
        ways["planned"] = replace(hard, kind="planned")
    for name, way in ways.items():
        one = results[name] = evaluate(model, task, most, 64, way)
        shares = ", ".join(f"{far}: {share:.3f} ({one['visits'][far]:.2f})" for far, share in one["by hops"].items())
        graph = f"; a row of the graph {one['graph visits']:.2f}" if "graph visits" in one else ""
        print(f"{name}: right (visits) by hops: {shares}{graph}; {len(one.get('routes', {}))} routes")
    if model.planner is not None:
        print("planner: " + ", ".join(f"{name} {share:.3f}" for name, share in results["planner"].items()))
    save(model, config, run, results, options.out)
    written.unlink(missing_ok=True)
    print(f"saved to {options.out}")
    return results


if __name__ == "__main__":
    main()
