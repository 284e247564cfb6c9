"""Time attention kernels, other implementations and tile sizes, and other kernels: `kernels` of gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from gpu_common import Bench
from gpu_decode import decode_step, fill
from harness import visible_pairs
from torch import Tensor
from torch.nn import functional as F

from prefold.spec.requests import Sampling
from prefold.spec.task import filters_of
from prefold.worker.attention import KeyRuns, plan_rows
from prefold.worker.attention.row_plan import row_tiles
from prefold.worker.torch.arrays import TorchArrays
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.attention.store import KVStore
from prefold.worker.torch.device import runs_triton
from prefold.worker.torch.ops import PYTORCH, Ops, choose_ops

# heads, kv_heads, head_dim
HEADS = {"qwen3-0.6b": (16, 8, 128), "qwen3-8b": (32, 8, 128), "smollm2": (9, 3, 64), "gemma3": (4, 1, 256)}
# (keys of a block, stages, smallest number of tile rows that eight warps share)
BLOCKS = ((64, 3, 128), (64, 5, 128), (64, 7, 128), (32, 5, 128), (128, 3, 128), (64, 5, 16))
SIZES = ((128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 4))


def run(bench: Bench) -> None:
    shapes = {"tiny": (4, 2, 16)} if bench.smoke else HEADS
    for name, shape in shapes.items():
        bench.attempt(f"kernels rows {name}", lambda name=name, shape=shape: rows(bench, name, shape))
    for name, shape in shapes.items():
        bench.attempt(f"kernels slots {name}", lambda name=name, shape=shape: slots(bench, name, shape))
    bench.attempt("kernels ops", lambda: position_wise(bench))
    bench.attempt("kernels draw", lambda: draws(bench))


def rows(bench: Bench, name: str, shape: tuple[int, int, int]) -> None:
    """Time row attention of 32 prompts with 2,048 shared rows and 256 own rows each.

    FLOP/s count each visible pair once.
    """
    heads, kv_heads, dim = shape
    batch, prefix, suffix = (3, 24, 8) if bench.smoke else (32, 2048, 256)
    total = prefix + batch * suffix
    end = np.concatenate((np.full(prefix, total), prefix + suffix * (np.arange(batch * suffix) // suffix + 1)))
    q, k, v = (torch.randn(total, h, dim, device=bench.device).to(bench.dtype) for h in (heads, kv_heads, kv_heads))
    attention = RowAttention(Heads(heads, kv_heads, dim, bench.dtype), q.device)
    useful = 4.0 * visible_pairs(end) * heads * dim
    scale = dim**-0.5
    found = []

    def add(what: str, run) -> Tensor | None:
        seconds = bench.attempt(f"kernels {name} {what}", lambda: bench.kernel_seconds(run))
        if seconds is not None:
            found.append([what, f"{1e3 * seconds:.3f}", f"{useful / seconds / 1e12:.0f}"])
            print("  ", *found[-1], flush=True)

    def ours():
        plan = attention.plan(end, np.arange(total))

        def call() -> Tensor:
            with torch.inference_mode():
                return attention.attend(q, k, v, plan, scale=scale)

        return call

    add("prefold", ours())
    reference = ours()()
    if runs_triton(bench.device):
        tile_sizes(bench, add, ours)
        add("prefold, forward and backward", lambda: backward(attention, q, k, v, end, scale))
    others = {
        "flash over nodes, joined": lambda: over_nodes(q, k, v, batch, prefix, scale),
        "SDPA, unfolded": lambda: unfolded(q, k, v, batch, prefix, scale),
    }
    if bench.on_gpu:
        others["FlexAttention, our blocks"] = bench.attempt("flex", lambda: flex(q, k, v, end, scale))
    for what, call in others.items():
        if call is None:
            continue
        if what != "SDPA, unfolded":
            out = bench.attempt(f"kernels {name} {what}", call)
            if (
                out is not None
                and (error := (out.float() - reference.float()).norm() / reference.float().norm()) > 2e-2
            ):
                bench.failures.append(f"{what} differs from prefold by {error:.1e}")
        add(what, call)
    bench.show("kernels_rows", ["attention", "ms", "useful TFLOP/s"], found, shape=name)


def tile_sizes(bench: Bench, add, ours) -> None:
    from prefold.worker.torch.attention import row_triton

    before = dict(row_triton.TILE_SIZES)
    for size in SIZES[:1] if bench.smoke else SIZES:
        row_triton.TILE_SIZES.update({key: row_triton.TileSize(*size) for key in before})
        call = ours()
        add("tiles of {} x {}, {} warps, {} stages".format(*size), call)
    row_triton.TILE_SIZES.update(before)


def backward(attention: RowAttention, q: Tensor, k: Tensor, v: Tensor, end: np.ndarray, scale: float) -> None:
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    plan = PLANS.setdefault(len(end), attention.plan(end, np.arange(len(end))))
    attention.attend(*leaves, plan, scale=scale).sum().backward()


PLANS: dict[int, object] = {}


def over_nodes(q: Tensor, k: Tensor, v: Tensor, batch: int, prefix: int, scale: float) -> Tensor:
    """Run torch's flash attention node by node: the best without an own kernel, if all prompts share one prefix.

    The nodes are the prefix, all suffixes over the prefix, and each suffix over itself. Log-sum-exps join the last two.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_flash_attention
        if q.device.type == "cpu":
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = op(q, k, v, 0.0, causal, scale=scale)[:2]
        return out.transpose(1, 2), sums.transpose(1, 2)[..., None].float()

    with torch.inference_mode():
        first = [x[None, :prefix] for x in (q, k, v)]
        head, _ = attend(*first, causal=True)
        above, a = attend(q[None, prefix:], *first[1:], causal=False)
        own = [x[prefix:].unflatten(0, (batch, -1)) for x in (q, k, v)]
        below, b = attend(*own, causal=True)
        above, a = (x[0].unflatten(0, (batch, -1)) for x in (above, a))
        share = torch.sigmoid(a - b).to(q.dtype)
        return torch.cat((head[0], (share * above + (1 - share) * below).flatten(0, 1)))


