"""Plan a job: count what it would share and cost, without running the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..checkpoint.mapped import Extent
from ..errors import CheckpointError
from ..model import ModelConfig, config_from
from ..model.machine import DTYPES, available_memory, choose_device, choose_dtype
from ..model.sources import open_source
from ..spec.model import ModelSpec
from ..spec.requests import Request
from ..trie import RowCost, StreamCost, Window, common_prefix_lengths, lexsort_sequences
from ..trie.segments import keys_seen
from .output import Output
from .reader import Job, Reader
from .report.icicle import StreamShape, icicle, walk
from .report.progress import Counts, Progress


@dataclass(frozen=True)
class Cost:
    """The floating-point operations of a run."""

    linear: float  # operations in linear layers
    attention: float  # operations in attention

    @property
    def total(self) -> float:
        return self.linear + self.attention


@dataclass
class JobPlan:
    """The counts of a job."""

    records: int = 0
    errors: int = 0
    first_errors: list[str] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    rows: int = 0
    rows_mlp: int = 0  # rows with sharing "mlp" and `max_batch_rows`, prompts in order of arrival
    longest: int = 0
    outputs: int = 0  # texts to be generated
    output_tokens: int = 0  # maximum tokens of these texts in total
    # maximum output tokens of each prompt, in stream order; empty if nothing is generated
    limits: list[int] = field(default_factory=list)
    shape: StreamShape = field(default_factory=StreamShape)
    # first requests of the stream, with about as many rows as a step has
    sample: list[Request] = field(default_factory=list)
    sample_task: str = ""  # the task of `sample`

    @property
    def saved(self) -> float:
        return 1 - self.rows / self.tokens if self.tokens else 0.0


class _Tally(Output):
    """An Output that keeps only the first few errors."""

    def __init__(self, plan: JobPlan) -> None:
        super().__init__()
        self._plan = plan

    def write(self, number: int, line: str, failed: bool) -> None:
        super().write(number, line, failed)
        if len(self._plan.first_errors) < 3:
            self._plan.first_errors.append(line)


def plan_job(
    source: Any,
    adapter: Any,
    tasks: Mapping[str, Any],
    *,
    limit: int | None = None,
    window: int = 1 << 20,
    max_batch_rows: int = 4096,
    progress: Progress | None = None,
) -> JobPlan:
    """Read, tokenise and sort a job, and return its counts."""
    plan, counts = JobPlan(), Counts()
    tally = _Tally(plan)
    job = Job(source, adapter, tasks, lambda: None, tally, limit=limit)
    reader = Reader(job, counts)
    progress = progress or Progress()
    reader.start()
    try:
        while not reader.has_ended.wait(0.25):
            progress.tick(counts)
        for batch in reader.batches():
            with batch.spool as spool:
                read = tasks[batch.task].readout.kind
                for window_ in plan.shape.watch(spool.windows(max_tokens=window, share=True)):
                    if not plan.sample:
                        plan.sample, plan.sample_task = _first_step(window_, max_batch_rows), batch.task
                    plan.longest = max(plan.longest, int(np.diff(window_.offsets).max()))
                    if read == "tokens":
                        _count_outputs(plan, window_, tasks[batch.task].context)
                for window_ in spool.windows(max_tokens=window, share=False):
                    plan.rows_mlp += _rows_mlp(window_.without_twins(), max_batch_rows)
    finally:
        reader.close()
        progress.close(counts)
    plan.records, plan.errors = counts.records_read, tally.errors
    plan.requests, plan.tokens, plan.rows = plan.shape.num_requests, plan.shape.num_tokens, plan.shape.num_rows
    return plan


def _first_step(window: Window, max_rows: int) -> list[Request]:
    rows = np.cumsum(np.diff(window.offsets) - window.shared)
    return [window.request(i) for i in range(max(1, int(np.searchsorted(rows, max_rows, "right"))))]


def _count_outputs(plan: JobPlan, window: Window, context: int | None) -> None:
    for number, length in enumerate(np.diff(window.offsets).tolist()):
        sampling = window.request(number).sampling
        limits = [limit for limit in (sampling.max_tokens, context and context - length) if limit is not None]
        plan.limits.append(sampling.n * min(limits, default=0))
        plan.outputs += sampling.n
        plan.output_tokens += plan.limits[-1]


@dataclass(frozen=True)
class LayerwisePlan:
    """The weights that a job reads layer by layer, because they do not fit in memory."""

    windows: int  # number of times that all weights are read (an estimate)
    bytes: int  # size of all weights in their file
    total: int  # bytes read in all windows
    rate: float | None = None  # measured read speed in bytes per second; None: no file here, or not measured


MEASURED_BYTES = 64 << 20  # read this much of a file to measure the read speed


def plan_layerwise(
    plan: JobPlan, model: ModelSpec, checkpoint: Checkpoint, *, window: int, measure: bool
) -> LayerwisePlan | None:
    """Return the LayerwisePlan of a job, or None if the weights would stay in memory or the job could not run.

    Args:
        window: Tokens of a window of the job.
        measure: Whether to measure `rate`.
    """
    from ..worker.native.load import shapes_of, window_extents, window_rows

    config, device = config_from(checkpoint.config), choose_device(model.device)
    if model.layerwise == "off" or plan.outputs or device != "cpu" or config.resident is not None:
        return None
    source, extents = None, list[Extent]()
    with suppress(CheckpointError):  # raised if the weights are not here
        source = open_source(checkpoint, config, shapes_of(config.program().weights), 0, {})
        extents = window_extents(source, config)
    itemsize = DTYPES[choose_dtype(model.dtype, checkpoint.config, device)]
    stored = sum(extent.size for extent in extents) or config.num_parameters * DTYPES.get(config.dtype or "", 4)
    held = config.num_parameters * itemsize
    if model.weights != "dtype":
        held = min(held, stored)
    if model.layerwise == "auto" and (checkpoint.format == "dummy" or held <= available_memory()):
        return None
    rows = window_rows(config, itemsize, 2 * held // config.layers)
    windows = max(-(-plan.rows // rows), -(-plan.tokens // window))
    rate = _rate(extents) if measure else None
    del source  # closes its files
    return LayerwisePlan(windows, stored, windows * stored, rate)


def _rate(extents: Sequence[Extent]) -> float | None:
    """Return the speed of reading some of a model's weights, in bytes per second, or None if there is no file."""
    started, size = time.perf_counter(), 0
    for extent in extents:
        size += extent.read(MEASURED_BYTES - size)
        if size >= MEASURED_BYTES:
            break
    return size / max(time.perf_counter() - started, 1e-9) if size else None


