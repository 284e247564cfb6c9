"""Launches of the Triton kernels, recorded and not run, for `aot`. In a process of its own."""

from __future__ import annotations

import aot
import numpy as np
import torch
from nests import chains

from prefold import kernels
from prefold.worker.attention import KeyRuns, plan_slots
from prefold.worker.attention.slot_plan import MOST_ROWS
from prefold.worker.torch import device, draw_triton
from prefold.worker.torch.attention import slot_triton
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.attention.store import KVStore
from prefold.worker.torch.ops import choose_ops

device.TRITON_DEVICES = ("cpu",)
kernels.load = lambda: None


def rows(heads: int, kv_heads: int, dim: int, dtype: str, window: int | None) -> list[aot.Launch]:
    """With a carried path, and without."""
    with aot.Recorder() as recorder:
        for path in (0, 100):
            q, k, v = tensors(heads, kv_heads, dim, dtype)
            nest = chains([160])
            attention = RowAttention(Heads(heads, kv_heads, dim, q.dtype), q.device)
            plan = attention.plan(nest.end, np.arange(path, 160), nest.positions, window, path=path)
            carried = {"path_k": k[:path], "path_v": v[:path]} if path else {}
            attention.attend(q[path:], k[path:], v[path:], plan, scale=0.1, **carried)
    return list(recorder.launches.values())


def gradients(heads: int, kv_heads: int, dim: int, dtype: str, window: int | None) -> list[aot.Launch]:
    with aot.Recorder() as recorder:
        q, k, v = (x.requires_grad_(True) for x in tensors(heads, kv_heads, dim, dtype))
        nest = chains([160])
        attention = RowAttention(Heads(heads, kv_heads, dim, q.dtype), q.device)
        plan = attention.plan(nest.end, np.arange(160), nest.positions, window)
        attention.attend(q, k, v, plan, scale=0.1).sum().backward()
    return list(recorder.launches.values())


def slots(heads: int, kv_heads: int, dim: int, dtype: str, window: int | None) -> list[aot.Launch]:
    """Tiles of every size that is picked."""
    q, k, v = tensors(heads, kv_heads, dim, dtype)
    store = KVStore([Heads(heads, kv_heads, dim, q.dtype)] * 1, 200)
    row = np.arange(160)
    with aot.Recorder() as recorder:
        store.write(0, torch.arange(160) + 1, k, v)
        for size in (16, 32, 64, 128):
            if size > MOST_ROWS[q.dtype.itemsize]:
                continue
            slot_triton.pick_rows = lambda *_, size=size: size
            runs = KeyRuns(row + 1, np.ones(160, np.int64), row, row, np.full(160, 160))
            store.attend(0, q, plan_slots(runs, 160, row, window, group=heads // kv_heads), 0.1)
    return list(recorder.launches.values())


def operations(heads: int, kv_heads: int, dim: int, dtype: str, window: int | None) -> list[aot.Launch]:
    """The position-wise ones, at a hidden size of heads x dim, and the sampler's."""
    number = getattr(torch, dtype)
    x, weight, norm = (
        torch.zeros(8, heads * dim, dtype=number),
        torch.zeros(heads * dim),
        torch.zeros(dim, dtype=number),
    )
    fused = torch.zeros(8, heads + 2 * kv_heads, dim, dtype=number)
    angles = torch.zeros(8, dim)
    with aot.Recorder() as recorder, torch.inference_mode():
        ops = choose_ops(number, x.device)
        ops.add_rms_norm(x, x, weight, 1e-6)
        ops.add_rms_norm(x, None, weight.to(number), 1e-6)
        ops.rope(fused[:, :heads], angles, norm, 1e-6)
        ops.rope(fused[:, heads:], angles)
        ops.gate(x, "silu")
        ops.gate(x, "gelu_tanh")
        draw_triton.draw(torch.zeros(4, 151_936), torch.zeros(4, draw_triton.FIELDS, dtype=torch.float64))
    return list(recorder.launches.values())


def some(heads: int, kv_heads: int, dim: int, dtype: str, window: int | None) -> list[aot.Launch]:
    """One launch of each kernel."""
    shape = (heads, kv_heads, dim, dtype, window)
    found = [*rows(*shape)[1:], *gradients(*shape)[1:], *slots(*shape), *operations(*shape)]
    return list({launch.fn.__name__: launch for launch in found}.values())


def tensors(heads: int, kv_heads: int, dim: int, dtype: str) -> list[torch.Tensor]:
    return [torch.zeros(160, number, dim, dtype=getattr(torch, dtype)) for number in (heads, kv_heads, kv_heads)]
