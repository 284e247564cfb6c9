"""Products of experts' rows in Triton, in its interpreter where there is no GPU: nobody asks how many rows each has."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from tritons import on_triton  # noqa: F401 (a fixture)

from prefold.worker.torch.experts import grouped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("counts", "inputs", "outputs"),
    [([3, 0, 17, 1], 36, 50), ([0, 0, 33], 64, 130), ([16, 32], 20, 7), ([0], 32, 16), ([1] * 9, 33, 64)],
)
def test_each_row_meets_its_experts_matrix(on_triton, monkeypatch, counts, inputs, outputs, dtype):  # noqa: F811
    def refuse(*arguments):
        raise AssertionError("the host waited for the device")

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), inputs, generator=generator).to(on_triton, dtype)
    matrices = torch.randn(len(counts), outputs, inputs, generator=generator).to(on_triton, dtype)
    ends = torch.tensor(counts, device=on_triton).cumsum(0)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    with torch.inference_mode():
        found = grouped(x, matrices, ends)
    monkeypatch.undo()
    parts = zip(x.float().split(counts), matrices.float(), strict=True)
    expected = torch.cat([F.linear(rows, matrix) for rows, matrix in parts])
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=tolerance)
