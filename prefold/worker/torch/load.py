"""Load a checkpoint's weights into a CausalLM, and make the worker that runs it.

Names, shapes and memory are checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ... import kernels
from ...checkpoint import Checkpoint
from ...model import ModelConfig, config_from
from ...model.checks import check_tensors, settled_lm_head
from ...model.shard import SomeRank
from ...model.sources import TensorSource, open_source
from ...spec.model import ModelSpec
from ...spec.plugins import named_class
from ..loaded import Loaded
from ..parts import parts_of
from .device import DTYPES, check_fits, settle_threads
from .layers import HeldWeight, Linear
from .lora import load_adapter
from .model import CausalLM
from .parallel import ALONE, Alone
from .tensors import array_of
from .worker import TorchWorker


def load_worker(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ModelSpec,
    *,
    dtype: str,
    device: str,
    ranks: SomeRank | None = None,
) -> Loaded:
    """Load the model of a checkpoint. The errors are as documented for `LLM`.

    Args:
        ranks: This rank's view of a split model; None: this process has the whole model.
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
    worker = TorchWorker(model, adapters, parts=parts)
    return Loaded(worker, model.config, model, "torch", worker.passes)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    pack: bool = True,
    seed: int = 0,
    ranks: Alone = ALONE,
    config: ModelConfig | None = None,
) -> CausalLM:
    """Load the model of a checkpoint, in evaluation mode.

    Args:
        dtype: Dtype of all weights; the classification head stays float32.
        pack: Pack linears for the CPU if that is faster; a packed model has no gradients. The LM head is packed as a
            copy when full logits are first read, if there is memory for it.
        seed: Seed of random weights.
        ranks: The ranks of the model. Only this rank's share is read.
        config: The checkpoint's config, if it is known already.

    Raises:
        UnsupportedModelError: The architecture or a setting is not supported.
        OutOfMemoryError: The weights do not fit; raised before anything is read.
        CheckpointError: Tensors are missing, unexpected or have a wrong shape. It names all of them.
    """
    device = torch.device(device)
    config = config or config_from(checkpoint.config)
    if config.loading:
        options: Any = {"dtype": dtype, "pack": pack, "seed": seed, "ranks": ranks}
        return named_class(f"{config.loading}:load_model")(checkpoint, config, device=device, **options)
    # Check the config alone first, before creating a module for every layer of a model that is far too large.
    size = replace(config, lm_head=False).num_parameters * dtype.itemsize
    size //= 1 if device.type == "cpu" else ranks.size
    check_fits(size, device, checkpoint.name, "use a smaller model, or more memory")
    # Parameters without storage, to check shapes and count memory before allocating any.
    model = _shapes(config, dtype)
    every = list(model.held)
    offsets = {name: weight.offset for weight in every for name, _ in weight.parts}
    source = open_source(checkpoint, config, wanted_shapes(every), seed, offsets)
    settled = settled_lm_head(config, source)
    if settled != config:
        model = _shapes(settled, dtype)
    weights = list(model.held)
    check_tensors(checkpoint, wanted_shapes(weights), source)
    if ranks.size > 1:
        if device.type == "cpu" and ranks.rank == 0:  # the ranks share one memory
            check_memory(checkpoint, weights, device, dtype)
        model = _shapes(settled, dtype, ranks)
        weights = list(model.held)
    check_memory(checkpoint, weights, device, dtype)
    fill_all(weights, source, device, pack=pack)
    model.may_pack = pack
    return model.eval()


def fill_all(weights: Iterable[HeldWeight], source: TensorSource, device: torch.device, *, pack: bool) -> None:
    """Fill all parameters. With `pack`, each linear is packed at once, so that only one is in memory twice."""
    pool = kernels.PanelPool()
    with torch.no_grad():
        for weight in weights:
            fill(weight, source, device)
            if pack and isinstance(weight.owner, Linear) and weight.attribute == "weight":
                weight.owner.pack(pool)


def _shapes(config: ModelConfig, dtype: torch.dtype, ranks: Alone = ALONE) -> CausalLM:
    """Return a model whose parameters have shapes but no storage."""
    return named_class(config.model)(config, dtype=dtype, device=torch.device("meta"), ranks=ranks)


def wanted_shapes(weights: Iterable[HeldWeight]) -> dict[str, tuple[int, ...]]:
    return {name: shape for weight in weights for name, shape in weight.shapes.items()}


def check_memory(checkpoint: Checkpoint, weights: list[HeldWeight], device: torch.device, dtype: torch.dtype) -> None:
    size = sum(weight.parameter.nbytes for weight in weights)
    # While a parameter is packed, it is in memory twice.
    largest = max(weight.parameter.nbytes for weight in weights)
    remedy = "use a smaller model, or more memory"
    if dtype == torch.float32:
        remedy = f"use bfloat16 ({size / 2e9:.1f} GB), or a smaller model"
    extra = largest if device.type == "cpu" else 0
    check_fits(size + extra, device, f"{checkpoint.name} in {str(dtype).removeprefix('torch.')}", remedy)


def fill(weight: HeldWeight, source: TensorSource, device: torch.device) -> None:
    old = weight.parameter
    values = torch.empty(old.shape, dtype=old.dtype, device=device)
    parts = values.split([rows for _, rows in weight.parts])
    for (name, _), part, place in zip(weight.parts, parts, weight.places or [()] * len(parts), strict=True):
        read = part if device.type == "cpu" else torch.empty(part.shape, dtype=part.dtype)
        source.read_into(name, array_of(read), place)
        if read is not part:
            part.copy_(read)
    if weight.offset:
        values += weight.offset
    setattr(weight.owner, weight.attribute, nn.Parameter(values))
