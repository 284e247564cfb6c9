"""Train on shared prefixes: each shared prompt is computed once, forward and backward.

`load_model` loads a model. `TrainBatch` lays sequences out as rows, `logprobs` returns the log-probabilities of their
targets with gradients, and `sft_loss`, `dpo_loss` and `group_loss` compute losses from them. `prefold.train.hf` does
the same for a model of transformers.
"""

from __future__ import annotations

from ..errors import MissingExtraError

try:
    import torch as _torch
except ImportError:
    raise MissingExtraError("torch", "train", "training") from None

from .batch import Examples, TrainBatch, accumulate, micro_batches
from .files import load_model, save_model
from .losses import dpo_loss, dpo_margins, group_loss, logprobs, sft_loss

__all__ = [
    "Examples",
    "TrainBatch",
    "accumulate",
    "dpo_loss",
    "dpo_margins",
    "group_loss",
    "load_model",
    "logprobs",
    "micro_batches",
    "save_model",
    "sft_loss",
]
