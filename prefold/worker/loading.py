"""Which executor runs a model. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .. import kernels
from ..checkpoint import Checkpoint
from ..errors import InputError
from ..kernels import CollectiveError
from ..model import ModelConfig
from ..model.machine import has_torch, missing_torch
from ..model.shard import SomeRank
from ..spec.model import ModelSpec
from ..text import Tokenizer
from .loaded import Loaded
from .tensor_parallel import Meeting, MemoryMeeting, Start, TensorParallelWorker


def choose_executor(options: ModelSpec, config: ModelConfig, dtype: str, device: str) -> str:
    """Return which executor runs a model: "native" on a CPU, unless the model or an option needs PyTorch.

    Raise InputError where it needs PyTorch, which is not installed, and where the option asks for an executor that
    lacks something.
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
    """Return what the native executor lacks for a model and its options, in words; None: nothing."""
    if device != "cpu":
        return device
    if options.arithmetic != "float":
        return "int8 arithmetic"
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
    """Return the model of a checkpoint, ready to run by the executor that `choose_executor` says. The errors are those
    of `LLM`."""
    executor = choose_executor(options, config, dtype, device)
    start = Start(checkpoint, config, options, executor, dtype, device)
    if options.tensor_parallel == 1:
        return load_part(start, None, tokenizer)
    return _load_split(start)


def load_part(start: Start, ranks: SomeRank | None, tokenizer: Tokenizer | None = None) -> Loaded:
    """Return what this process holds of a model. ranks: this process among those that the model is split over; None:
    it holds all"""
    checkpoint, config, options, dtype = start.checkpoint, start.config, start.options, start.dtype
    if start.executor == "native":
        from .native.load import load_worker as load_native

        return load_native(checkpoint, config, options, dtype=dtype, ranks=ranks)
    from .torch.load import load_worker as load_torch

    return load_torch(checkpoint, config, options, tokenizer, dtype=dtype, device=start.device, ranks=ranks)


def _load_split(start: Start) -> Loaded:
    """Return a model that is split over this process and others, which are started."""
    from .native.load import settle_threads

    meet: Callable[[int], Meeting] = MemoryMeeting
    if start.executor == "torch":
        from .torch.ranks import meeting_of

        meet = meeting_of(start)
    options = start.options
    settle_threads(options.threads)
    sharing = options.tensor_parallel if start.device == "cpu" else 1
    threads = options.threads or max(1, kernels.threads() // sharing)
    adapters = None if options.adapters is None else dict(options.adapters)
    # The cache is the engine's, which rank 0 has.
    options = replace(options, threads=threads, adapters=adapters, cache=None)
    team = TensorParallelWorker(replace(start, options=options), meet)
    try:
        loaded = load_part(replace(start, options=options), team.ranks)
        team.join(loaded.worker)
    except CollectiveError as error:
        team.fail(error)  # with what kept a rank from it
    except BaseException:
        team.close()
        raise
    ranks = options.tensor_parallel
    passes = "; ".join(filter(None, (loaded.passes, f"the model is split over {ranks} ranks")))
    return replace(loaded, worker=team, passes=passes, ranks=ranks)
