"""Which executor runs a model. No torch."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..errors import InputError
from ..model import ModelConfig
from ..model.machine import has_torch, missing_torch
from ..spec.model import ModelSpec
from ..text import Tokenizer
from .loaded import Loaded


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
    if options.arithmetic == "int8":
        from .native.int8 import check_options

        check_options(options, checkpoint, config, dtype, device)
    executor = choose_executor(options, config, dtype, device)
    if executor == "native":
        from .native.load import load_worker as load_native

        return load_native(checkpoint, config, options, tokenizer, dtype=dtype)
    if options.arithmetic == "int8":
        message = "there is no int8 arithmetic in PyTorch's executor"
        raise InputError(message, field="arithmetic", remedy="use the executor auto, or leave --arithmetic out")
    from .torch.load import load_worker as load_torch

    return load_torch(checkpoint, config, options, dtype=dtype, device=device)
