"""Log-probabilities of targets in blocks of the vocabulary, against log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefold.train import losses
from prefold.train.losses import target_logprobs


def example(dtype: torch.dtype, rows: int = 7, vocab: int = 101, targets: int = 23):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 12, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, 12, generator=generator, dtype=dtype).requires_grad_()
    rng = np.random.default_rng(0)
    return hidden, weight, rng.integers(0, rows, targets), rng.integers(0, vocab, targets)


@pytest.fixture
def block_by(monkeypatch):
    """Lets a block have so many numbers, if these are of at least so many columns."""

    def put(numbers, columns):
        monkeypatch.setattr(losses, "BLOCK", numbers)
        monkeypatch.setattr(losses, "MIN_COLUMNS", columns)

    return put


@pytest.fixture(params=[1, 10, 101, 1000])
def columns(request, block_by):
    """Columns of a block."""
    block_by(0, request.param)


def by_the_book(hidden, weight, reads, ids):
    return (hidden.double() @ weight.double().T).log_softmax(-1)[torch.from_numpy(reads), torch.from_numpy(ids)]


def test_values_and_gradients(columns):
    hidden, weight, reads, ids = example(torch.float64)
    ours = target_logprobs(hidden, weight, reads, ids)
    expected = by_the_book(hidden, weight, reads, ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    numbers = torch.randn(len(ids), dtype=torch.float64)
    for tensor in (hidden, weight):
        ours_grad, expected_grad = (
            torch.autograd.grad((values * numbers).sum(), tensor, retain_graph=True)[0] for values in (ours, expected)
        )
        torch.testing.assert_close(ours_grad, expected_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, reads, ids = example(torch.float64)
    tensors = {"hidden": hidden, "weight": weight}
    tensors[frozen].requires_grad_(False)
    target_logprobs(hidden, weight, reads, ids).sum().backward()
    assert tensors.pop(frozen).grad is None
    (trained,) = tensors.values()
    ours = trained.grad.clone()
    trained.grad = None
    by_the_book(hidden, weight, reads, ids).sum().backward()
    torch.testing.assert_close(ours, trained.grad, rtol=0, atol=1e-12)


def test_bfloat16_is_summed_in_float32():
    hidden, weight, reads, ids = example(torch.bfloat16)
    ours = target_logprobs(hidden, weight, reads, ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), by_the_book(hidden, weight, reads, ids), rtol=0, atol=1e-5)
    ours.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_leaves_it_alone():
    hidden, weight, reads, ids = example(torch.float32)
    expected = target_logprobs(hidden, weight, reads, ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(target_logprobs(hidden, weight, reads, ids), expected)


def test_large_logits_do_not_overflow():
    hidden, weight, reads, ids = example(torch.float32)
    ours = target_logprobs(hidden * 300, weight, reads, ids)
    expected = by_the_book(hidden * 300, weight, reads, ids)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-2)


def test_no_more_than_a_block_of_logits_is_ever_there(block_by):
    """Of 64 rows and 5000 ids, blocks of 512 columns: no tensor of more numbers than a block, or the weight, has."""
    block_by(1, losses.MIN_COLUMNS)
    hidden, weight, reads, ids = example(torch.float32, rows=64, vocab=5000)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Sizes():
        target_logprobs(hidden, weight, reads, ids).sum().backward()
    assert largest == weight.numel() < 64 * 5000
    assert weight.numel() > 64 * 512
