"""The job of Daft's article on dynamic prefix bucketing, with the article's systems and with prefold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..harness import table
from .blocks import BlockEngine
from .cases import ENGINES, Outcome, Setup, run_setup
from .costs import WEIGHT_BYTES, StepCost, machine_named, model_named
from .daft import DaftProvider
from .fleet import Feeder, Replica, run_fleet
from .requests import SimRequest, prefix_repetition
from .scheduled import ScheduledEngine

__all__ = ["PUBLISHED", "PublishedOutcome", "SharedQueue", "balanced_rows", "published", "tables"]


class SharedQueue(Feeder):
    """Gives replicas their requests from one queue per node.

    A replica gets the next `batch` requests when they fit in its `in_flight`. Naive batching is the case that both are
    equal: a batch starts when the batch before it has ended.

    Args:
        batch: Requests that a replica gets at a time.
        in_flight: Maximum number of requests that a replica has at a time.
        nodes: Number of queues. Each has an equal part of the requests.
    """

    def __init__(self, requests: Sequence[SimRequest], *, batch: int, in_flight: int, nodes: int = 1):
        super().__init__()
        size = len(requests)
        self._left = [deque(requests[i * size // nodes : (i + 1) * size // nodes]) for i in range(nodes)]
        self._batch, self._most = batch, in_flight

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given = []
        for replica, count in self.in_flight.items():
            left = self._left[replica % len(self._left)]
            while left and count + self._batch <= self._most:
                batch = [left.popleft() for _ in range(min(self._batch, len(left)))]
                count += len(batch)
                given.append((replica, batch))
            self.in_flight[replica] = count
        return given


@dataclass(frozen=True, slots=True)
class PublishedOutcome(Outcome):
    """An outcome of a system of the article."""

    expected: tuple[float, float | None] | None = None  # published seconds and hit rate; None: not published


# {(system, number of L4s): (seconds, vLLM's hit rate)}, from https://www.daft.ai (dynamic prefix bucketing): 200,000
# prompts of 512 tokens, 512 prefixes of 256 tokens, 128 output tokens, Qwen3-8B in bfloat16.
PUBLISHED: dict[tuple[str, int], tuple[float, float | None]] = {
    ("naive", 128): (977, 0.292),
    ("continuous", 128): (869, 0.265),
    ("sorted", 128): (563, 0.545),
    ("bucketing", 128): (482, 0.54),
    ("Ray Data", 128): (842, None),
    ("bucketing", 64): (865, None),
    ("Ray Data", 64): (1548, None),
    ("bucketing", 32): (1682, None),
    ("Ray Data", 32): (2915, None),
}
# Constants for all systems, fitted by hand: an L4 at its limit of 72 W, with vLLM's overhead between steps.
L4 = {"flops": 42e12, "bandwidth": 240e9, "overhead": 0.018}
LOAD = 65.0  # seconds to load a model; sorting half a gigabyte takes less
# Defaults of vLLM's class LLM, and of its asynchronous engine.
_LLM = {"max_batch_rows": 8192, "max_running": 256}
_ASYNC = {"max_batch_rows": 2048, "max_running": 128}
_CHAT = 9  # tokens of the chat template; only Ray Data's script applies it
_BATCH = 512
_NODE = 4  # replicas per node
_OWN = 1 << 30  # first number of parts that are not shared


def balanced_rows(cost: StepCost) -> int:
    """Return the number of rows that a step computes while it reads the weights. Below it, prompt rows cost no time."""
    model, machine = cost.model, cost.machine
    weights = (model.linear + model.vocab * model.hidden) * WEIGHT_BYTES / machine.bandwidth
    return max(1, int(weights * machine.flops / (2 * model.linear)))


def published(
    *, prompts: int = 200_000, prefixes: int = 512, scale: int = 1, theirs: bool = True, ours: bool = True
) -> Iterator[Outcome]:
    """Yield the outcomes of the published systems, and of prefold without loading time.

    Args:
        scale: Divisor of the numbers of prompts, prefixes and replicas.
        theirs: Whether to run the published systems.
        ours: Whether to run prefold.
    """
    machine = replace(machine_named("L4"), **L4)
    base = Setup(machine, model_named("Qwen3-8B"), load=LOAD)
    requests = prefix_repetition(
        prompts // scale, prefixes=max(1, prefixes // scale), prefix=256, suffix=256, output=128
    )
    cost = StepCost(base.machine, base.model)
    small = {"max_batch_rows": balanced_rows(cost), "max_running": _ASYNC["max_running"]}
    systems = [(one, _LLM if one[0] == "naive" else _ASYNC, expected) for one, expected in PUBLISHED.items()]
    # The last system is bucketing with steps as small as prefold's. It was not published.
    for (name, replicas), options, expected in [*systems, (("bucketing", 128), small, None)] if theirs else ():
        count = max(1, replicas // scale)
        blocks = vllm_blocks(cost, **options)
        engine = Replica(lambda: BlockEngine(cost, blocks=blocks, **options), base.load)  # noqa: B023
        setup = replace(base, replicas=count, engine="vllm", feeder=name, **options)
        feeder = _FEEDERS[name](requests, count)
        shown = name if expected else f"{name}, steps of {options['max_batch_rows']}"
        yield PublishedOutcome(shown, setup, run_fleet([engine] * count, feeder), expected=expected)
    if not ours:
        return
    base = replace(base, load=0.0, max_batch_rows=balanced_rows(cost))
    for replicas, feeder in ((32, "segments"), (64, "segments"), (128, "segments"), (128, "stream")):
        setup = replace(base, replicas=max(1, replicas // scale), feeder=feeder)
        yield Outcome(f"{setup.name}, steps of {setup.max_batch_rows}", setup, run_setup(setup, requests))


def vllm_blocks(cost: StepCost, *, max_batch_rows: int, max_running: int) -> int:
    """Return the number of blocks in vLLM's pool.

    The pool has 0.9 of the memory minus the weights, 0.6 GB for CUDA, and the largest step. The largest tensors of that
    step are the hidden layer of the MLP, and the sorted logits with their indices.
    """
    model = cost.model
    inner = (model.linear / model.layers - 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim) / (
        3 * model.hidden
    )
    step = max_batch_rows * (3 * inner + 2 * model.hidden) * 2 + max_running * model.vocab * 18
    left = 0.9 * cost.machine.memory - 2 * model.total - 0.6e9 - step
    return int(left / model.kv_bytes / BlockEngine.block)


def _naive(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    """Split the input into one part per node. The replicas of a node get batches of 512 from it in turn."""
    return SharedQueue(requests, batch=_BATCH, in_flight=_BATCH, nodes=max(1, replicas // _NODE))


def _sorted(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    in_order = sorted(requests, key=lambda request: request.path)
    return DaftProvider(in_order, replicas, batch=_BATCH)


def _ray_data(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    """Give each replica at most eight batches of 16 at a time, in the chat template."""
    longer = [replace(request, path=(*request.path, (_OWN + request.key, _CHAT))) for request in requests]
    return SharedQueue(longer, batch=16, in_flight=128)


_FEEDERS: dict[str, Callable[[Sequence[SimRequest], int], Feeder]] = {
    "naive": _naive,
    "continuous": lambda requests, replicas: DaftProvider(requests, replicas, batch=_BATCH),
    "sorted": _sorted,
    "bucketing": lambda requests, replicas: DaftProvider(requests, replicas),
    "Ray Data": _ray_data,
}


ENGINES.update({"prefold-steps": ScheduledEngine, "vllm": BlockEngine})


def tables(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return two Markdown tables: simulated and published times of the article's systems, and times of prefold."""
    theirs = [one for one in outcomes if isinstance(one, PublishedOutcome)]
    ours = [one for one in outcomes if not isinstance(one, PublishedOutcome)]
    unit = max(ours, key=lambda one: one.run.replicas)  # the first outcome with the most replicas
    rows: list[list[object]] = []
    for one in theirs:
        seconds, rate = one.expected or (None, None)
        rates = one.run.hits.rates()
        row = [one.name, one.run.replicas, f"{one.run.seconds:,.0f}", f"{seconds:,.0f}" if seconds else ""]
        row += [f"{one.run.seconds / seconds - 1:+.1%}" if seconds else "", f"{rates['vllm']:.1%}"]
        rows.append([*row, f"{rate:.1%}" if rate else "", f"{rates['first_admission'] + rates['in_step']:.1%}"])
    headers = ["system", "L4s", "simulated s", "published s", "difference", "vLLM's hit rate", "published"]
    found = {"theirs": table([*headers, "first admission + in-step"], rows)}
    rows = [
        [
            one.name, one.run.replicas, f"{one.run.seconds:,.0f}", f"{one.run.seconds / unit.run.seconds:.2f}",
            f"{one.run.hits.rows_computed / max(1, one.run.prompt_tokens):.1%}", f"{one.run.idle_share():.1%}",
        ]
        for one in ours
    ]  # fmt: skip
    headers = ["ours, without loading", "L4s", "simulated s", f"time, {unit.run.replicas} L4s = 1"]
    return found | {"ours": table([*headers, "rows computed of tokens", "idle"], rows)}
