"""Every path of one routed model, generating: cells of benchmarks/looped.py.

    fixed           all visits in the model's order
    exits           these, and rows of tokens leave by the gate
    soft            every block in each visit, mixed: each token from the whole text before it, without K/V, for an LLM
                    does not serve it
    hard            the router is asked before each visit of a prompt, and rows go together by their next block
    template        the routes that the router takes are given
    template exits  these routes, and rows of tokens leave by the gate
    no cache        as fixed, but each token from the whole text before it, without K/V

Seconds are those of the processor with one thread on a CPU, so that other work on the machine changes little, and of
the clock on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import looped_replay
import numpy as np
import torch
from common import median
from looped_served import answers, in_turn, random_config, requests, tokens_of, without_kv
from looped_tasks import TASKS, held_out

from prefold import LLM
from prefold.checkpoint import Checkpoint, resolve
from prefold.looped.train import routed_logprobs
from prefold.train import TrainBatch

# Of the trained models, whose router is asked at THRESHOLD, and whose gate lets a row leave at LEAVES.
THRESHOLD, LEAVES = 0.6, 0.7
# How much more the random router heeds the number of a visit than the prompt: so prompts have routes in common.
ALIKE = 0.5
# Tokens that are asked of the paths at once where only what they answer is looked at.
QUERIES_AT_ONCE = 256


def routed_by(checkpoint: Checkpoint, kind: str, threshold: float) -> Checkpoint:
    """Returns a checkpoint with another kind of router."""
    loop = dict(checkpoint.config["loop"])
    loop["router"] = dict(loop["router"]) | {"kind": kind, "threshold": threshold}
    return replace(checkpoint, config=type(checkpoint.config)(dict(checkpoint.config) | {"loop": loop}))


class Paths:
    """A Paths runs a model on every path.

    checkpoint  of a model with a router and a gate
    threshold   at which the router ends a route
    prepare     is called with each model when it is loaded
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        threshold: float,
        device: str,
        prepare: Callable[[Any], None] = lambda model: None,
    ):
        self._stack = ExitStack()
        fixed, hard = (routed_by(checkpoint, kind, threshold) for kind in ("fixed", "hard"))

        def make(checkpoint: Checkpoint, **options: Any) -> LLM:
            settings = {"dtype": "float32", "device": device, "kv_memory": 1 << 31, "cache": "off"}
            llm = self._stack.enter_context(closing(LLM(checkpoint, **settings, **options)))
            prepare(llm.model)
            return llm

        self.read, self.save = make(fixed), make(fixed, looped={"exits": "save"})
        self.hard = make(hard)
        self.model, self.router = self.read.model, self.hard.model.loop.router
        self.order = tuple(self.model.loop.order)
        self.llm_of = {"fixed": self.read, "exits": self.save, "hard": self.hard}
        self.llm_of |= {"template": self.read, "template exits": self.save}

    def close(self) -> None:
        """Frees the models."""
        self._stack.close()

    @torch.inference_mode()
    def routes(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Returns the route that the router takes with each prompt, by the definition of routes."""
        batch = TrainBatch.build(self.model.config, [[*prompt, 0] for prompt in prompts], sharing="off")
        found = routed_logprobs(self.model, batch, routing=self.router)
        picks = found.weights.argmax(-1).T.tolist()
        return [tuple(block for block in one if block < self.model.loop.blocks) for one in picks]

    def soft(self, prompts: Sequence[Sequence[int]], out: int) -> list[list[int]]:
        """Returns what greedily follows prompts of one length where blocks are mixed."""
        texts = np.array(prompts, np.int64)
        with torch.inference_mode():
            for _ in range(out):
                said = looped_replay.soft(looped_replay.Prompts(self.model, texts)).argmax(-1).cpu().numpy()
                texts = np.concatenate((texts, said[:, None]), 1)
        return texts[:, len(prompts[0]) :].tolist()

    def ways(
        self, prompts: Sequence[Sequence[int]], exits: Sequence[dict[str, Any]]
    ) -> dict[str, Callable[..., list[list[int]]]]:
        """Returns each path as a function of the number of tokens. exits: when the rows of each prompt leave."""
        routes = [{"route": route} for route in self.routes(prompts)]
        options: dict[str, Sequence[dict[str, Any]]] = {"exits": exits, "template": routes}
        options["template exits"] = [one | two for one, two in zip(routes, exits, strict=True)]

        def served(name: str, out: int) -> list[list[int]]:
            return tokens_of(self.llm_of[name], requests(prompts, options.get(name, ()), max_tokens=out))

        found: dict[str, Callable[..., list[list[int]]]] = {name: partial(served, name) for name in self.llm_of}
        return found | {"soft": partial(self.soft, prompts), "no cache": partial(without_kv, self.read, prompts)}

    def counts(self, name: str, run: Callable[[int], Any], out: int) -> dict[str, float]:
        """Returns the most bytes of K/V that a run of a path holds, and how many blocks a row goes through."""
        llm = self.llm_of[name]
        llm.engine.reset_stats()
        run(out)
        stats = llm.engine.reset_stats()
        calls = stats.generation.block_calls
        return {"kv bytes": stats.generation.kv_bytes_peak, "block calls": calls / stats.rows_computed}

    @torch.inference_mode()
    def drift(self, name: str, prompts: Sequence[Sequence[int]], out: int) -> float:
        """Returns by how much the log-probabilities of the tokens that a path makes differ from those of the definition
        of routes, at most, for "fixed" and paths whose rows make all visits of the router's routes."""
        routes = [self.order] * len(prompts) if name == "fixed" else self.routes(prompts)
        each = [{"route": route} for route in routes] if name == "template" else ()
        said = answers(self.llm_of[name], requests(prompts, each, max_tokens=out, logprobs=0))
        texts = [[*prompt, *one.tokens] for prompt, one in zip(prompts, said, strict=True)]
        lengths = [len(prompt) for prompt in prompts]
        batch = TrainBatch.build(self.model.config, texts, prompt_lengths=lengths, sharing="off")
        expected = routed_logprobs(self.model, batch, routes=routes).logprobs[-1].cpu().numpy()
        found = np.array([one.logprob for answer in said for one in answer.logprobs])
        return float(np.abs(found - expected).max())


def measured(
    paths: Paths, prompts: Sequence[Sequence[int]], exits: Sequence[dict[str, Any]], out: int, repeats: int, device: str
) -> dict[str, Any]:
    """Returns the times and counts of every path, measured in turn; those without K/V once, after a token of each."""
    ways, batch = paths.ways(prompts, exits), len(prompts)
    whole_texts = ("no cache", "soft")
    clock = time.process_time
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        clock = time.perf_counter
    served = {(name, many): partial(ways[name], many) for name in paths.llm_of for many in (1, out)}
    seconds, given = in_turn(served, repeats, clock)
    for name in whole_texts:
        some, said = in_turn({(name, 1): partial(ways[name], 1)}, 1, clock)
        began = clock()
        given[name, out] = ways[name](out)
        seconds |= some | {(name, out): [clock() - began]}
        given |= said
    routes = paths.routes(prompts)
    visits = float(np.mean([len(route) for route in routes]))
    blocks = {"fixed": len(paths.order), "no cache": len(paths.order), "template": visits}
    blocks["soft"] = len(paths.order) * paths.model.loop.blocks
    found: dict[str, Any] = {"routes": len(set(routes)), "paths": {}}
    for name, way in ways.items():
        first, whole = (median(seconds[name, many]) for many in (1, out))
        one = {"ttft": first, "tpot": (whole - first) / max(1, out - 1), "seconds": seconds[name, out]}
        one |= {"tokens/s": batch * out / whole, "kv bytes": 0, "tokens": given[name, out]}
        one |= {} if name in whole_texts else paths.counts(name, way, out)
        one |= {"block calls": blocks[name]} if name in blocks else {}
        found["paths"][name] = one
    for name in ("fixed", "hard", "template"):
        found["paths"][name]["drift"] = paths.drift(name, prompts, out)
    same = {"no cache": "fixed", "template": "hard"}
    for name, other in same.items():
        pairs = zip(given[name, out], given[other, out], strict=True)
        found["paths"][name][f"as {other}"] = float(np.mean([one == two for one, two in pairs]))
    return found


def trained(folder: Path, nodes: int, batch: int, out: int, repeats: int, device: str) -> dict[str, Any]:
    """Measures every path of a trained model and its router on queries of up to one hop more than it was trained for,
    and scores what all queries are answered on each path."""
    paths = Paths(resolve(str(folder)), THRESHOLD, device)
    queries, hops = held_out(nodes), TASKS[nodes][1]
    some = np.random.default_rng(batch).permutation(len(queries.prompts))[:batch]
    leaves = {"exit_threshold": LEAVES}
    found = measured(paths, [queries.prompts[n] for n in some], [leaves] * batch, out, repeats, device)
    wanted = queries.wanted[-1]
    for one in found["paths"].values():
        one["right tokens"] = float((np.array(one.pop("tokens")) == wanted[some][:, None]).mean())
    said: dict[str, list[int]] = {name: [] for name in found["paths"]}
    for first in range(0, len(wanted), QUERIES_AT_ONCE):
        prompts = queries.prompts[first : first + QUERIES_AT_ONCE]
        for name, way in paths.ways(prompts, [leaves] * len(prompts)).items():
            said[name] += [tokens[0] for tokens in way(1)]
    for name, one in found["paths"].items():
        right = np.array(said[name]) == wanted
        one["right"] = float(right.mean())
        one["seen"] = float(right[queries.hops <= hops].mean())
        one["one more"] = float(right[queries.hops == hops + 1].mean())
    paths.close()
    return found


def random(batch: int, prompt: int, out: int, visits: int, repeats: int, device: str) -> dict[str, Any]:
    """Measures every path of a model of random weights, 64 wide, whose router never leaves; where rows leave they do so
    at random, after half of the visits on average."""
    config = random_config(64, visits)
    config["loop"] |= {"router": {"kind": "hard", "threshold": 1.0}}

    def prepare(model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            model.router.step.copy_(ALIKE * torch.randn(model.router.step.shape, generator=generator))

    paths = Paths(Checkpoint.dummy(config), 1.0, device, prepare)
    rng = np.random.default_rng(prompt)
    prompts = rng.integers(0, config["vocab_size"], (batch, prompt)).tolist()
    drawn = rng.integers(visits // 4, 3 * visits // 4 + 1, (batch, out)).tolist()
    found = measured(paths, prompts, [{"exit_visits": tuple(one)} for one in drawn], out, repeats, device)
    for one in found["paths"].values():
        one.pop("tokens")
    paths.close()
    return found