def unfolded(q: Tensor, k: Tensor, v: Tensor, batch: int, prefix: int, scale: float) -> Tensor:
    """Run attention over whole prompts, as RadixMLP does, with unfolding."""
    suffix = (len(q) - prefix) // batch
    rows = torch.cat([torch.arange(prefix), torch.arange(suffix)]).repeat(batch, 1)
    rows[:, prefix:] += prefix + suffix * torch.arange(batch)[:, None]
    rows = ROWS.setdefault((batch, prefix, suffix, q.device), rows.to(q.device))
    with torch.inference_mode():
        q, k, v = (x[rows].transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


ROWS: dict[tuple, Tensor] = {}


def flex(q: Tensor, k: Tensor, v: Tensor, end: np.ndarray, scale: float, block: int = 128):
    """Return FlexAttention with a block mask that is built from prefold's lists of blocks, without the full mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    tiles = row_tiles(plan_rows(end, np.arange(len(end)), compiled=False), 0, block, block)
    num_tiles, num_blocks = tiles.num_tiles, -(-len(end) // block)
    ends = torch.from_numpy(end).to(q.device)

    def tables(part: int) -> tuple[Tensor, Tensor]:
        counts = np.diff(tiles.bounds[part])
        indices = np.zeros((num_tiles, num_blocks), np.int32)
        for tile in range(num_tiles):
            indices[tile, : counts[tile]] = (
                tiles.blocks[tiles.bounds[part, tile] : tiles.bounds[part, tile + 1]] // block
            )
        return tuple(torch.from_numpy(x.astype(np.int32)).to(q.device)[None, None] for x in (counts, indices))

    def visible(b, h, query, key):
        return (key <= query) & (query < ends[key])

    whole, partly = tables(2), tables(3)
    mask = BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=block, mask_mod=visible, seq_lengths=(len(end), len(end))
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))

    def call() -> Tensor:
        with torch.inference_mode():
            return compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    return call


def slots(bench: Bench, name: str, shape: tuple[int, int, int]) -> None:
    """Time one plane of a decode step by tile size, block size and grouping: bytes to read / time."""
    heads, kv_heads, dim = shape
    group = heads // kv_heads
    shared, own = (24, 8) if bench.smoke else (2048, 256)
    found = []
    for batch in (4,) if bench.smoke else (64, 256):
        store = KVStore([Heads(heads, kv_heads, dim, bench.dtype)] * 1, 1 + shared + batch * own, bench.device)
        fill(store)
        q = torch.randn(batch, heads, dim, device=bench.device).to(bench.dtype)
        moved = 2 * kv_heads * dim * bench.dtype.itemsize * (shared + batch * own)
        variants: list[tuple[str, bool, dict]] = [("grouped", True, {}), ("not grouped", False, {})]
        if runs_triton(bench.device):
            variants += [(f"tiles of {rows}", True, {"rows": rows}) for rows in (16, 32, 64, 128) if rows >= group]
            variants += [
                ("blocks of {}, {} stages, eight warps from {}".format(*b), True, {"block": b}) for b in BLOCKS
            ]
        for what, grouped, changed in variants:
            step = decode_step(batch, shared, own, grouped=grouped)
            runs = KeyRuns(step.run_start, step.run_count, step.run_position, step.run_first, step.run_last)
            plan = store.plan(runs, batch)

            def call(store=store, q=q, plan=plan) -> Tensor:
                with torch.inference_mode():
                    return store.attend(0, q, plan, dim**-0.5)

            def timed(call=call, changed=changed) -> float:
                with changed_slots(**changed):
                    return bench.kernel_seconds(call)

            seconds = bench.attempt(f"kernels slots {name} {batch} {what}", timed)
            if seconds is not None:
                found.append([batch, what, f"{1e6 * seconds:.0f}", f"{moved / seconds / 1e12:.2f}"])
                print("  ", *found[-1], flush=True)
    bench.show("kernels_slots", ["batch", "", "us", "TB/s of what must be read"], found, shape=name)


@contextmanager
def changed_slots(rows: int | None = None, block: tuple[int, int, int] | None = None) -> Iterator[None]:
    """Use other tile and block sizes inside the context. The first call with a plan makes its tables."""
    if rows is None and block is None:
        yield
        return
    from prefold.worker.torch.attention import slot_triton

    before = slot_triton.pick_rows, dict(slot_triton.BLOCK_SIZES)
    if rows is not None:
        slot_triton.pick_rows = lambda *_: rows
    if block is not None:
        slot_triton.BLOCK_SIZES.update({key: slot_triton.BlockSize(*block) for key in before[1]})
    try:
        yield
    finally:
        slot_triton.pick_rows = before[0]
        slot_triton.BLOCK_SIZES.update(before[1])


def position_wise(bench: Bench) -> None:
    """Time position-wise kernels and eager PyTorch at 10,240 rows of 4,096 (8B): bytes to read and write / time."""
    rows_, hidden, width, heads = (32, 64, 96, 4) if bench.smoke else (10_240, 4096, 12_288, 32)
    dim = 16 if bench.smoke else 128
    x, delta = (torch.randn(rows_, hidden, device=bench.device).to(bench.dtype) for _ in range(2))
    weight, norm = (torch.ones(n, device=bench.device, dtype=bench.dtype) for n in (hidden, dim))
    gate_up = torch.randn(rows_, 2 * width, device=bench.device).to(bench.dtype)
    q = torch.randn(rows_, heads, dim, device=bench.device).to(bench.dtype)
    cos_sin = torch.randn(rows_, dim, device=bench.device)
    size = bench.dtype.itemsize
    calls = {
        "add_rms_norm": (lambda ops: ops.add_rms_norm(x, delta, weight, 1e-6), 4 * x.numel() * size),
        "rope with norm": (lambda ops: ops.rope(q, cos_sin, norm, 1e-6), 2 * q.numel() * size + cos_sin.nbytes),
        "silu_mul": (lambda ops: ops.gate(gate_up, "silu"), 3 * rows_ * width * size),
    }
    found = []
    for name, (call, moved) in calls.items():

        def run(ops: Ops | None, call=call):
            return inferring(bench, lambda: call(ops or choose_ops(bench.dtype, bench.device)))

        fused = bench.attempt(f"kernels {name}", lambda run=run: run(None))
        eager = bench.attempt(f"kernels {name}, eager", lambda run=run: run(PYTORCH))
        if fused and eager:
            found.append([name, f"{1e6 * fused:.0f}", f"{moved / fused / 1e12:.2f}", f"{1e6 * eager:.0f}"])
    bench.show("kernels_ops", ["operation", "us", "TB/s", "eager us"], found)


def draws(bench: Bench) -> None:
    """Time sampling from 256 rows of 151,936 logits, with prefold's kernel and with PyTorch."""
    rows_, vocab = (4, 500) if bench.smoke else (256, 151_936)
    logits = torch.randn(rows_, vocab, device=bench.device) * 3
    keys = np.random.default_rng(0).integers(0, 2**64, rows_, np.uint64)

    def nucleus() -> Tensor:
        falling, ids = (logits / 0.8).softmax(-1).sort(-1, descending=True)
        falling = falling.masked_fill(falling.cumsum(-1) - falling > 0.95, 0)
        return ids.gather(-1, torch.multinomial(falling, 1))

    some = {
        "temperature": {},
        "top_k 40": {"top_k": 40},
        "top_p 0.95": {"top_p": 0.95},
        "min_p 0.05, top_p 0.95": {"min_p": 0.05, "top_p": 0.95},
    }
    filters = {name: filters_of(Sampling(temperature=0.8, **one)) for name, one in some.items()}
    calls = {"arg-max": lambda: logits.argmax(-1)}
    arrays = TorchArrays(bench.device)
    if runs_triton(bench.device):
        calls |= {
            name: lambda one=one: arrays.draw(logits, np.arange(rows_), np.array([one] * rows_, np.float64), keys)
            for name, one in filters.items()
        }
    calls["torch: softmax, multinomial"] = lambda: torch.multinomial((logits / 0.8).softmax(-1), 1)
    calls["torch: sort, top_p, multinomial"] = nucleus
    found = []
    for name, call in calls.items():
        seconds = bench.attempt(f"kernels draw {name}", lambda call=call: inferring(bench, call))
        if seconds is not None:
            found.append([name, f"{1e6 * seconds:.0f}", f"{logits.nbytes / seconds / 1e12:.2f}"])
    bench.show("kernels_draw", ["draw", "us", "TB/s were the logits read once"], found, batch=rows_, vocab=vocab)


def inferring(bench: Bench, call) -> float:
    with torch.inference_mode():
        return bench.kernel_seconds(call)
