"""Latent attention over slots: which queries are expanded, and that both forms give what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof

import numpy as np
import pytest
from programs import Machine, normal, pack

from prefold import kernels
from prefold.kernels.abi import Kind, LatentCall, LatentSplit
from prefold.kernels.interface import BFLOAT16, FLOAT32
from prefold.model.config import Latent
from prefold.worker.attention.slot_plan import KeyRuns, SlotPlan, plan_slots
from prefold.worker.native.store import NativeStore, StoreLayout

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no compiled kernels")
SIZES, HEADS, SCALE = Latent(rank=64, query_rank=0, dim=12, tail=6, value_dim=20), 5, 0.3
GLM = Latent(rank=512, query_rank=0, dim=192, tail=64, value_dim=256)
BOUNDS = {FLOAT32: 1e-5, BFLOAT16: 3e-2}
# A branch: keys that were computed earlier, new rows behind these keys, and branches behind these rows.
Branch = tuple[int, int, Sequence["Branch"]]
MIXED: tuple[Branch, ...] = ((150, 1, ()), (90, 70, ()), (0, 3, ()), (201, 1, ()), (40, 0, ((0, 60, ()), (130, 1, ()))))


class Step:
    """A step over slots. seen: whether a query sees a slot, bool [queries, slots]; slots: of the new rows"""

    def __init__(self, branches: Sequence[Branch], seed: int = 0, readers: Sequence[int] | None = None):
        """readers: the rows that query; None: all"""
        self._rng, self._next, runs, positions = np.random.default_rng(seed), 1, list[list[int]](), list[int]()
        self._add(branches, 0, runs, positions)
        self.slots = np.array([start for start, count, *_, is_new in runs for _ in range(is_new)], np.int64)
        self.runs, self.positions = KeyRuns(*np.array(runs, np.int64).reshape(-1, 6).T[:5]), np.array(positions)
        self.rows, self.num_slots = len(positions), self._next + 1
        if readers is not None:
            self.runs, self.positions = self.runs.of_queries(np.array(readers)), self.positions[list(readers)]
        self.seen = np.zeros((len(self.positions), self.num_slots), bool)
        self.at = np.zeros(self.num_slots, np.int64)
        for start, count, position, first, last in zip(*self.runs.arrays, strict=True):
            self.seen[first:last, start : start + count] = True
            self.at[start : start + count] = position + np.arange(count)

    def _add(self, branches: Sequence[Branch], position: int, runs: list, positions: list) -> None:
        for context, rows, below in branches:
            opened, place = list[list[int]](), position
            for count in [context // 3, context - context // 3]:
                if count:
                    opened.append([self._take(count), count, place, len(positions), 0, 0])
                    runs.append(opened[-1])
                    place += count
            for _ in range(rows):
                opened.append([self._take(1), 1, place, len(positions), 0, 1])
                runs.append(opened[-1])
                positions.append(place)
                place += 1
            self._add(below, place, runs, positions)
            for run in opened:
                run[4] = len(positions)

    def _take(self, count: int) -> int:
        """Return the first of `count` free slots, sometimes behind a gap."""
        first = self._next + int(self._rng.integers(0, 4) == 0)
        self._next = first + count
        return first

    def plan(self, latent: Latent | None = SIZES, window: int | None = None, *, invariant: bool = False) -> SlotPlan:
        options = {"group": HEADS, "invariant": invariant, "latent": latent}
        return plan_slots(self.runs, len(self.positions), self.positions, window, **options)

    def expanded(self, latent: Latent = SIZES) -> list[int]:
        split = self.plan(latent).split
        return [] if split is None else split.expanded.tolist()


class Attention:
    """Attention with random weights, over a store with random latents."""

    def __init__(self, dtype: np.dtype, step: Step, stored: np.dtype | None = None):
        rng, self.dtype, self.step = np.random.default_rng(1), dtype, step
        up = normal(rng, HEADS, SIZES.dim + SIZES.value_dim, SIZES.rank, scale=0.3, dtype=dtype)
        absorb = np.zeros((HEADS, SIZES.rank + SIZES.tail, SIZES.dim + SIZES.tail), dtype)
        absorb[:, : SIZES.rank, : SIZES.dim] = up[:, : SIZES.dim].swapaxes(1, 2)
        absorb[:, SIZES.rank :, SIZES.dim :] = np.eye(SIZES.tail)
        self.up, self.matrices = up, [self._packed(x) for x in (up, absorb, up[:, SIZES.dim :])]
        self.store = NativeStore([StoreLayout.of(kernels.load(), SIZES.kept, dtype, stored)], step.num_slots,
                                 kernels.load())  # fmt: skip
        self.latents = normal(rng, step.num_slots, SIZES.kept.dim, dtype=dtype)
        self.write(np.arange(1, step.num_slots), self.latents[1:])
        if stored is not None:
            self.latents = self.latents.astype(stored).astype(dtype)
        self.q = normal(rng, step.rows, HEADS * (SIZES.dim + SIZES.tail), dtype=dtype)

    def write(self, slots: np.ndarray, latents: np.ndarray) -> None:
        rows = np.ascontiguousarray(latents[:, None])
        self.store.write(0, slots, rows, rows[..., : SIZES.rank])

    def _packed(self, matrices: np.ndarray) -> np.ndarray:
        return np.stack([pack(np.ascontiguousarray(one)) for one in matrices])

    def run(self, plan: SlotPlan, threads: int = 1, queries: Sequence[int] | None = None) -> np.ndarray:
        machine, step = Machine(self.dtype), self.step
        names = ("expand", "absorb", "restore")
        fields = dict(zip(names, map(machine.address, self.matrices), strict=True))
        fields |= {f"{name}_words": x[0].size for name, x in zip(names, self.matrices, strict=True)}
        call = LatentCall(**fields, rank=SIZES.rank, tail=SIZES.tail, dim=SIZES.dim, value_dim=SIZES.value_dim)
        source, beside = machine.buffer(self.q), machine.buffer(self.latents[step.slots])
        out = machine.buffer(step.rows, HEADS * SIZES.value_dim)
        if queries is not None:
            machine.add(Kind.PICK, source=source, beside=1)
        machine.add(
            Kind.ATTEND_LATENT, source=source, beside=beside, out=out, heads=HEADS, kv_heads=1,
            dim=SIZES.dim + SIZES.tail, columns=SIZES.value_dim, call=call,
        )  # fmt: skip
        reads = np.arange(step.rows) if queries is None else np.array(queries)
        split = LatentSplit() if plan.split is None else LatentSplit(
            *(machine.address(x) for x in (plan.split.absorbed, plan.split.expanded, plan.split.slots)),
            len(plan.split.absorbed), len(plan.split.expanded), len(plan.split.slots), plan.split.lists.call,
        )  # fmt: skip
        machine.run(
            step.rows, threads, slots=step.slots, planes=addressof(self.store.structs), read=reads, picked=len(reads),
            positions=np.zeros(step.rows, np.int64), scale=SCALE, plans=plan.lists.call, read_plans=plan.lists.call,
            splits=split, read_splits=split,
        )  # fmt: skip
        return machine.buffers[out][: len(reads)].copy()

    def expected(self, seen: np.ndarray, queries: Sequence[int] | None = None) -> np.ndarray:
        q = self.q.astype(float).reshape(len(self.q), HEADS, -1)
        q, latents, up = q if queries is None else q[list(queries)], self.latents.astype(float), self.up.astype(float)
        keys = np.einsum("hdr,jr->jhd", up[:, : SIZES.dim], latents[:, : SIZES.rank])
        values = np.einsum("hdr,jr->jhd", up[:, SIZES.dim :], latents[:, : SIZES.rank])
        scores = np.einsum("ihd,jhd->hij", q[..., : SIZES.dim], keys)
        scores += np.einsum("ihd,jd->hij", q[..., SIZES.dim :], latents[:, SIZES.rank :])
        scores = np.where(seen, scores * SCALE, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), values).reshape(len(q), -1)


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found.astype(float) - wanted).max() <= BOUNDS[found.dtype] * np.abs(wanted).max()


STEPS: dict[str, tuple[Branch, ...]] = {
    "decoding": ((150, 1, ()), (9, 1, ()), (64, 1, ())),
    "one short prompt": ((200, 3, ()),),
    "one long prompt": ((200, 99, ()),),
    "a prompt without a context": ((0, 99, ()),),
    "mixed": MIXED,
    "branches": ((60, 20, ((30, 20, ((0, 9, ()), (70, 1, ()))), (0, 31, ()), (200, 2, ()))), (160, 2, ())),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_both_forms_give_what_numpy_gives(name, dtype):
    step = Step(STEPS[name])
    attention, plan, absorbed = Attention(dtype, step), step.plan(), step.plan(None)
    assert (plan.split is not None) == (name not in ("decoding", "one short prompt"))
    assert absorbed.split is None
    wanted, found = attention.expected(step.seen), attention.run(plan)
    check(found, wanted)
    check(attention.run(absorbed), wanted)
    assert attention.run(plan, 3).tobytes() == found.tobytes()


def test_a_store_of_bfloat16_for_rows_of_float32():
    attention = Attention(FLOAT32, step := Step(MIXED), BFLOAT16)
    check(attention.run(step.plan(), 2), attention.expected(step.seen))


@pytest.mark.parametrize("readers", [[0, 70, 134], list(range(1, 80)), [row for row in range(135) if row % 4]])
def test_rows_that_are_read_are_split_for_themselves(readers):
    step = Step(MIXED, readers=readers)
    attention, plan = Attention(FLOAT32, step), step.plan()
    assert (plan.split is None) == (len(readers) < 5)
    check(attention.run(plan, 2, readers), attention.expected(step.seen, readers))


def test_windows_and_invariant_steps_stay_absorbed():
    step = Step(MIXED)
    attention = Attention(FLOAT32, step)
    plan = step.plan(window=37)
    assert plan.split is None
    seen = step.seen & (step.positions[:, None] - step.at < 37)
    check(attention.run(plan), attention.expected(seen))
    plan = step.plan(invariant=True)
    assert plan.split is None
    found = attention.run(plan)
    check(found, attention.expected(step.seen))
    rows = [*range(1, 71)]
    alone = Step(MIXED, readers=rows).plan(invariant=True)
    assert attention.run(alone, 3, rows).tobytes() == found[rows].tobytes()


def test_a_number_that_is_not_finite_reaches_those_that_see_it_alone():
    step = Step(MIXED)
    attention = Attention(FLOAT32, step)
    clean = attention.run(step.plan())
    row = 31  # of the prompt
    attention.latents[step.slots[row], 3] = np.nan
    found = attention.run(step.plan())
    sees = step.seen[:, step.slots[row]]
    assert np.isnan(found[sees]).all()
    assert found[~sees].tobytes() == clean[~sees].tobytes()


def test_a_prompt_is_expanded_beside_rows_that_decode():
    assert Step(MIXED).expanded() == [*range(1, 71), *range(75, 135)]
    decoding = [(4096, 1, ())] * 32
    many = [(4096, 1000, ()), *decoding, (0, 64, ()), (4096, 40, ())]
    assert Step(many).expanded(GLM) == [*range(1000), *range(1032, 1096)]
    assert Step(decoding).expanded(GLM) == []
    assert Step(decoding[:1]).expanded(GLM) == []


def number(is_enough: Callable[[int], bool]) -> int:
    """Return the smallest number that is enough, below 4096. Each number above it must be enough, too."""
    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def test_the_rows_that_are_worth_a_context():
    """Near the counts at which both forms take the same time, which were measured."""
    for sizes, least, most in ((GLM, 200, 300), (Latent(256, 0, 64, 32, 64), 50, 90)):
        rows = number(lambda rows, sizes=sizes: len(Step([(2048, rows, ())]).expanded(sizes)) == rows)
        assert least < rows < most
        shared = number(lambda rows, sizes=sizes: len(Step([(2048, 0, [(0, 1, ())] * rows)]).expanded(sizes)) == rows)
        assert least < shared < most
        # Keys of their own are not worth it, whatever the rows share.
        assert Step([(2048, 0, [(2000, 1, ())] * most)]).expanded(sizes) == []


def test_a_part_of_a_tree_is_expanded():
    """Branches whose own keys are not worth it are left out, and the others are chosen with what is above them."""
    tree = [(300, 0, [(0, 150, ()), (2500, 1, ()), (0, 150, [(0, 20, ()), (3000, 2, ())]), (900, 3, ())])]
    assert Step(tree).expanded(GLM) == [*range(150), *range(151, 321)]
    few = [(3000, 0, [(0, 50, ()), (2500, 1, ()), (0, 50, ())])]
    assert Step(few).expanded(GLM) == []
