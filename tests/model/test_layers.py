"""Packed linears give what plain ones give; gate and up, whatever the order they lie in. Norms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

from prefold.worker.torch.layers import ActivatedLinear, GatedLinear, Norm
from prefold.worker.torch.ops import ACTIVATIONS, PYTORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [16, 48, 50, 80])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear(dtype, activation, width, bias):
    torch.manual_seed(0)
    layer = GatedLinear(36, width, activation=activation, bias=bias, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        layer.weight.normal_(std=0.3)
        if bias:
            layer.bias.normal_()
    packed = copy.deepcopy(layer)
    packed.pack()
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    with torch.inference_mode():
        for rows in (0, 1, 5, 70):
            x = torch.randn(rows, 36).to(dtype)
            plain = layer(x)
            torch.testing.assert_close(packed(x), plain, **tolerance)
            expected = PYTORCH.gate(plain.float(), activation)
            torch.testing.assert_close(packed.activated(x, PYTORCH).float(), expected, **tolerance)
            torch.testing.assert_close(layer.activated(x, PYTORCH).float(), expected, **tolerance)


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("gelu_tanh", NewGELUActivation())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_without_a_gate(dtype, activation, function):
    torch.manual_seed(0)
    layer = ActivatedLinear(36, 50, activation=activation, bias=True, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        layer.weight.normal_(std=0.3)
        layer.bias.normal_()
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    x = torch.randn(7, 36).to(dtype)
    expected = function(x.float() @ layer.weight.float().T + layer.bias.float())
    torch.testing.assert_close(layer.activated(x, PYTORCH).float(), expected, **tolerance)
    layer.pack()
    with torch.inference_mode():
        torch.testing.assert_close(layer.activated(x, PYTORCH).float(), expected, **tolerance)
        torch.testing.assert_close(layer.activate(layer(x), PYTORCH), layer.activated(x, PYTORCH))


@pytest.mark.parametrize("delta", [True, False])
def test_layer_norm_is_pytorchs(delta):
    torch.manual_seed(0)
    norm = Norm(36, kind="layer", bias=True, eps=1e-3, dtype=torch.float32, device=torch.device("cpu"))
    theirs = torch.nn.LayerNorm(36, eps=1e-3)
    with torch.no_grad():
        for ours, other in zip(norm.parameters(), theirs.parameters(), strict=True):
            other.copy_(ours.normal_())
    x, d = torch.randn(2, 5, 36)
    stream, normed = norm(x.clone(), d if delta else None, PYTORCH)
    torch.testing.assert_close(stream, x + d if delta else x)
    torch.testing.assert_close(normed, theirs(stream))
    assert Norm(36, bias=False, eps=1e-3, dtype=torch.float32, device=torch.device("cpu")).bias is None
