"""Packed products give what PyTorch gives; the memory of logits is used again only when it is free; other products."""

from __future__ import annotations

import pytest
import torch
from tiny import DenseAttend, tiny_checkpoint

from prefold import kernels
from prefold.checkpoint import resolve
from prefold.worker.torch.layers import Linear
from prefold.worker.torch.load import load_model
from prefold.worker.torch.products import Panels, Product, pack_head


def load(folder, dtype=torch.float32, **options):
    return load_model(resolve(str(folder)), device="cpu", dtype=dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_logits_as_without(tmp_path, dtype, tied):
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    model, plain = load(folder, dtype=dtype), load(folder, dtype=dtype, pack=False)
    hidden = torch.randn(70, 36).to(dtype)
    with torch.inference_mode():
        for rows in (0, 1, 5, 70):
            found = model.logits(hidden[:rows])
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, plain.logits(hidden[:rows]), rtol=1e-5, atol=1e-5)
    assert plain.head_product is None
    if kernels.load():
        assert model.head_product is not None


def test_slow_kernels_still_serve_bfloat16(multiply_by):
    if not kernels.load():
        pytest.skip("no kernels")
    weight, x = torch.randn(100, 36).bfloat16(), torch.randn(5, 36).bfloat16()
    multiply_by(lambda weight: None)
    torch.testing.assert_close(pack_head(weight).wide(x), x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)
    odd = torch.randn(100, 35).bfloat16()
    assert pack_head(odd) is None


def test_float32_without_our_kernels(multiply_by):
    multiply_by(lambda weight: None)
    weight, x = torch.randn(100, 36), torch.randn(5, 36)
    if packed := pack_head(weight):
        torch.testing.assert_close(packed.wide(x), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_no_copy_where_there_is_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr("prefold.worker.torch.products.available_memory", lambda device: 1000)
    model = load(tiny_checkpoint(tmp_path, "llama"), dtype=torch.bfloat16)
    with torch.inference_mode():
        assert model.logits(torch.randn(3, 36).bfloat16()).shape == (3, 307)
    assert model.head_product is None


def test_gradients_go_round_thehead_product(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "llama"), dtype=torch.float32)
    hidden = torch.randn(3, 36, requires_grad=True)
    with torch.no_grad():
        expected = model.logits(hidden)
    logits = model.logits(hidden)
    logits.sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-5, atol=1e-5)


def test_logits_that_are_held_are_not_written_over():
    if not kernels.load():
        pytest.skip("no kernels")
    head = Panels(torch.randn(100, 36).bfloat16(), kernels.load())
    xs = [torch.randn(rows, 36).bfloat16() for rows in (4, 4, 3, 2)]
    first = head.wide(xs[0])
    kept, view, array = first.clone(), first[1], first.numpy()[2]
    second = head.wide(xs[1])
    assert second.data_ptr() != first.data_ptr()
    del first
    third = head.wide(xs[2])  # a row and an array of the first are still there
    assert torch.equal(view, kept[1])
    assert torch.equal(torch.from_numpy(array), kept[2])
    place = third.data_ptr()
    del third
    assert head.wide(xs[3]).data_ptr() == place


class Doubled(Product):
    """A matrix from outside: twice the one it is made of."""

    def __init__(self, weight):
        self.weight = 2 * weight.detach()

    def __call__(self, x, bias=None):
        return torch.nn.functional.linear(x, self.weight, bias)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_from_outside(tmp_path, family):
    """Every linear of a model and its head can be given another product, which is all that multiplies from then on."""
    folder = tiny_checkpoint(tmp_path, family, tokenizer=False)
    doubled, expected, tokens = load(folder, pack=False), load(folder, pack=False), torch.arange(7)
    with torch.inference_mode():
        for linear in [m for m in expected.modules() if isinstance(m, Linear)]:
            linear.weight.mul_(2)
        for linear in [m for m in doubled.modules() if isinstance(m, Linear)]:
            linear.use(Doubled(linear.weight))
        doubled.head_product = Doubled(doubled.embedding if doubled.lm_head is None else doubled.lm_head)
        found, wanted = (model(tokens, torch.arange(7), DenseAttend(model.config)) for model in (doubled, expected))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(doubled.logits(found), 2 * expected.logits(wanted))
