"""Loads a model, or a rank's part of it, for the executor of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from ...checkpoint import Checkpoint
from ...model import ModelConfig, load_adapter, load_model
from ...model.device import DTYPES, settle_threads
from ...model.parallel import ALONE
from ...model.shard import SomeRank
from ...spec.model import ModelSpec
from ..loaded import Loaded
from ..local import LocalWorker
from ..parts import parts_of


def load_worker(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ModelSpec,
    *,
    dtype: str,
    device: str,
    ranks: SomeRank | None = None,
) -> Loaded:
    """Return the model of a checkpoint, ready to run; the errors are those of `LLM`.

    ranks: this process among those that the model is split over; None: it has all
    """
    settle_threads(options.threads)
    place, number = torch.device(device), DTYPES[dtype]
    if ranks is not None and place.type == "cuda":
        place = torch.device("cuda", ranks.rank)
    where: dict[str, Any] = {"dtype": number, "device": place, "ranks": ranks or ALONE}
    model = load_model(checkpoint, **where, seed=options.seed, config=config)
    parts = parts_of(model, checkpoint, options.seed)
    adapters = {
        name: load_adapter(folder, model.config, **where, name=name)
        for name, folder in (options.adapters or {}).items()
    }
    worker = LocalWorker(model, adapters, parts=parts)
    return Loaded(worker, model.config, model, "torch", worker.passes)