def kv_row_bytes(config: ModelConfig) -> int:
    """Return the size of one row's K/V in all planes, in bytes, for the checkpoint's weight dtype."""
    return config.kv_numbers * DTYPES.get(config.dtype or "float32", 4)


def _rows_mlp(window: Window, max_batch_rows: int) -> int:
    """Return the rows of sharing "mlp": whole prompts in order of arrival, unique within steps of `max_batch_rows`."""
    rows, first, stops = 0, 0, window.offsets[1:]
    while first < window.num_requests:
        start = window.offsets[first]
        last = max(first + 1, int(np.searchsorted(stops, start + max_batch_rows, "right")))
        tokens, offsets = window.tokens[start : window.offsets[last]], window.offsets[first : last + 1] - start
        shared = common_prefix_lengths(tokens, offsets, lexsort_sequences(tokens, offsets))
        rows += len(tokens) - int(shared.sum())
        first = last
    return rows


def cost_of(shape: StreamShape, config: ModelConfig) -> tuple[Cost, Cost]:
    """Return (cost with every prefix computed once, cost with nothing shared), without the LM head.

    A row attends to position + 1 keys, or to the last `window` of them in a plane with a sliding window.
    """
    cost, (lengths, shared) = row_cost(config), shape.arrays()
    seen_all = seen_again = 0.0
    for window in cost.planes:
        seen_all += float(keys_seen(lengths, window).sum())
        seen_again += float(keys_seen(shared, window).sum())
    full = Cost(cost.linear * shape.num_rows, cost.per_key * (seen_all - seen_again))
    return full, Cost(cost.linear * shape.num_tokens, cost.per_key * seen_all)


def row_cost(config: ModelConfig) -> RowCost:
    """Return the cost of a row in floating-point operations, without the LM head."""
    per_key = 4.0 * config.heads * config.head_dim
    return RowCost(float(config.linear_flops), per_key, tuple(plane.window for plane in config.planes))


@dataclass(frozen=True)
class PlacedSegment:
    """The segment of one replica."""

    prompts: int  # number of prompts
    rows: int  # rows it computes
    again: int  # rows of the path above its first row, which another replica also computes
    flops: float  # floating-point operations


def place(plan: JobPlan, config: ModelConfig, replicas: int) -> list[PlacedSegment]:
    """Return the segments of a job for equal replicas, in stream order. Some may be empty.

    If text is generated, each prompt counts with the maximum length of its outputs.
    """
    lengths, shared = plan.shape.arrays()
    outputs = np.array(plan.limits, np.int64) if len(plan.limits) == len(lengths) else None
    cost = StreamCost(lengths, shared, row_cost(config), outputs=outputs)
    rows = np.concatenate(([0], np.cumsum(lengths.astype(np.int64) - shared)))
    out = []
    for start, stop in cost.cut(0, len(lengths), [1.0] * replicas):
        shared_rows = int(shared[start]) if start < stop else 0
        flops = cost.of(start, stop)
        out.append(PlacedSegment(stop - start, int(rows[stop] - rows[start]) + shared_rows, shared_rows, flops))
    return out


@dataclass(frozen=True)
class Prefix:
    """A node of the trie: its rows, and the prompts that share them."""

    start: int  # position of its first row
    length: int  # number of rows
    prompts: int
    text: str

    @property
    def saved(self) -> int:
        """Return the number of tokens that sharing this node saves."""
        return self.length * (self.prompts - 1)


def shared_most(shape: StreamShape, decode: Callable[[np.ndarray], str] | None, count: int = 5) -> list[Prefix]:
    """Return the `count` nodes of the trie that save the most tokens, the best first."""
    nodes = [node for node, _ in walk(icicle(shape)) if node.prompts > 1 and node.length]
    nodes.sort(key=lambda node: -node.length * (node.prompts - 1))
    out = []
    for node in nodes[:count]:
        tokens = shape.tokens_of(node)
        text = decode(tokens) if decode is not None and tokens is not None else ""
        out.append(Prefix(node.start, node.length, node.prompts, text))
    return out
