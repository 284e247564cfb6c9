"""Read-outs, the sampler and pooling on NumPy arrays and on tensors: equal tokens and ranks, near numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from choosing import OnlyThese, arrays_of, choose_for
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold import kernels
from prefold.engine.sampling import SamplerState, drawing_of
from prefold.engine.schedule.steps import NOT_FINITE, Reads, SlotResult, SlotStep, StepResult, StreamStep
from prefold.spec.requests import Readout, Sampling
from prefold.worker.native.arrays import ClassificationHead
from prefold.worker.pool import mean_of_rows, plan_pool, sent
from prefold.worker.readouts import HEAD_ROWS, SlotTicket, greedy, read_stream, values_of
from prefold.worker.torch.tensors import array_of

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
VOCAB, HIDDEN = 300, 8
ODD = [np.nan, np.inf, -np.inf, 3e38, -3e38]


class TableModel:
    """A model whose logits are rows of a table: the first number of a hidden state says which."""

    def __init__(self, table: torch.Tensor | np.ndarray, *, invariant: bool = False):
        self.table = table
        self.config, self.ranks = SimpleNamespace(invariant=invariant), SimpleNamespace(rank=0)

    def logits(self, hidden, ids: Sequence[int] | None = None):
        rows = np.asarray(hidden[:, 0].tolist(), np.int64)
        found = self.table[rows if isinstance(hidden, np.ndarray) else torch.from_numpy(rows)]
        return found if ids is None else found[:, list(ids)]

    def head(self, hidden):
        return arrays_of(hidden).float32(hidden)[:, 1:3] * 2


def table(rng: np.random.Generator, rows: int, *, odd: bool, vocab: int = VOCAB) -> np.ndarray:
    """Logits, some of them equal, and where `odd` some rows with numbers that are not finite, or huge."""
    logits = (rng.normal(size=(rows, vocab)) * rng.choice([0.3, 3.0, 12.0], (rows, 1))).astype(np.float32)
    logits[rng.random(rows) < 0.3] = np.float32(1.5)
    for row in np.flatnonzero(rng.random(rows) < 0.4) if odd else ():
        logits[row, rng.choice(vocab, rng.choice([1, vocab // 2, vocab]), replace=False)] = rng.choice(ODD)
    return logits


def hidden_states(rng: np.random.Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    hidden = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    hidden[:, 0] = np.arange(rows)
    return hidden.astype(dtype)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    wide = torch.from_numpy(array.astype(np.float32))
    return wide.bfloat16() if array.dtype == ml_dtypes.bfloat16 else wide


def both(call, *given: np.ndarray) -> tuple:
    """What a function gives for arrays, and for the same as tensors, as arrays."""
    with torch.inference_mode():
        return call(*given), call(*map(as_tensor, given))


DTYPES = st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
SEEDS = st.integers(0, 2**32 - 1)
OPTIONS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 299, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.017, 0.4]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.57, 1.93]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (299, -2.5))]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    min_tokens=st.sampled_from([0, 9]),
    max_tokens=st.just(20),
    logprobs=st.sampled_from([None, None, 0, 5, 300]),
)
GRAMMARS = st.sampled_from([None, None, [], [7], [0, 5, 63, 64, 299], list(range(0, 300, 2))])


@settings(max_examples=60, deadline=None)
@given(options=st.lists(st.tuples(OPTIONS, GRAMMARS), min_size=1, max_size=6), seed=SEEDS, odd=st.booleans())
def test_tokens_are_those_of_tensors(options, seed, odd):
    rng = np.random.default_rng(seed)
    logits, options = table(rng, 4, odd=odd), options * 8
    rows, prompt, output = rng.integers(0, 4, len(options)), rng.integers(0, VOCAB, 4), rng.integers(0, VOCAB, 3)
    ends, seeds = rng.integers(0, VOCAB, 2).tolist(), rng.integers(0, 99, len(options)).tolist()

    def choose(logits):
        states = []
        for (sampling, allowed), own in zip(options, seeds, strict=True):
            matcher = None if allowed is None else OnlyThese(allowed)
            states.append(SamplerState(sampling, seed=own, prompt=prompt, end_ids=ends, matcher=matcher))
            for token in output.tolist():
                states[-1].advance(token)
        return choose_for(logits, states, rows.tolist())

    before = logits.copy()
    found, wanted = both(choose, logits)
    np.testing.assert_array_equal(logits, before)
    assert found.ids == wanted.ids
    is_finite = np.isfinite(logits.max(-1))[rows]
    for token, (_, allowed), finite in zip(found.ids, options, is_finite, strict=True):
        assert not finite or (token == -1 if allowed == [] else token >= -1)
    for row, own, other in zip(rows.tolist(), found.logprobs, wanted.logprobs, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            np.testing.assert_allclose(own.logprob, other.logprob, atol=1e-5, rtol=3e-7)
            np.testing.assert_allclose([x for _, x in own.top], [x for _, x in other.top], atol=1e-5, rtol=3e-7)
            # PyTorch does not say which of equals come first.
            values = log_softmax(logits[row])
            assert len({token for token, _ in own.top}) == len(own.top)
            np.testing.assert_allclose([x for _, x in own.top], values[[token for token, _ in own.top]], atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, dtype=DTYPES)
def test_numbers_of_rows_are_near_those_of_tensors(seed, dtype):
    rng = np.random.default_rng(seed)
    x, y, logits = hidden_states(rng, 5, dtype), hidden_states(rng, 5, dtype), table(rng, 5, odd=False)

    def compute(x, y, logits):
        arrays = arrays_of(x)
        copy = arrays.copy(x)
        copy[0] = 7
        beside = arrays.float32(arrays.beside((x, copy)))
        return *arrays.entropy(logits), arrays.dots(x, y), arrays.silu(arrays.float32(x) * 30), beside

    found, wanted = both(compute, x, y, logits)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    sums, products, silu, joined = found[2], found[3], found[4], found[5]
    chances = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float64)
    chances /= chances.sum(-1, keepdims=True)
    np.testing.assert_allclose(sums, -(chances * np.log(np.maximum(chances, 1e-300))).sum(-1), rtol=1e-3, atol=1e-4)
    x, y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(products, (x * y).sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(silu, 30 * x / (1 + np.exp(-30 * x)), rtol=1e-5, atol=1e-6)
    assert joined.shape == (5, 2 * HIDDEN) and (joined[0, HIDDEN:] == 7).all() and not (joined[0, :HIDDEN] == 7).all()


def log_softmax(row: np.ndarray) -> np.ndarray:
    below = row.astype(np.float64) - row.max()
    return below - np.log(np.exp(below).sum())


READOUTS = [
    Readout("last"),
    Readout("every"),
    Readout("head"),
    Readout("logits", ids=(5, 0, 299)),
    Readout("logits", ids=(1,), sums=True),
    Readout("logprobs"),
    Readout("logprobs", top=0),
    Readout("logprobs", top=4),
    Readout("logprobs", top=300),
]


@pytest.mark.parametrize("readout", READOUTS, ids=str)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, dtype=DTYPES, odd=st.booleans())
def test_values_are_those_of_tensors(readout, seed, dtype, odd):
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 5, 200]))
    rows, targets = rng.integers(0, count, int(rng.integers(1, 9))), rng.integers(0, VOCAB, 8).astype(np.int32)
    rows = np.sort(rows) if rng.random() < 0.5 else rows

    def values(hidden, logits):
        arrays = arrays_of(hidden)
        found = values_of(arrays, TableModel(logits), readout, hidden, rows, targets[: len(rows)])
        return arrays.fetch(*(one for one in found if one is not None))()

    found, wanted = both(values, hidden_states(rng, count, dtype), table(rng, count, odd=odd))
    compare_values(found, wanted, top=readout.top)


def compare_values(found, wanted, *, top: int | None = None) -> None:
    """Tokens of the most likely are left out: PyTorch does not say which of equals come first."""
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    values, others = found[0], wanted[0]
    assert values.shape == others.shape
    if top is not None:
        sure = ~np.isnan(others[:, 0])
        np.testing.assert_array_equal(values[sure, 1], others[sure, 1])  # ranks
        values, others = values[:, : 2 + top], others[:, : 2 + top]
    np.testing.assert_allclose(values, others, atol=1e-5, rtol=3e-7)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_several_blocks_of_rows():
    """More rows than the head takes at once."""
    rng, count = np.random.default_rng(3), 2 * HEAD_ROWS + 5
    rows, targets = rng.permutation(count), rng.integers(0, VOCAB, count).astype(np.int32)
    hidden, logits = hidden_states(rng, count, np.dtype(np.float32)), table(rng, count, odd=True)

    def values(hidden, logits):
        arrays, model = arrays_of(hidden), TableModel(logits)
        found = values_of(arrays, model, Readout("logprobs", top=3), hidden, rows, targets)
        return (*arrays.fetch(*found)(), greedy(arrays, model, hidden))

    found, wanted = both(values, hidden, logits)
    compare_values(found, wanted, top=3)
    places = found[0][:, 5:].astype(np.int64)
    for row, target, rank, own in zip(logits[rows], targets, found[0][:, 1], places, strict=True):
        assert rank == 1 + (row > row[target]).sum()
        falling = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")[:3]
        assert own.tolist() == falling.tolist()


def slot_step(rng: np.random.Generator, sampled: bool) -> tuple[SlotStep, list[SamplerState]]:
    """A step of four sequences over one prompt in slots 10 to 15: tokens, read-outs of rows, and kept states."""
    reads = np.array([0, 0, 1, 1, 2, 3, 3, 3])
    options = [Sampling(temperature=1.2, top_p=0.8, logprobs=2) if sampled else Sampling()] * 4
    states = [SamplerState(one, seed=int(rng.integers(99))) for one in options]
    on_reads: list[SamplerState | None] = [states[0], None, states[1], None, None, states[2], None, states[3]]
    step = SlotStep(
        tokens=np.zeros(5, np.int32), positions=np.arange(5, dtype=np.int32), slots=np.array([16, 17, 18, 19, 20]),
        run_start=np.array([10, 17, 12]), run_count=np.array([6, 1, 2]), run_position=np.array([0, 6, 7]),
        run_first=np.array([0, 2, 3]), run_last=np.array([5, 4, 5]), read_rows=np.array([0, 2, 3, 4]), reads=reads,
        drawing=drawing_of(on_reads, [0] * 8),
        read_outs=(
            Reads(Readout("mean"), np.array([3, 1]), counts=np.array([7, 3]), consumers=np.array([1, 4])),
            Reads(Readout("logprobs", top=2), np.array([0]), np.array([5, 6, 7]), np.array([3]), np.array([3])),
            Reads(Readout("head"), np.array([2]), consumers=np.array([6])),
        ),
    )  # fmt: skip
    return step, states


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, sampled=st.booleans(), dtype=DTYPES, invariant=st.booleans(), odd=st.booleans())
def test_a_step_over_slots(seed, sampled, dtype, invariant, odd):
    rng = np.random.default_rng(seed)
    step, _ = slot_step(rng, sampled)
    hidden, kept = hidden_states(rng, 4, dtype), hidden_states(rng, 24, dtype)

    def run(hidden, logits, kept) -> SlotResult:
        model = TableModel(logits, invariant=invariant)
        return SlotTicket(arrays_of(hidden), model, hidden, step, kept).result()

    found, wanted = both(run, hidden, table(rng, 24, odd=odd), kept)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert (found.ids[[1, 3, 4, 6]] == -1).all() and (found.ids[[0, 2, 5, 7]] != -1).all()
    assert found.logprobs.keys() == wanted.logprobs.keys()
    for own, other, top in zip(found.values, wanted.values, (None, 2, None), strict=True):
        one, another = (StepResult(given.values, given.greedy) for given in (own, other))
        pairs = [(one.values, another.values)] + ([] if one.greedy is None else [(one.greedy, another.greedy)])
        compare_values([a for a, _ in pairs], [b for _, b in pairs], top=top)
    mean = kept.astype(np.float64)[[10, 11, 12, 13, 14, 15, 12, 13][1:]].mean(0)
    np.testing.assert_allclose(found.values[0].values[0], mean, atol=1e-5)


def random_stream(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends and positions of rows, depth first."""
    path: list[int] = []
    end, positions = np.full(rows, rows), np.empty(rows, np.int32)
    for key in range(rows):
        kept = int(rng.integers(len(path) + 1)) if rng.random() < 0.3 else len(path)
        end[path[kept:]] = key
        del path[kept:]
        positions[key] = len(path)
        path.append(key)
    return end, positions


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, dtype=DTYPES, invariant=st.booleans(), bad=st.sampled_from([0.0, np.nan, np.inf, 3e38]))
def test_means_over_paths_of_a_stream(seed, dtype, invariant, bad):
    """In three steps, each below the path of the step before; a broken row shows on its own paths alone."""
    rng = np.random.default_rng(seed)
    rows = 150
    cuts = [0, *np.sort(rng.choice(np.arange(1, rows), 2, replace=False)).tolist(), rows]
    end, positions = random_stream(rng, rows)
    hidden = rng.normal(size=(rows, HIDDEN)).astype(dtype)
    broken = int(rng.integers(rows))
    hidden[broken] = hidden[broken] if bad == 0.0 else bad
    reads = np.flatnonzero(rng.random(rows) < 0.4)

    def step(first: int, stop: int) -> StreamStep:
        path = np.flatnonzero(end[:first] > first)
        keys = np.append(path, np.arange(first, stop))
        place = np.searchsorted(keys, np.minimum(end[keys], stop))
        wanted = np.searchsorted(keys, reads[(first <= reads) & (reads < stop)])
        return StreamStep(
            tokens=keys[len(path) :], positions=positions[first:stop], path=len(path), end=place,
            key_positions=positions[keys], keep=np.flatnonzero(end[keys] > stop),
            read_out=Reads(Readout("mean"), wanted),
        )  # fmt: skip

    def run(hidden):
        arrays, model, kept, found = arrays_of(hidden), TableModel(hidden, invariant=invariant), None, []
        for first, stop in pairwise(cuts):
            made = step(first, stop)
            old = made.keep < made.path
            plan = plan_pool(made.end, made.key_positions, made.read_out.rows) if len(made.read_out.rows) else None
            batch = SimpleNamespace(
                step=made, scatter=None, keep_path=arrays.send(made.keep[old]),
                keep_new=arrays.send(made.keep[~old] - made.path), pool=None if plan is None else sent(plan, arrays),
            )  # fmt: skip
            ticket, kept = read_stream(arrays, model, batch, kept, hidden[first:stop])
            found.append(ticket.result().values)
        return np.concatenate(found)

    with np.errstate(all="ignore"):
        found, wanted = both(run, hidden)
        np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=1e-6)
        for read, mean in zip(reads.tolist(), found, strict=True):
            keys = np.flatnonzero(end[: read + 1] > read)
            if bad == 0.0 or broken not in keys:
                np.testing.assert_allclose(mean, hidden[keys].astype(np.float64).mean(0), atol=2e-6)


