"""Packed linears give what plain ones give; gate and up, whatever the order they lie in."""

from __future__ import annotations

import copy

import pytest
import torch

from prefold.model.layers import GATES, GatedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
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
            expected = GATES[activation](plain.float())
            torch.testing.assert_close(packed.gated(x).float(), expected, **tolerance)
            torch.testing.assert_close(layer.gated(x).float(), expected, **tolerance)
