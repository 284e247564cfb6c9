"""The published job of Daft's article on dynamic prefix bucketing: its systems, and ours with parts left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .blocks import BlockEngine
from .cases import Outcome, Setup, run_setup
from .costs import WEIGHT_BYTES, StepCost, machine_named, model_named
from .daft import DaftProvider
from .fleet import Feeder, Replica, run_fleet
from .others import SharedQueue
from .requests import SimRequest, prefix_repetition

__all__ = ["PUBLISHED", "PublishedOutcome", "balanced_rows", "published"]


@dataclass(frozen=True, slots=True)
class PublishedOutcome(Outcome):
    """An outcome beside the seconds and the hit rate that were published for it; None: nothing was."""

    expected: tuple[float, float | None] | None = None


# Seconds and vLLM's hit rate of https://www.daft.ai (dynamic prefix bucketing): 200,000 prompts of 512 tokens, 512
# prefixes of 256, 128 output tokens, Qwen3-8B in bfloat16, by (system, number of L4).
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
# One set of constants for all of them, fitted by hand: an L4 at its 72 W, with vLLM's work between steps.
L4 = {"flops": 42e12, "bandwidth": 240e9, "overhead": 0.018}
LOAD = 65.0  # seconds until a model is there; the sort of half a gigabyte is done by then
# What vLLM chooses where nothing is said: for its class LLM, and for its asynchronous engine.
_LLM = {"max_batch_rows": 8192, "max_running": 256}
_ASYNC = {"max_batch_rows": 2048, "max_running": 128}
_CHAT = 9  # tokens that the chat template adds, which only Ray Data's script applies
_BATCH = 512
_NODE = 4  # replicas of a node
_OWN = 1 << 30  # numbers of parts that nobody shares

# What of ours is left out of each line, or put in its place: fields of Setup.
_LEFT_OUT: tuple[dict[str, object], ...] = (
    {"feeder": "segments", "max_batch_rows": None},
    {"feeder": "segments", "max_batch_rows": 2048},
    {"feeder": "segments", "max_batch_rows": 8192},
    {"feeder": "segments", "steal": False},
    {"feeder": "segments", "engine": "vllm"},
    {"feeder": "static"},
    {"feeder": "stream"},
    {"feeder": "stream without runs"},
    {"feeder": "stream without shares"},
    {"feeder": "stream without copies"},
    {"feeder": "stream", "reports": False},
    {"feeder": "stream", "policy": "least-loaded"},
    {"feeder": "stream", "engine": "vllm"},
    {"feeder": "routed"},
    {"feeder": "routed", "policy": "round-robin"},
    {"feeder": "routed", "policy": "round-robin", "engine": "vllm"},
)


def balanced_rows(cost: StepCost) -> int:
    """Returns how many rows a step computes while the weights are read: in a step of fewer, rows of prompts beside
    those of outputs cost nothing."""
    model, machine = cost.model, cost.machine
    weights = (model.linear + model.vocab * model.hidden) * WEIGHT_BYTES / machine.bandwidth
    return max(1, int(weights * machine.flops / (2 * model.linear)))


def published(
    *, prompts: int = 200_000, prefixes: int = 512, scale: int = 1, theirs: bool = True, ours: bool = True
) -> Iterator[Outcome]:
    """Yields the published systems, and ours without loading, each as it is done.

    scale  so many times fewer prompts, prefixes and replicas
    """
    machine = replace(machine_named("L4"), **L4)
    base = Setup(machine, model_named("Qwen3-8B"), load=LOAD)
    requests = prefix_repetition(
        prompts // scale, prefixes=max(1, prefixes // scale), prefix=256, suffix=256, output=128
    )
    cost = StepCost(base.machine, base.model)
    small = {"max_batch_rows": balanced_rows(cost), "max_running": _ASYNC["max_running"]}
    systems = [(one, _LLM if one[0] == "naive" else _ASYNC, expected) for one, expected in PUBLISHED.items()]
    # Theirs with steps as small as ours, which nobody published.
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
    for replicas in (32, 64, 128):
        setup = replace(base, replicas=max(1, replicas // scale), feeder="segments")
        yield Outcome(_named(setup), setup, run_setup(setup, requests))
    for part in _LEFT_OUT:
        setup = replace(base, replicas=max(1, 128 // scale), **part)  # type: ignore[arg-type]
        yield Outcome(_named(setup), setup, run_setup(setup, requests))


def _named(setup: Setup) -> str:
    return f"{setup.name}, steps " + ("as found" if setup.max_batch_rows is None else f"of {setup.max_batch_rows:,}")


def vllm_blocks(cost: StepCost, *, max_batch_rows: int, max_running: int) -> int:
    """Returns how many blocks vLLM's pool has: of 0.9 of the memory what weights, 0.6 GB of CUDA and the largest step
    leave, which it tries out before. Of such a step these are most: what lies between the two halves of the MLP, and
    logits, sorted, with their places."""
    model = cost.model
    inner = (model.linear / model.layers - 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim) / (
        3 * model.hidden
    )
    step = max_batch_rows * (3 * inner + 2 * model.hidden) * 2 + max_running * model.vocab * 18
    left = 0.9 * cost.machine.memory - 2 * model.total - 0.6e9 - step
    return int(left / model.kv_bytes / BlockEngine.block)


def _naive(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    """One part of the input for each node, in batches of 512, which its replicas take one after the other."""
    return SharedQueue(requests, batch=_BATCH, in_flight=_BATCH, nodes=max(1, replicas // _NODE))


def _sorted(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    in_order = sorted(requests, key=lambda request: request.path)
    return DaftProvider(in_order, replicas, batch=_BATCH)


def _ray_data(requests: Sequence[SimRequest], replicas: int) -> Feeder:
    """Eight batches of 16 at a time, as conversations."""
    longer = [replace(request, path=(*request.path, (_OWN + request.key, _CHAT))) for request in requests]
    return SharedQueue(longer, batch=16, in_flight=128)


_FEEDERS: dict[str, Callable[[Sequence[SimRequest], int], Feeder]] = {
    "naive": _naive,
    "continuous": lambda requests, replicas: DaftProvider(requests, replicas, batch=_BATCH),
    "sorted": _sorted,
    "bucketing": lambda requests, replicas: DaftProvider(requests, replicas),
    "Ray Data": _ray_data,
}
