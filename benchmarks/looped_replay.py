"""The ways to take prompts through a routed model, without the engine around it: cells of benchmarks/looped.py.

    soft           every block is computed for everybody, and mixed
    generic hard   before each visit the router is asked, and who goes to one block goes together
    plan replay    the same with routes that are known: nobody is asked
    template replay    requests of one route go through its blocks as one batch

What no way can do without is a template's blocks alone: `blocks alone` calls the layers, and nothing else.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import median

from prefold.checkpoint import Checkpoint
from prefold.looped.gates import choose, mixture, summary
from prefold.looped.model import LoopedLM
from prefold.looped.train import whole_sequences
from prefold.model import load_model
from prefold.train import TrainBatch

Route = tuple[int, ...]
Plans = Sequence[Route]


def random_model(hidden: int, heads: int, blocks: int, visits: int, device: str, *, layers: int = 1) -> LoopedLM:
    """Returns a routed model of random weights, `layers` of them a block, that never leaves of its own accord."""
    config = {
        "architectures": ["PrefoldLoopedForCausalLM"],
        "model_type": "prefold_looped",
        "vocab_size": 600,
        "hidden_size": hidden,
        "num_hidden_layers": blocks * layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 2 * hidden,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "loop": {
            "blocks": blocks,
            "visits": visits,
            "gate": True,
            "router": {"kind": "fixed", "threshold": 1.0, "planner": True},
        },
    }
    model = load_model(Checkpoint.dummy(config), dtype=torch.float32, device=device)
    assert isinstance(model, LoopedLM)
    return model


@dataclass
class Prompts:
    """Prompts are some prompts of one length, as rows one behind the other.

    Attention of n of them is the same whoever they are, so what it needs is made once for each n.
    """

    model: LoopedLM
    tokens: np.ndarray  # int64 [prompts, length]

    def __post_init__(self) -> None:
        self._attends: dict[int, tuple[Any, torch.Tensor]] = {}

    @classmethod
    def draw(cls, model: LoopedLM, count: int, length: int, seed: int = 0) -> Prompts:
        """Returns so many random prompts."""
        return cls(model, np.random.default_rng(seed).integers(0, model.config.vocab_size, (count, length)))

    def of(self, numbers: Sequence[int]) -> Prompts:
        """Returns some of the prompts."""
        some = Prompts(self.model, self.tokens[list(numbers)])
        some._attends = self._attends
        return some

    @property
    def count(self) -> int:
        return len(self.tokens)

    def attend(self, count: int) -> tuple[Any, torch.Tensor]:
        """Returns who attends for so many prompts, and their positions."""
        if count not in self._attends:
            ones = np.zeros((count, self.tokens.shape[1] + 1), np.int64)
            batch = TrainBatch.build(self.model.config, list(ones), sharing="off")
            _, positions, attend, _ = whole_sequences(self.model, batch)
            self._attends[count] = attend, positions
        return self._attends[count]

    def start(self) -> Any:
        """Returns the prompts' rows before the first visit."""
        attend, positions = self.attend(self.count)
        return self.model.start(torch.from_numpy(self.tokens.reshape(-1)).to(self.model.device), positions, attend)


def stream(rows: Any) -> torch.Tensor:
    return rows.x if rows.delta is None else rows.x + rows.delta


def last_logits(prompts: Prompts, rows: Any) -> torch.Tensor:
    """Returns the logits after each prompt's last row."""
    length = prompts.tokens.shape[1]
    rows.x, rows.delta = stream(rows)[length - 1 :: length], None
    return prompts.model.logits(prompts.model.finish(rows))


def visit_in_place(prompts: Prompts, rows: Any, x: torch.Tensor, block: int) -> None:
    """Takes states x [n, length, hidden] of n prompts through a block; the rows tell how all of them go through it."""
    count, length = x.shape[:2]
    attend, _ = prompts.attend(count)
    size = count * length  # the cosines of n prompts of one length are those of the first n
    cos_sin = rows.cos_sin if count == prompts.count else [c[:size] for c in rows.cos_sin]
    some = replace(rows, x=x.reshape(size, -1), delta=None, attend=attend, cos_sin=cos_sin, plane=0)
    prompts.model.visit(some, block)
    if some.delta is None:
        x.copy_(some.x.view_as(x))
    else:
        torch.add(some.x.view_as(x), some.delta.view_as(x), out=x)