def test_folded_rows_are_unfolded_before_means():
    rng = np.random.default_rng(0)
    hidden, scatter = rng.normal(size=(3, HIDDEN)).astype(np.float32), np.array([0, 1, 0, 2])
    end, positions = np.array([2, 2, 4, 4]), np.array([0, 1, 0, 1])
    made = StreamStep(
        tokens=np.zeros(3), positions=positions, path=0, end=end, key_positions=positions,
        read_out=Reads(Readout("mean"), np.array([1, 3])),
    )  # fmt: skip

    def run(hidden):
        arrays = arrays_of(hidden)
        nothing = arrays.send(np.zeros(0, np.int64))
        batch = SimpleNamespace(
            step=made, scatter=arrays.send(scatter), keep_path=nothing, keep_new=nothing,
            pool=sent(plan_pool(end, positions, np.array([1, 3])), arrays),
        )  # fmt: skip
        return read_stream(arrays, TableModel(hidden), batch, None, hidden)[0].result().values

    for found in both(run, hidden):
        np.testing.assert_allclose(found, [hidden[[0, 1]].mean(0), hidden[[0, 2]].mean(0)], atol=1e-6)


def test_a_row_has_the_same_bits_in_any_company():
    """Each read-out of some rows together, and of each alone."""
    rng, count = np.random.default_rng(1), 37
    logits, targets = table(rng, count, odd=False, vocab=1003), rng.integers(0, 1003, count).astype(np.int32)
    hidden = rng.normal(size=(count, HIDDEN)).astype(np.float32)
    hidden[:, 0] = np.arange(count)
    arrays, model = arrays_of(logits), TableModel(logits)
    weights = [(rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32), None), (np.ones((3, HIDDEN), np.float32), None)]
    model.head = ClassificationHead(weights, kernels.load())
    rows = np.arange(count)
    for readout in (Readout("logprobs", top=5), Readout("logits", ids=(4, 9), sums=True), Readout("head")):
        whole = values_of(arrays, model, readout, hidden, rows, targets)[0]
        for row in rows.tolist():
            alone = values_of(arrays, model, readout, hidden[row : row + 1], rows[:1], targets[row : row + 1])[0]
            assert alone.tobytes() == whole[row : row + 1].tobytes()
    states = [SamplerState(Sampling(temperature=1.0, top_p=0.9, logprobs=3), seed=i) for i in range(count)]
    whole = choose_for(logits, states)
    alone = [choose_for(logits[i : i + 1], [one]) for i, one in enumerate(states)]
    assert whole.ids == [one.ids[0] for one in alone]
    assert whole.logprobs == [one.logprobs[0] for one in alone]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_classification_head(layers, dtype):
    rng = np.random.default_rng(layers)
    sizes = [(70, 70), (3, 70)][-layers:]
    weights = [
        (rng.normal(size=size).astype(np.float32), rng.normal(size=size[0]).astype(np.float32)) for size in sizes
    ]
    if layers == 1:
        weights = [(weights[0][0], None)]
    hidden = rng.normal(size=(9, 70)).astype(dtype)
    hidden[4, 3] = np.nan
    found = ClassificationHead(weights, kernels.load())(hidden)
    x = torch.from_numpy(hidden.astype(np.float64))
    for number, (weight, bias) in enumerate(weights):
        x = torch.relu(x) if number else x
        x = x @ torch.from_numpy(weight).double().T + (0 if bias is None else torch.from_numpy(bias))
    np.testing.assert_allclose(found, x.numpy(), rtol=2e-5, atol=2e-5)
    assert found.dtype == np.float32 and np.isnan(found[4]).all() and not np.isnan(found[:4]).any()


