"""What an LLM makes of looped models: cells of benchmarks/looped.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median
from looped_tasks import TASKS, example, held_out

from prefold import LLM
from prefold.checkpoint import Checkpoint
from prefold.looped.gates import RowExits, visits_at_exit
from prefold.looped.train import visit_logprobs
from prefold.stream import Spool
from prefold.train import TrainBatch
from prefold.types import Generated, Readout, Request, Sampling
from prefold.worker.rows import Path as KVPath
from prefold.worker.rows import StepAttend

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
THRESHOLDS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.9, 0.95, 0.98)
LEAVING = (0.5, 0.9, 0.98)


def accuracy(folder: Path, nodes: int, device: str) -> dict[str, Any]:
    """Returns the share of right answers by hops, and the visits that a query's row makes, for each way to leave."""
    task, hops = example.Task(nodes, TASKS[nodes][0]), TASKS[nodes][1]
    llm = LLM(str(folder), dtype="float32", device=device, kv_memory=1 << 28)
    visits = len(llm.config.loop.order)
    queries = held_out(nodes)
    with torch.no_grad():
        gate = visit_logprobs(llm.model, queries.batch(llm.model))[1]
    found: dict[str, Any] = {}

    def ask(name: str, one: LLM, threshold: float, **options: Any) -> None:
        answers = tokens_of(one, requests(queries.prompts, max_tokens=1, exit_threshold=threshold, **options))
        right = np.array(answers)[:, 0] == queries.wanted[-1]
        made = visits_at_exit(gate, RowExits(threshold)).cpu().numpy() + 1
        found[name] = {
            "by hops": {str(far): float(right[queries.hops == far].mean()) for far in range(1, hops + 2)},
            "seen": float(right[queries.hops <= hops].mean()),
            "one more": float(right[queries.hops == hops + 1].mean()),
            "all": float(right.mean()),
            "visits": float(made.mean()),
        }

    ask("fixed", llm, 1.0)
    for threshold in THRESHOLDS:
        ask(f"read at {threshold:.2f}", llm, threshold)
    stats = llm.stats
    found["prompt"] = {"tokens": stats.tokens, "rows": stats.rows_computed, "visits of each": visits}
    llm.close()
    # Rows of prompts leave by the same rule, the edges of a graph and the query; visits are then those of all rows.
    llm = LLM(str(folder), dtype="float32", device=device, kv_memory=1 << 28, looped={"exits": "save"}, cache="off")
    for threshold in LEAVING:
        name = f"rows leave at {threshold:.2f}"
        llm.engine.reset_stats()
        ask(name, llm, threshold, exit_prompts=True)
        stats = llm.engine.reset_stats()
        found[name]["visits"] = stats.generation.block_calls / stats.unique_tokens
    llm.close()
    found["guess"] = 1 / task.chains
    return found


def requests(prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]] = (), **sampling: Any) -> list[Request]:
    """Returns a request for each prompt, which takes the most likely tokens; each: options of one request."""
    options: list[dict[str, Any]] = [{**GREEDY, **sampling, **one} for one in (each or [{}] * len(prompts))]
    pairs = zip(prompts, options, strict=True)
    return [Request(np.array(prompt, np.int32), sampling=Sampling(**one)) for prompt, one in pairs]


def tokens_of(llm: LLM, asked: Sequence[Request]) -> list[list[int]]:
    """Returns the tokens that requests get, in their order. Raises the error of one that cannot run."""
    return [list(one.tokens) for one in answers(llm, asked)]


def answers(llm: LLM, asked: Sequence[Request]) -> list[Generated]:
    """Returns what requests of a sample each get, in their order. Raises the error of one that cannot run."""
    found: list[Any] = [None] * len(asked)
    with Spool() as spool:
        for number, request in enumerate(asked):
            spool.add(request, number.to_bytes(8, "little"))
        for tag, answer in llm.engine.run(spool.windows(max_tokens=1 << 20, share=True), Readout("tokens")):
            if isinstance(answer, Exception):
                raise answer
            found[int.from_bytes(tag, "little")] = answer[0]
    return found


def without_kv(llm: LLM, prompts: Sequence[Sequence[int]], out: int) -> list[list[int]]:
    """Returns what greedily follows prompts of one length, each token computed from the whole text before it: one pass
    over all texts a token, without the engine around it."""
    texts, model, config = [list(text) for text in prompts], llm.model, llm.config
    with torch.inference_mode():
        for _ in range(out):
            # The last token is a place for the one to come.
            given = {"prompt_lengths": [len(texts[0])] * len(texts), "sharing": "off"}
            batch = TrainBatch.build(config, [[*text, 0] for text in texts], **given)
            rows = batch.prepared(model.device, model.dtype)
            attend = StepAttend(rows, KVPath(), config.planes, config.scale)
            hidden = model(rows.tokens, rows.positions, attend, rows.read_rows)
            for text, token in zip(texts, model.logits(hidden)[batch.target_reads].argmax(-1).tolist(), strict=True):
                text.append(token)
    return [text[len(prompts[0]) :] for text in texts]


