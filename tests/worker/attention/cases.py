"""Steps of attention with random tensors, over rows as they lie and over slots, and what they must give."""

from __future__ import annotations

import numpy as np
import torch
from dense import dense_attention
from nests import Nest, nest_of

from prefold.worker.attention import KeyRuns, RowPlan, SlotPlan, plan_rows, plan_slots, visibility
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.attention.store import KVStore

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PLANES = 2


class Case:
    """A step: who sees what, its tensors, and `run`, which is what is tested."""

    nest: Nest
    window: int | None
    query_rows: np.ndarray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    cap: float | None = None
    sinks: torch.Tensor | None = None
    kept: torch.dtype | None = None
    invariant = False

    def run(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def visible(self) -> np.ndarray:
        return visibility(self.nest.end, self.query_rows, self.nest.positions, self.window, self.nest.first)

    def expected(self) -> torch.Tensor:
        options = {"scale": self.scale, "cap": self.cap, "sinks": self.sinks}
        return dense_attention(self.q.double(), self.k.double(), self.v.double(), self.visible, **options)

    def check(self) -> None:
        out = self.run()
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(out.double(), self.expected(), rtol=0, atol=TOLERANCE[self.q.dtype])

    def check_not_finite(self, where: str, row: int, bad: float) -> None:
        """A number of the second KV head of four query heads that is not finite reaches those that see it alone."""
        getattr(self, where)[row, 1, row % 32] = bad
        out = self.run()
        sees = torch.from_numpy(self.visible[:, row])
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out[~sees].double(), self.expected()[~sees], rtol=0, atol=tolerance, equal_nan=False)
        assert out[:, :2].isfinite().all(), "the other KV head"
        if where == "v":
            assert not out[sees][:, 2:, row % 32].isfinite().any()
        elif bad is torch.nan:
            assert out[sees][:, 2:].isnan().all()