def test_a_mean_over_many_kept_rows():
    """More rows than are summed in float32."""
    hidden, slots = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32), np.arange(200)
    rows, counts = np.append(slots[:150], slots[20:185]), np.array([150, 165])

    def run(hidden):
        arrays = arrays_of(hidden)
        return arrays.fetch(mean_of_rows(arrays, hidden, rows, counts))()[0]

    for found in both(run, hidden):
        np.testing.assert_allclose(found, [hidden[:150].mean(0), hidden[20:185].mean(0)], atol=1e-6)


def test_log_probabilities_of_large_logits():
    """A float32 log-sum-exp of these would be off by 0.03."""
    logits = (np.random.default_rng(0).normal(size=(3, 50)) + 1e6).astype(np.float32)
    states = [SamplerState(Sampling(logprobs=50), seed=1)] * 3
    for row, own in zip(logits, choose_for(logits, states).logprobs, strict=True):
        values = log_softmax(row)
        np.testing.assert_allclose([x for _, x in own.top], values[[token for token, _ in own.top]], atol=1e-5)
        np.testing.assert_allclose(own.logprob, values.max(), atol=1e-5)


def test_logits_that_are_not_finite_have_no_token():
    logits = np.zeros((5, 50), np.float32)
    logits[0, 3], logits[1, 4], logits[2], logits[3] = np.nan, np.inf, -np.inf, -np.inf
    logits[3, 9] = 1.0
    states = [SamplerState(Sampling(temperature=t, top_k=5), seed=1) for t in (0.0, 1.0) for _ in range(5)]
    found = choose_for(logits, states, [*range(5)] * 2)
    assert found.ids[:4] == [NOT_FINITE] * 3 + [9] and found.ids[5:9] == [NOT_FINITE] * 3 + [9]