def put_together(said: list[int], order: list[int], x: torch.Tensor) -> None:
    """Puts prompts that go to one block side by side, in place. Only those move that are not where their block's are;
    of two blocks the one comes first for which fewer move."""
    ways = [sorted(said)]
    if len(set(said)) == 2:
        ways.append(ways[0][::-1])
    wanted = min(ways, key=lambda way: sum(map(operator.ne, way, said)))
    places = [place for place, block in enumerate(said) if block != wanted[place]]
    if not places:
        return
    waiting = defaultdict(list)
    for place in places:
        waiting[said[place]].append(place)
    sources = [waiting[wanted[place]].pop() for place in places]
    x[places] = x[sources]
    moved = [order[source] for source in sources]
    for place, number in zip(places, moved, strict=True):
        order[place], said[place] = number, wanted[place]


def grouped(
    prompts: Prompts, picks: Callable[[list[int], torch.Tensor, int], list[int]]
) -> tuple[torch.Tensor, list[Route]]:
    """Returns logits and routes where before each visit those who go to one block are put together.

    picks  gives the next block of prompts, or blocks where one has left, of their numbers, their states
           [prompts, length, hidden], and the number of the visit
    """
    model, rows, length = prompts.model, prompts.start(), prompts.tokens.shape[1]
    blocks, routes = model.loop.blocks, [[] for _ in range(prompts.count)]
    x, order = stream(rows).view(prompts.count, length, -1), list(range(prompts.count))
    for visit in range(len(model.loop.order)):
        said = picks(order, x, visit)
        said = [blocks if len(routes[n]) < visit else block for n, block in zip(order, said, strict=True)]
        if min(said) == blocks:
            break
        put_together(said, order, x)
        first = 0
        for block, group in itertools.groupby(said):
            stop = first + len(list(group))
            if block < blocks:
                visit_in_place(prompts, rows, x[first:stop], block)
                for number in order[first:stop]:
                    routes[number].append(block)
            first = stop
    rows.x, rows.delta = x[np.argsort(order).tolist()].flatten(0, 1), None
    return last_logits(prompts, rows), [tuple(route) for route in routes]


def asked(prompts: Prompts, x: torch.Tensor, visit: int) -> list[int]:
    """Returns what the router says of prompts' states."""
    model = prompts.model
    return choose(model.router(summary(x[:, -1], x.mean(1)), visit), model.loop.router.threshold).tolist()


def generic_hard(prompts: Prompts) -> tuple[torch.Tensor, list[Route]]:
    """Asks the router before each visit."""
    return grouped(prompts, lambda order, x, visit: asked(prompts, x, visit))


def plan_replay(prompts: Prompts, plans: Plans) -> torch.Tensor:
    """Goes the routes that are given, putting prompts together before each visit."""
    blocks = prompts.model.loop.blocks

    def picks(order: list[int], x: torch.Tensor, visit: int) -> list[int]:
        return [plans[n][visit] if visit < len(plans[n]) else blocks for n in order]

    return grouped(prompts, picks)[0]


def template_replay(prompts: Prompts, plans: Plans) -> torch.Tensor:
    """Goes the routes that are given, those of one route as one batch from beginning to end."""
    by_route: dict[Route, list[int]] = defaultdict(list)
    for number, route in enumerate(plans):
        by_route[tuple(route)].append(number)
    found: list[Any] = [None] * prompts.count
    for route, numbers in by_route.items():
        some = prompts if len(numbers) == prompts.count else prompts.of(numbers)
        rows = some.start()
        for block in route:
            some.model.visit(rows, block)
        for number, logits in zip(numbers, last_logits(some, rows), strict=True):
            found[number] = logits
    return torch.stack(found)


