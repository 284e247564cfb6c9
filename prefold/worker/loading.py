"""Choose the executor of a model, and load the model. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import kernels
from ..checkpoint import Checkpoint
from ..errors import InputError, not_invariant
from ..kernels import CollectiveError
from ..model import ModelConfig
from ..model.machine import has_torch, missing_torch
from ..model.shard import SomeRank
from ..spec.model import ModelSpec
from ..text import Tokenizer
from .loaded import Load, Loaded

if TYPE_CHECKING:
    from .tensor_parallel import Meeting


def choose_executor(options: ModelSpec, config: ModelConfig, dtype: str, device: str) -> str:
    """Return the executor of a model: "native" on a CPU, unless the model or an option needs PyTorch.

    Raise InputError if PyTorch is needed but not installed, or if the requested executor lacks a feature.
    """
    if options.executor == "torch":
        if not has_torch():
            raise missing_torch("executor is torch", "executor")
        return "torch"
    reason = _needs_torch(options, config, dtype, device)
    if reason is None:
        return "native"
    if options.executor == "native":
        raise InputError(f"the native executor lacks {reason}", field="executor", remedy="use auto or torch")
    if not has_torch():
        raise missing_torch(f"the native executor lacks {reason}", "model")
    return "torch"


def _needs_torch(options: ModelSpec, config: ModelConfig, dtype: str, device: str) -> str | None:
    """Name the first feature that the native executor lacks for a model and its options; None if it lacks none."""
    if device != "cpu":
        return device
    from .native.load import missing
    from .parts import without_native

    return missing(config, dtype, ranks=options.tensor_parallel) or without_native(config)


def load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: ModelSpec,
    tokenizer: Tokenizer | None,
    *,
    dtype: str,
    device: str,
) -> Loaded:
    """Load a model with the executor that `choose_executor` returns. The errors are as documented for `LLM`."""
    if options.arithmetic == "int8":
        from .native.int8 import check_options

        check_options(options, checkpoint, config, dtype, device)
    executor = choose_executor(options, config, dtype, device)
    wanted = Load(checkpoint, config, options, executor, dtype, device)
    return load_part(wanted, None, tokenizer) if options.tensor_parallel == 1 else _load_split(wanted)


def load_part(wanted: Load, ranks: SomeRank | None, tokenizer: Tokenizer | None = None) -> Loaded:
    """Load this process's part of a model.

    Args:
        ranks: This rank's view of a split model; None if the model is not split.
    """
    checkpoint, config, options, dtype = wanted.checkpoint, wanted.config, wanted.options, wanted.dtype
    if wanted.executor == "native":
        from .native.load import load_worker as load_native

        return load_native(checkpoint, config, options, tokenizer, dtype=dtype, ranks=ranks)
    _check_torch(config, options)
    from .torch.load import load_worker as load_torch

    return load_torch(checkpoint, config, options, dtype=dtype, device=wanted.device, ranks=ranks)


def _check_torch(config: ModelConfig, options: ModelSpec) -> None:
    """Raise InputError if an option asks for a feature that PyTorch's executor lacks."""
    if options.arithmetic == "int8":
        message = "PyTorch's executor has no int8 arithmetic"
        raise InputError(message, field="arithmetic", remedy="use the executor auto, or leave --arithmetic out")
    if options.layerwise == "on":
        message = "layerwise is on, but PyTorch's executor runs this model and holds all weights in memory"
        raise InputError(message, field="layerwise", remedy="leave --layerwise out, or use the executor auto on a CPU")
    if options.weights == "file":
        message = "PyTorch's executor runs this model and cannot use weights as the checkpoint stores them"
        raise InputError(message, field="weights", remedy="leave --weights out, or use the executor auto on a CPU")
    if config.invariant:
        raise not_invariant("the modules of transformers" if config.loading else "the products of PyTorch")


def _load_split(wanted: Load) -> Loaded:
    """Load a model that is split over this process and other processes, and start them."""
    from .tensor_parallel import TensorParallelWorker

    wanted = replace(wanted, options=_of_each_rank(wanted))
    team = TensorParallelWorker(wanted, _meeting_of(wanted))
    try:
        loaded = load_part(wanted, team.ranks)
        team.join(loaded.worker)
    except CollectiveError as error:
        team.fail(error)  # always raises: the error of the rank that failed, else `error`
    except BaseException:
        team.close()
        raise
    ranks = wanted.options.tensor_parallel
    passes = "; ".join(filter(None, (loaded.passes, f"the model is split over {ranks} ranks")))
    return replace(loaded, worker=team, passes=passes, ranks=ranks)


def _of_each_rank(wanted: Load) -> ModelSpec:
    """Return each rank's options: its share of the threads, and cache=None, because only rank 0's engine caches."""
    from .native.load import settle_threads

    options = wanted.options
    settle_threads(options.threads)
    sharing = options.tensor_parallel if wanted.device == "cpu" else 1
    threads = options.threads or max(1, kernels.threads() // sharing)
    # The options are pickled for the other ranks, and not every Mapping can be pickled.
    adapters = None if options.adapters is None else dict(options.adapters)
    return replace(options, threads=threads, adapters=adapters, cache=None)


def _meeting_of(wanted: Load) -> Callable[[int], Meeting]:
    """Return the function that creates a `Meeting` from the number of ranks, for the model's executor."""
    if wanted.executor == "native":
        from .tensor_parallel import MemoryMeeting

        return MemoryMeeting
    from .torch.ranks import meeting_of

    return meeting_of(wanted)