def in_turn(
    ways: dict[Any, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[Any, list[float]], dict[Any, Any]]:
    """Returns the seconds of each way, run round by round after one that does not count, and what each gave last. What
    is there when it begins is not looked at by Python's garbage collector, as in a server: to look through all of it
    takes as long as ten steps of a small model, and falls to any of the ways."""
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    given: dict[str, Any] = {}
    for number in range(repeats + 1):
        for name, run in ways.items():
            began = clock()
            given[name] = run()
            if number:
                seconds[name].append(clock() - began)
    return seconds, given


def random_config(hidden: int, visits: int, blocks: int = 2) -> dict[str, Any]:
    """Returns the config.json of a model of two layers with a gate, which are so many blocks, visited in turn."""
    config = example.hf_config(example.Task(24, 4), hidden, 4 if hidden < 256 else 8, visits)
    return config | {"max_position_embeddings": 1024, "loop": config["loop"] | {"blocks": blocks}}


def random_llm(
    hidden: int, visits: int, device: str, *, blocks: int = 2, dtype: str = "float32", **options: Any
) -> LLM:
    """Returns an LLM of random weights, two blocks of a layer, visited in turn, or one of two layers, with a gate."""
    config = random_config(hidden, visits, blocks)
    options |= {"cache": "off"}  # a round is not to find what the one before has computed
    return LLM(Checkpoint.dummy(config), dtype=dtype, device=device, kv_memory=1 << 30, **options)


def kv(batch: int, prompt: int, out: int, visits: int, repeats: int, device: str) -> dict[str, Any]:
    """Measures generating with K/V and without, and checks that they generate the same."""
    llm = random_llm(64, visits, device)
    prompts = np.random.default_rng(prompt).integers(0, llm.config.vocab_size, (batch, prompt)).tolist()
    ways = {
        "with": lambda: tokens_of(llm, requests(prompts, max_tokens=out)),
        "without": lambda: without_kv(llm, prompts, out),
    }
    seconds, given = in_turn(ways, repeats)
    row_bytes = 2 * llm.config.kv_size * len(llm.config.planes) * 4
    llm.close()
    return {
        "seconds": seconds,
        "ratio": median(seconds["without"]) / median(seconds["with"]),
        "equal tokens": given["with"] == given["without"],
        "kv bytes": batch * (prompt + out - 1) * row_bytes,
    }


def calls_of(llm: LLM, whole: Callable[[int], Any], leaving: Callable[[int], Any], out: int) -> dict[str, int]:
    """Returns how many block calls a run makes with all visits and with exits."""
    counts = []
    for run in (whole, leaving):
        llm.engine.reset_stats()
        run(out)
        counts.append(llm.engine.reset_stats().generation)
    return {"block calls": counts[0].block_calls, "block calls with exits": counts[1].block_calls}


def once(device: str) -> dict[str, Any]:
    """Counts the block calls of 16 queries of one graph: each row once for each route."""
    task, visits = example.Task(24, 4), 8
    rng = np.random.default_rng(0)
    points, _ = task.graph(rng)
    edges = task.edges(points, rng)
    prompts = [[*edges, task.query(node)] for node in range(16)]
    found: dict[str, Any] = {}
    one, other = (0, 1) * 4, (0, 1, 0, 0, 1, 1, 0, 1)
    cases = {
        "one route": [one] * 16,
        "two routes": [one, other] * 8,
        "a route each": [tuple(number >> bit & 1 for bit in range(4)) * 2 for number in range(16)],
    }
    for name, routes in cases.items():
        llm = random_llm(64, visits, device, looped={"exits": "save"})
        tokens_of(llm, requests(prompts, [{"route": route} for route in routes], max_tokens=1))
        pairs = {
            (tuple(prompt[: at + 1]), route, visit)
            for prompt, route in zip(prompts, routes, strict=True)
            for at in range(len(prompt))
            for visit in range(visits)
        }
        found[name] = {"block calls": llm.stats.generation.block_calls, "pairs": len(pairs)}
        llm.close()
    return found


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
    """Measures the paths of generation: all visits; a given template; and rows that leave.

    folder  of a trained model, which is asked real queries, whose tokens are scored; None: random weights of the width
            `hidden`, whose rows leave after as many visits as those of a trained model do: a hop more than the 1 to 5
            that they ask
    blocks, dtype   of the random model
    only    names of paths, beside "fixed" and "+ exits"; none: all
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
    seconds, given = in_turn(ways, repeats)
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