class RowCase(Case):
    """A step: its plan, random tensors, and what attention must give."""

    def __init__(
        self,
        nest: Nest,
        *,
        seed=0,
        heads=(6, 2),
        dim=32,
        dtype=torch.float32,
        path=0,
        every=1,
        window=None,
        query_rows=None,
    ):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        rows = np.arange(path, nest.rows)
        if query_rows is None:
            query_rows = rows if every == 1 else np.sort(rng.choice(rows, -(-len(rows) // every), replace=False))
        self.query_rows = query_rows
        self.nest, self.window, self.path = nest, window, path
        self.scale = dim**-0.5
        self.q = torch.randn(len(self.query_rows), heads[0], dim, generator=generator).to(dtype)
        self.k = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)
        self.v = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)

    def plan(self) -> RowPlan:
        nest, given = self.nest, (self.query_rows, self.nest.positions, self.window)
        if self.invariant:
            return plan_rows(nest.end, *given, first=nest.first, invariant=True)
        return self.attention().plan(nest.end, *given, path=self.path, first=nest.first)

    def attention(self) -> RowAttention:
        heads = Heads(self.q.shape[1], *self.k.shape[1:], self.q.dtype, self.cap)
        return RowAttention(heads, self.q.device)

    def run(self) -> torch.Tensor:
        new = slice(self.path, None)
        carried = {"path_k": self.k[: self.path], "path_v": self.v[: self.path]} if self.path else {}
        options = {"scale": self.scale, "sinks": self.sinks} | carried
        return self.attention().attend(self.q, self.k[new], self.v[new], self.plan(), **options)


def random_slots(rng: np.random.Generator, count: int, jumps: float) -> tuple[np.ndarray, int]:
    """Distinct slots from 1 on, one a key, in runs that break off with probability `jumps`; and how many slots."""
    runs, left = [], count
    while left:
        size = min(left, int(rng.geometric(jumps)))
        runs.append(size)
        left -= size
    order = rng.permutation(len(runs))
    starts, total = np.zeros(len(runs), np.int64), 1
    for run in order:
        total += int(rng.integers(0, 3))
        starts[run] = total
        total += runs[run]
    return np.concatenate([s + np.arange(n) for s, n in zip(starts, runs, strict=True)]), total


def runs_of(nest: Nest, query_rows: np.ndarray, slots: np.ndarray, breaks: np.ndarray) -> KeyRuns:
    """The keys that some query sees, as runs; `breaks`: keys before which a run ends in any case."""
    first = np.searchsorted(query_rows, np.arange(nest.rows) if nest.first is None else nest.first)
    last = np.searchsorted(query_rows, nest.end)
    runs: list[list[int]] = []
    before = None
    for key in np.flatnonzero(first < last).tolist():
        follows = before is not None and not breaks[key] and key == before + 1 and slots[key] == slots[before] + 1
        if follows and (first[key], last[key]) == (first[before], last[before]):
            follows = nest.positions[key] == nest.positions[before] + 1
        else:
            follows = False
        if follows:
            runs[-1][1] += 1
        else:
            runs.append([slots[key], 1, nest.positions[key], first[key], last[key]])
        before = key
    return KeyRuns(*np.array(runs, np.int64).reshape(-1, 5).T)


class SlotCase(Case):
    """A step over a store: its plan, random tensors, and what attention must give."""

    def __init__(
        self,
        nest: Nest,
        *,
        seed=0,
        heads=(6, 2),
        dim=32,
        dtype=torch.float32,
        every=1,
        jumps=0.1,
        window=None,
        query_rows=None,
    ):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        if query_rows is None:
            query_rows = np.sort(rng.choice(nest.rows, -(-nest.rows // every), replace=False))
        self.query_rows = np.asarray(query_rows)
        self.nest, self.window, self.scale, self.heads = nest, window, dim**-0.5, heads
        self.slots, self.num_slots = random_slots(rng, nest.rows, jumps)
        self.breaks = rng.random(nest.rows) < jumps / 2
        self.q = torch.randn(len(self.query_rows), heads[0], dim, generator=generator).to(dtype)
        self.k = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)
        self.v = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)

    def keep(self, dtype: torch.dtype) -> None:
        """Makes the store keep keys and values in a dtype, to which they are rounded here, too."""
        self.kept = dtype
        self.k, self.v = self.k.to(dtype).to(self.k.dtype), self.v.to(dtype).to(self.v.dtype)

    @property
    def runs(self) -> KeyRuns:
        return runs_of(self.nest, self.query_rows, self.slots, self.breaks)

    def plan(self) -> SlotPlan:
        positions = self.nest.positions[self.query_rows]
        options = {"group": self.heads[0] // self.heads[1], "invariant": self.invariant}
        return plan_slots(self.runs, len(self.query_rows), positions, self.window, **options)

    def store(self) -> KVStore:
        """All keys written into plane 1, in two writes; plane 0 holds something else."""
        heads = Heads(*self.heads, self.q.shape[2], self.q.dtype, self.cap, self.kept)
        store = KVStore([heads] * PLANES, self.num_slots)
        garbage = self.k.new_full((self.num_slots, *self.k.shape[1:]), torch.nan)
        store.write(0, torch.arange(self.num_slots), garbage, garbage)
        slots = torch.from_numpy(self.slots)
        some = torch.from_numpy(np.random.default_rng(1).random(len(slots)) < 0.5)
        for part in (some, ~some):
            store.write(1, slots[part], self.k[part], self.v[part])
        return store

    def run(self) -> torch.Tensor:
        return self.store().attend(1, self.q, self.plan(), self.scale, self.sinks)


def groups(sizes: list[int], shared: int, own: int) -> tuple[Nest, np.ndarray]:
    """Decoding: for each size, a prefix of `shared` rows and so many sequences of `own` more rows; their last rows."""
    parents: list[int] = []
    queries = []
    for size in sizes:
        parents += [-1, *range(len(parents), len(parents) + shared - 1)]
        stem = len(parents) - 1
        for _ in range(size):
            parents += [stem, *range(len(parents), len(parents) + own - 1)]
            queries.append(len(parents) - 1)
    return nest_of(parents), np.array(queries)
