"""Measure how fast this machine computes a job, by running some of its prompts through its model.

Random weights replace a checkpoint's weights. A GGUF file keeps its blocks, because other kernels multiply them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import JobError
from ..spec.model import ModelSpec

MOST_BYTES = 2 << 30  # bytes of weights; only some layers of a larger model are measured
MOST_LAYERS = 8  # maximum number of measured layers of a larger model
WARM_ROWS = 256  # rows of the warm-up steps, whose speed determines the rows of the measured step
SECONDS = 2.0  # target duration of the measured step
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names in config.json


@dataclass(frozen=True)
class Speed:
    """Operations per second, counted as in `jobs.plan.cost_of`, and a description of the measurement."""

    flops: float
    words: str


def measure_speed(input: Any, job_plan: Any) -> Speed:
    """Return the speed of one step of a job. Raise JobError if the model cannot be measured here.

    Prompts, read-outs, dtype, kernels, device, threads and rows of a step are the job's. The time does not depend on
    the values of weights, so no weights are downloaded. Only the weights of a small GGUF file are read.
    """
    from ..model import config_from

    config, model = config_from(input.checkpoint.config), input.spec.model
    depths = _depths(input.checkpoint, config, model)
    requests = [_alone(request, config.vocab_size) for request in job_plan.sample]
    deepest = _Probe(input, job_plan.sample_task, depths[-1])
    count = deepest.warm_up(requests, model.max_batch_rows)
    seconds, sample = deepest.seconds(requests[:count]), requests[:count]
    flops, what = _flops(sample, config), deepest.words
    if depths[-1] < config.layers:
        shallow = _Probe(input, job_plan.sample_task, depths[0])
        shallow.warm_up(requests, model.max_batch_rows)
        layers_only = seconds - shallow.seconds(sample)
        counted, few = _flops(sample, deepest.config), _flops(sample, shallow.config)
        seconds += max(0.0, layers_only) * (flops - counted) / (counted - few)
        what += f"; extrapolated from {depths[0]} and {depths[-1]} of {config.layers} layers"
    return Speed(flops / seconds, f"measured: {_rows(sample)[-1]:,} rows of this job, {what}")


def _depths(checkpoint: Any, config: Any, model: ModelSpec) -> tuple[int, ...]:
    """Return the number of layers to measure: all, or two smaller numbers if memory is too small."""
    from ..model.machine import DTYPES, available_memory, choose_device, choose_dtype

    device = choose_device(model.device)
    size = DTYPES[choose_dtype(model.dtype, checkpoint.config, device)]
    most = min(MOST_BYTES, available_memory(device) // 2)
    if config.num_parameters * size <= most:
        return (config.layers,)
    for depth in range(min(MOST_LAYERS, config.layers), 1, -1):
        if _config_of(_shallow(checkpoint, config.layers, depth)).num_parameters * size <= most:
            return depth // 2, depth
    raise JobError("the speed cannot be measured: two layers of the model do not fit in memory; give --gflops X")


def _shallow(checkpoint: Any, layers: int, depth: int) -> Any:
    """Return a checkpoint with the first `depth` of the `layers` layers of `checkpoint`, for measuring."""
    from ..checkpoint import Checkpoint

    config = checkpoint.config
    if depth == layers and checkpoint.format == "gguf":
        return checkpoint
    if depth != layers:
        first = {
            key: value[:depth] for key, value in config.items() if isinstance(value, list) and len(value) == layers
        }
        config = {**config, **first, **{key: depth for key in _LAYERS if key in config}}
    return Checkpoint.dummy(config, name=checkpoint.name, path=checkpoint.path)


def _config_of(checkpoint: Any) -> Any:
    from ..model import config_from

    return config_from(checkpoint.config)


class _Probe:
    """The job's model, or its first `depth` layers with random weights."""

    def __init__(self, input: Any, task: str, depth: int):
        from ..jobs.models import load_llm

        layers = _config_of(input.checkpoint).layers
        checkpoint = _shallow(input.checkpoint, layers, depth)
        self.config = _config_of(checkpoint)
        if self.config.layers != depth:
            raise JobError(
                f"the speed of {input.checkpoint.name} cannot be measured with fewer layers; give --gflops X"
            )
        model = input.spec.model
        whole = {"adapters": None, "load_format": "auto", "layerwise": "off"}
        model = replace(model, **whole, images=replace(model.images, mmproj=None))
        self._llm = load_llm(model, checkpoint, input.tokenizer)
        self._task = input.tasks[task]
        dtype = str(self._llm.dtype).removeprefix("torch.")
        weights = "random weights in " if checkpoint.format == "dummy" else ""
        self.words = f"{weights}{dtype} on {self._llm.device}; {self._llm.passes}"

    def warm_up(self, requests: Sequence[Any], most_rows: int) -> int:
        """Run a few requests. Return how many of all requests fit in a step of about SECONDS."""
        rows = _rows(requests)
        few = _count(rows, WARM_ROWS)
        self.seconds(requests[:few])  # untimed: compiles kernels and allocates buffers
        speed = rows[few - 1] / self.seconds(requests[:few])
        return _count(rows, max(WARM_ROWS, min(most_rows, int(SECONDS * speed))))

    def seconds(self, requests: Sequence[Any]) -> float:
        """Run requests and return the seconds."""
        from ..tasks.base import Work
        from ..tasks.run import checked, run_works

        works = [Work([request]) for request in requests]
        started = time.perf_counter()
        checked(run_works(self._llm.engine, self._task, works, seed=0))
        return max(time.perf_counter() - started, 1e-9)


def _alone(request: Any, vocab_size: int) -> Any:
    """Return a request for measuring: only its prompt, without an adapter, and with ids in the vocabulary."""
    sampling = None if request.sampling is None else replace(request.sampling, max_tokens=1, min_tokens=0, n=1)
    tokens = request.tokens % vocab_size  # rows of images have larger ids
    base = request.namespace._replace(adapter="")
    return replace(request, tokens=tokens, sampling=sampling, namespace=base, media=())


def _shape(requests: Sequence[Any]) -> Any:
    from ..jobs.report.icicle import StreamShape

    shape = StreamShape()
    shape.add(np.concatenate([r.tokens for r in requests]), np.cumsum([0, *(len(r.tokens) for r in requests)]))
    return shape


def _rows(requests: Sequence[Any]) -> np.ndarray:
    """Return the rows of the first request, of the first two, and so on, for requests in stream order."""
    lengths, shared = _shape(requests).arrays()
    return np.cumsum(lengths.astype(np.int64) - shared)


def _count(rows: np.ndarray, most: int) -> int:
    """Return how many requests have at most `most` rows together, at least one."""
    return max(1, int(np.searchsorted(rows, most, "right")))


def _flops(requests: Sequence[Any], config: Any) -> float:
    from ..jobs.plan import cost_of

    return cost_of(_shape(requests), config)[0].total
