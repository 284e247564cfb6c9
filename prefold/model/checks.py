"""Checks of a checkpoint's tensors before they are read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from .builders import EMBEDDING, LM_HEAD
from .config import ModelConfig
from .sources import TensorSource


def settled_lm_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """Return the config with the LM head that the checkpoint really has, as transformers sees it.

    If the LM head is missing (embedding models), the config gets no LM head, and asking for logits is an error. If a
    tied head is saved with other values than the embedding, it becomes untied.
    """
    saved = source.shapes.get(LM_HEAD)
    if not config.lm_head or (saved is None) == config.tie_embeddings:
        return config
    if saved is None:
        return replace(config, lm_head=False)
    if saved == source.shapes.get(EMBEDDING):
        head, embedding = source.read(LM_HEAD), source.read(EMBEDDING)
        if np.array_equal(head.astype(np.float32, copy=False), embedding.astype(np.float32, copy=False)):
            return config
    return replace(config, tie_embeddings=False)


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], source: TensorSource) -> None:
    """Raise CheckpointError if tensors are missing, unexpected or misshapen. `expected` maps names to shapes."""
    # An LM head may be saved although it is tied to the embedding, or although the model is a classifier.
    unexpected = sorted(set(source.shapes) - set(expected) - {LM_HEAD})
    missing = sorted(set(expected) - set(source.shapes))
    misshapen = [
        f"{name} is {list(source.shapes[name])}, not {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in source.shapes and source.shapes[name] != shape
    ]
    problems = [
        f"{problem}: {_some(names)}"
        for problem, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"the tensors of {checkpoint.name} do not fit its config; {'; '.join(problems)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