def soft(prompts: Prompts) -> torch.Tensor:
    """Computes every block in each visit, and mixes."""
    model, length = prompts.model, prompts.tokens.shape[1]
    routing = replace(model.loop.router, kind="soft")
    rows, here = prompts.start(), torch.ones(prompts.count, 1, device=model.device)
    for visit in range(len(model.loop.order)):
        x = stream(rows).view(prompts.count, length, -1)
        shares = mixture(model.router(summary(x[:, -1], x.mean(1)), visit), routing)
        weights, here = shares[:, :-1] * here, here * (1 - shares[:, -1:])
        mixed = x * (1 - weights.sum(1, keepdim=True))[:, None]
        for block in range(model.loop.blocks):
            part = replace(rows, x=x.flatten(0, 1).clone(), delta=None, plane=0)
            model.visit(part, block)
            mixed = mixed + stream(part).view_as(x) * weights[:, block, None, None]
        rows.x, rows.delta, rows.plane = mixed.flatten(0, 1), None, 0
    return last_logits(prompts, rows)


def blocks_alone(prompts: Prompts, route: Route) -> Callable[[], None]:
    """Returns what calls the layers of a route over the prompts' rows, and nothing else."""
    rows = prompts.start()
    model, x = prompts.model, stream(rows)

    def run() -> None:
        now = replace(rows, x=x.clone(), delta=None, plane=0)
        for block in route:
            model.go_through(now, model.loop.block(block, model.config.layers))

    return run


def groups_alone(prompts: Prompts, routes: Plans) -> Callable[[], None]:
    """Returns what calls the layers as often, and for as many prompts each time, as those do that are put together for
    these routes, and nothing else."""
    rows, length = prompts.start(), prompts.tokens.shape[1]
    model, x = prompts.model, stream(rows)
    calls = [
        (block, [route[visit] for route in routes if visit < len(route)].count(block))
        for visit in range(len(model.loop.order))
        for block in range(model.loop.blocks)
    ]
    given = []
    for block, count in calls:
        if count:
            cos_sin = [one[: count * length] for one in rows.cos_sin]
            given.append((block, count * length, prompts.attend(count)[0], cos_sin))

    def run() -> None:
        for block, size, attend, cos_sin in given:
            now = replace(rows, x=x[:size].clone(), delta=None, attend=attend, cos_sin=cos_sin, plane=0)
            model.go_through(now, model.loop.block(block, model.config.layers))

    return run


def times_of(ways: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, list[float]]:
    """Returns the seconds of each way, in turn, round by round, after two rounds that do not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 2):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                found[name].append(time.perf_counter() - began)
    return found


@torch.inference_mode()
def seed_setting(device: str, batch: int, length: int, visits: int, repeats: int, hidden: int = 64) -> dict[str, Any]:
    """Measures every way at a setting such as the seed's (16 prompts of 128, width 64, 4 heads, 8 visits)."""
    model = random_model(hidden, 4, 2, visits, device)
    prompts = Prompts.draw(model, batch, length)
    hard, routes = generic_hard(prompts)
    template = Counter(routes).most_common(1)[0][0]
    plans, same = routes, [template] * batch

    def router() -> None:
        x = torch.zeros(batch, length, hidden, device=device)
        for visit in range(visits):
            choose(model.router(summary(x[:, -1], x.mean(1)), visit), 1.0).tolist()

    def planner() -> None:
        x = stream(prompts.start()).view(batch, length, hidden)
        choose(model.planner(summary(x[:, -1], x.mean(1))).flatten(0, 1), 1.0).tolist()

    # Replay is to be equal to the bit: at the batches of the run it replays.
    equal = {"plan": bool(torch.equal(plan_replay(prompts, plans), hard))}
    of_template = prompts.of([n for n, route in enumerate(routes) if route == template])
    equal["template"] = bool(
        torch.equal(template_replay(of_template, [template] * of_template.count), generic_hard(of_template)[0])
    )
    ways = {
        "soft": lambda: soft(prompts),
        "generic hard": lambda: generic_hard(prompts),
        "plan replay": lambda: plan_replay(prompts, plans),
        "template replay": lambda: template_replay(prompts, plans),
        "one template": lambda: template_replay(prompts, same),
        "one template, generic": lambda: plan_replay(prompts, same),
        "its blocks alone": blocks_alone(prompts, template),
        "its groups alone": groups_alone(prompts, routes),
        "router alone": router,
        "planner alone": planner,
    }
    seconds = times_of(ways, repeats, device)
    one = {name: median(values) for name, values in seconds.items()}
    calls = sum(map(len, routes)) / batch
    bound = one["its blocks alone"] / len(template) * calls + one["router alone"]
    return {
        "seconds": seconds,
        "routes": len(set(routes)),
        "visits": calls,
        "largest logit difference": float((template_replay(prompts, plans) - hard).abs().max()),
        "equal to the bit": equal,
        "generic over its blocks and router": one["generic hard"] / bound,
        "generic over its groups and router": one["generic hard"] / (one["its groups alone"] + one["router alone"]),
        "template over its blocks": one["one template"] / one["its blocks alone"],
        "gain of plans": one["generic hard"] / one["plan replay"],
        "gain of templates": one["generic hard"] / one["template replay"],
        "bound of the gain": bound / one["its blocks alone"] * len(template) / calls,
    }