def test_memory_is_shared_where_nothing_is_computed():
    hidden = np.ones((3, HIDDEN), np.float32)
    values, _ = values_of(arrays_of(hidden), TableModel(hidden), Readout("last"), hidden, np.arange(3))
    assert values is hidden
    tensor = torch.ones(3)
    assert np.shares_memory(arrays_of(tensor).fetch(tensor)()[0], array_of(tensor))


def test_no_torch_is_imported():
    code = """
import sys
from types import SimpleNamespace
import numpy as np
from prefold import kernels
from prefold.engine.sampling import SamplerState, drawing_of
from prefold.engine.schedule.steps import Reads, SlotStep
from prefold.spec.requests import Readout, Sampling
from prefold.worker.native.arrays import ClassificationHead, NumpyArrays
from prefold.worker.readouts import SlotTicket, greedy
compiled = kernels.load()
if compiled is not None:
    hidden = np.eye(2, 8, dtype=np.float32)
    logits = np.arange(600, dtype=np.float32).reshape(2, 300)
    head = ClassificationHead([(np.ones((3, 8), np.float32), None)], compiled)
    model = SimpleNamespace(logits=lambda hidden, ids=None: logits, head=head, ranks=SimpleNamespace(rank=0))
    model.config = SimpleNamespace(invariant=False)
    one, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    reads = Reads(Readout("head"), np.array([1]), consumers=np.array([1]))
    state = SamplerState(Sampling(temperature=1.0, top_p=0.5, logprobs=2), seed=1)
    step = SlotStep(one, one, one, none, none, none, none, none, np.arange(2), np.arange(2),
                    drawing_of([state, None], [0, 0]), (reads,))
    result = SlotTicket(NumpyArrays(compiled), model, hidden, step).result()
    assert result.ids[0] > 290 and result.values[0].values.tolist() == [[1.0, 1.0, 1.0]], result
    assert greedy(NumpyArrays(compiled), model, hidden).tolist() == [299, 299]
sys.exit(3 if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
