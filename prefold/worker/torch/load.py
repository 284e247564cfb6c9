"""Loads a model for the executor of PyTorch, in one piece or split over ranks."""

from __future__ import annotations

from typing import Any

import torch

from ... import kernels
from ...checkpoint import Checkpoint
from ...model import ModelConfig, load_adapter, load_model
from ...model.device import DTYPES, settle_threads
from ...model.parallel import ALONE, CollectiveError
from ...spec.model import ModelSpec
from ..loaded import Loaded
from ..local import LocalWorker
from ..parts import parts_of
from ..tensor_parallel import TensorParallelWorker


def load_worker(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ModelSpec,
    *,
    dtype: str,
    device: str,
) -> Loaded:
    """Return the model of a checkpoint, ready to run; the errors are those of `LLM`."""
    settle_threads(options.threads)
    place, number = torch.device(device), DTYPES[dtype]
    team = None
    if options.tensor_parallel > 1:
        place = torch.device("cuda", 0) if place.type == "cuda" else place
        team = _start_ranks(checkpoint, config, options, number, place)
    try:
        ranks = ALONE if team is None else team.ranks
        where: dict[str, Any] = {"dtype": number, "device": place, "ranks": ranks}
        model = load_model(checkpoint, **where, seed=options.seed, config=config, keep=options.weights)
        parts = parts_of(model, checkpoint, options.seed)
        adapters = {
            name: load_adapter(folder, model.config, **where, name=name)
            for name, folder in (options.adapters or {}).items()
        }
        worker = LocalWorker(model, adapters, parts=parts)
        if team is not None:
            team.join(worker)
    except BaseException as error:
        if team is not None and isinstance(error, CollectiveError):
            team.fail(error)  # with what kept a rank from it
        if team is not None:
            team.close()
        raise
    passes = "; ".join(filter(None, (worker.passes, model.stored_as)))
    return Loaded(team or worker, model.config, model, "torch", passes, options.tensor_parallel)


def _start_ranks(
    checkpoint: Checkpoint, config: ModelConfig, options: ModelSpec, dtype: torch.dtype, device: torch.device
) -> TensorParallelWorker:
    """Start the processes of the other ranks, and return them as one worker."""
    threads = options.threads
    if device.type == "cpu" and threads is None:
        threads = max(1, kernels.threads() // options.tensor_parallel)
        settle_threads(threads)
    return TensorParallelWorker(
        checkpoint,
        config,
        size=options.tensor_parallel,
        dtype=dtype,
        device=device,
        threads=threads or kernels.threads(),
        seed=options.seed,
        adapters=options.adapters or {},
    )
