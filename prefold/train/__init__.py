"""Trains on shared prefixes: the completions of one prompt compute it once, forward and backward.

`load_model` loads a model. `TrainBatch` lays sequences out as rows, `logprobs` reads their targets with gradients, and
the usual losses take those. `prefold.train.hf` does this with a model of transformers.
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