@torch.inference_mode()
def queue(
    device: str, templates: int, requests: int, batch: int, length: int, visits: int, repeats: int, hidden: int = 64
) -> dict[str, Any]:
    """Measures a queue of requests with so many templates, in random order: batches as they come, each grouped before
    each visit (generic), against batches of one template. TTFT counts from when all requests are there."""
    model = random_model(hidden, 4, 2, visits, device)
    rng = np.random.default_rng(templates)
    drawn: list[Route] = [tuple(rng.integers(0, 2, visits).tolist()) for _ in range(templates)]
    while len(set(drawn)) < templates:
        drawn = list({*drawn, tuple(rng.integers(0, 2, visits).tolist())})
    plans = [drawn[n] for n in rng.integers(0, templates, requests)]
    prompts = Prompts.draw(model, requests, length)
    in_turn = np.array_split(np.arange(requests), requests // batch)
    by_template = [np.flatnonzero([plan == one for plan in plans]) for one in drawn]
    together = [
        numbers[at : at + batch] for numbers in by_template if len(numbers) for at in range(0, len(numbers), batch)
    ]
    first: dict[str, list[np.ndarray]] = {"generic": [], "template": []}
    logits = {name: np.zeros((requests, model.config.vocab_size), np.float32) for name in first}

    def run(name: str, batches: Sequence[np.ndarray], way: Callable[[Prompts, Plans], torch.Tensor]) -> None:
        began, ends = time.perf_counter(), np.zeros(requests)
        for numbers in batches:
            logits[name][numbers] = way(prompts.of(numbers), [plans[n] for n in numbers]).cpu().numpy()
            ends[numbers] = time.perf_counter() - began
        first[name].append(ends)

    def generic(some: Prompts, plans: Plans) -> torch.Tensor:
        """The router is asked, and what it says not heeded: the plans are what a trained one would have said."""

        def picks(order: list[int], x: torch.Tensor, visit: int) -> list[int]:
            asked(some, x, visit)
            return [plans[n][visit] for n in order]

        return grouped(some, picks)[0]

    ways = {
        "generic": lambda: run("generic", in_turn, generic),
        "template": lambda: run("template", together, template_replay),
    }
    seconds = times_of(ways, repeats, device)
    p95 = {name: median([float(np.percentile(ends, 95)) for ends in found[2:]]) for name, found in first.items()}
    return {
        "seconds": seconds,
        "gain": median(seconds["generic"]) / median(seconds["template"]),
        "p95 ttft": p95,
        "largest logit difference": float(np.abs(logits["generic"] - logits["template"]).max()),
        "batches": {"generic": len(in_turn), "template": len(together)},
    }
