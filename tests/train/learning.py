"""What the tests of training share: models, batches of sequences, gradients and their distance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefold.checkpoint import resolve
from prefold.worker.torch.load import load_model
from prefold.worker.torch.model import CausalLM

VOCAB = 307


def trainable(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(resolve(str(folder)), dtype=torch.float32, device="cpu", pack=False).to(dtype)


def sequences(seed: int, count: int = 10, longest: int = 9) -> list[list[int]]:
    """Random sequences of two and more tokens, many of which begin alike; duplicates among them.

    Ids from 3 on: transformers learns no embedding of padding.
    """
    rng = np.random.default_rng(seed)
    found: list[list[int]] = []
    for _ in range(count):
        stem = found[rng.integers(len(found))] if found and rng.random() < 0.8 else []
        keep = int(rng.integers(len(stem) + 1))
        found.append([*stem[:keep], *rng.integers(3, VOCAB, int(rng.integers(2, longest))).tolist()])
    return [*found, found[0]]


def group(seed: int, completions: int = 4, prompt: int = 20, length: int = 6) -> tuple[list[list[int]], list[int]]:
    """Completions of one prompt, and the prompt's length for each."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, VOCAB, prompt).tolist()
    return [start + rng.integers(3, VOCAB, length).tolist() for _ in range(completions)], [prompt] * completions


def weights_for(values: Tensor, seed: int = 0) -> Tensor:
    """Random numbers to sum values with, so that each has a gradient of its own."""
    return torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(values)


def gradients(model: torch.nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Of every parameter, after one backward pass."""
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest over all tensors of |ours - expected| / |expected|."""
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - expected[name]).norm() / expected[name].norm()) for name in expected)
