"""The operations that programs of mixtures, hybrids and gated attention have, against NumPy and against each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, addressof, byref

import numpy as np
import pytest
from programs import (
    Machine,
    Runs,
    activated,
    gate_in_turn,
    gated,
    gated_delta,
    mamba2,
    normal,
    pack,
    random_experts,
    random_layers,
    random_mixer,
    random_runs,
    rms_norm,
    short_conv,
    sigmoid,
)

from prefold import kernels
from prefold.kernels.abi import FUNCTIONS, Activation, ExpertsCall, Kind
from prefold.kernels.interface import BFLOAT16, FLOAT32, LETTERS
from prefold.worker.tensor_parallel import PART, MemoryRanks, memory_file

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no compiled kernels")
DTYPES = (FLOAT32, BFLOAT16)
STATES = 5


def check(found: np.ndarray, wanted: np.ndarray, bound: float) -> None:
    """Compares within a part of the largest number."""
    found = found.astype(np.float64)
    assert np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def function(name: str) -> Callable[..., int]:
    """A function of the library."""
    found, (result, arguments) = getattr(CDLL(str(kernels.load().path)), name), FUNCTIONS[name].split(":")
    found.argtypes, found.restype = [LETTERS[letter] for letter in arguments], LETTERS[result]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_mixers(dtype, folded, seed):
    """Runs that go on from others, states of several waves, rows that are read, folded steps."""
    rng, machine = np.random.default_rng(seed), Machine(dtype)
    runs = random_runs(rng, STATES, folded)
    mixer = random_mixer(rng, machine, runs.states)
    rows = runs.rows if runs.gather is None else len(runs.gather)
    x = normal(rng, rows, mixer.width, dtype=dtype)
    wanted, ends = mixer.scan(runs, x)
    source, out = machine.buffer(x), machine.buffer(rows, mixer.out)
    reads, fields = np.array([0, 3, rows - 1]), runs.fields(machine, [mixer])
    given, results = [table.copy() for table in mixer.tables], []
    for threads, picked in ((1, False), (3, False), (3, True)):
        for table, before in zip(mixer.tables, given, strict=True):
            table[:] = before
        machine.operations.clear()
        machine.add(mixer.kind, source=source, out=out, call=mixer.call, beside=picked)
        machine.run(rows, threads, **fields, **({"read": reads, "picked": len(reads)} if picked else {}))
        results.append([machine.buffers[out][: len(reads) if picked else rows].copy(), *mixer.stored(runs)])
    assert same(results[1], results[0])
    assert same(results[2], [results[0][0][reads], *results[0][1:]])
    check(results[0][0], wanted, 3e-5 if dtype == FLOAT32 else 2e-2)
    for part, table in enumerate(results[0][1:]):
        check(table, np.array([end[part] for end in ends]), 3e-5 if dtype == FLOAT32 or part else 2.0**-8)
    for before, after in zip(given, mixer.tables, strict=True):
        assert same([after[:STATES]], [before[:STATES]])  # what runs start from is not written


MIXERS = {
    "conv": lambda *given: short_conv(*given, 70, 3),
    "delta": lambda *given: gated_delta(*given, 2, 2, 33, 150),
    "mamba": lambda *given: mamba2(*given, 2, 3, 33, 150),
    "mamba of 64": lambda *given: mamba2(*given, 1, 2, 128, 64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_a_row_has_the_same_bits_however_its_path_is_cut(name, dtype):
    """As one run; as several runs of one step beside others, in waves; in steps of one row over a stored state."""
    rng, machine = np.random.default_rng(1), Machine(dtype)
    mixer = MIXERS[name](rng, machine, STATES)
    x, rows, fresh = normal(rng, 60, mixer.width, dtype=dtype), 23, [table.copy() for table in mixer.tables]
    out = machine.buffer(60, mixer.out)
    machine.buffer(x)

    def run(runs: Runs, given: np.ndarray) -> np.ndarray:
        machine.operations.clear()
        machine.buffers[1] = np.ascontiguousarray(given)
        machine.add(mixer.kind, source=1, out=out, call=mixer.call)
        machine.run(len(given), 2, **runs.fields(machine, [mixer]))
        return machine.buffers[out][: len(given)].copy()

    def left() -> list[np.ndarray]:
        state = [table[4].copy() for table in mixer.tables]
        for table, before in zip(mixer.tables, fresh, strict=True):
            table[:] = before
        return state

    whole = run(Runs([0], [rows], [2], [0], [4], STATES), x[:rows])
    state = left()
    # Runs 0, 2, 3, 5 are one path; the others begin elsewhere.
    cut = Runs([0, 9, 19, 20, 31, 40], [9, 19, 20, 31, 40, 42], [2, 3, -1, -3, -1, -4], [5], [4], STATES)
    path = [*range(9), *range(19, 31), *range(40, 42)]
    beside = x[:42].copy()
    beside[path] = x[:rows]
    assert same([run(cut, beside)[path], *left()], [whole, *state])
    steps = []
    for row in range(rows):
        steps.append(run(Runs([0], [1], [4 if row else 2], [0], [4], STATES), x[row : row + 1]))
    assert same([np.concatenate(steps), *left()], [whole, *state])
    # What is no number in a row reaches those below it on its path alone.
    beside[19] = np.nan
    broken, below = run(cut, beside), [*range(19, 31), *range(40, 42)]
    left()
    beside[19] = x[9]
    others = np.setdiff1d(np.arange(42), below)
    assert same([broken[others]], [run(cut, beside)[others]]) and np.isnan(broken[19].astype(np.float32)).all()


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_layers_of_mixers_and_experts(folded, seed):
    rng = np.random.default_rng(seed)
    runs = random_runs(rng, STATES, folded)
    rows = runs.rows if runs.gather is None else len(runs.gather)
    reads = np.flatnonzero(rng.integers(0, 2, rows)) if seed % 2 else None
    layers = random_layers(rng, Machine(FLOAT32), runs, reads)
    found = layers.run(1)
    assert same(layers.run(3), found)
    check(found[0], layers.expected(), 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_experts_are_those_of_the_call_and_of_numpy(dtype, seed):
    rng, machine = np.random.default_rng(seed), Machine(dtype)
    hidden, rows = 2 * int(rng.integers(8, 60)), int(rng.integers(1, 40))
    experts, x = random_experts(rng, machine, hidden), normal(rng, rows, hidden, dtype=dtype)
    source, out = machine.buffer(x), machine.buffer(rows, hidden)
    machine.add(Kind.EXPERTS, source=source, beside=source, out=out, **experts.fields)
    machine.run(rows, 3)
    found = machine.buffers[out].copy()
    check(found, experts.oracle(x.astype(np.float64)), 1e-5 if dtype == FLOAT32 else 2e-2)
    # A row alone.
    machine.buffers[source][0] = x[-1]
    machine.run(1)
    assert same([machine.buffers[out][0]], [found[-1]])
    # What is no number in a row does not reach others.
    machine.buffers[source][:rows] = x
    machine.buffers[source][rows // 2] = np.nan
    machine.run(rows, 3)
    broken, others = machine.buffers[out], np.arange(rows) != rows // 2
    assert same([broken[:rows][others]], [found[:rows][others]])
    assert np.isnan(broken[rows // 2].astype(np.float32)).all()
    # The call alone, with logits in float32.
    logits, again = np.empty((rows, experts.call.experts), np.float32), np.empty_like(x)
    linear = function("prefold_linear_float32" if dtype == FLOAT32 else "prefold_linear_bfloat16_float32")
    addresses = x.ctypes.data, hidden, experts.fields["weight"], None, None, logits.ctypes.data
    assert linear(*addresses, rows, logits.shape[1], hidden, 1, None) == 0
    if experts.bias is not None:
        logits += experts.bias.astype(np.float32)
    call = ExpertsCall.from_buffer_copy(experts.call)
    call.x, call.x_row, call.hidden, call.rows, call.threads = x.ctypes.data, hidden, hidden, rows, 1
    call.logits, call.out = logits.ctypes.data, again.ctypes.data
    activation = experts.fields["activation"].name.lower()
    assert function(f"prefold_experts_{activation}_{dtype}")(byref(call)) == 0
    assert same([again], [found])


OF_LINEARS = [kind for kind in Activation if kind not in (Activation.LINEARLY, Activation.CLAMPED)]
WILD = np.array([np.nan, 1e30, -1e30, -300, -20, -6, -1e-30, 0, 1e-30, 7, 300], np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OF_LINEARS, ids=lambda kind: kind.name)
def test_activations(kind, dtype):
    """Of a linear and of a gate, which the identity hands on: to float32's rounding, into the tails."""
    rng, rows, width = np.random.default_rng(0), 37, 32
    gate, up = normal(rng, rows, width, scale=4, dtype=dtype), normal(rng, rows, width, dtype=dtype)
    one = np.eye(width, dtype=np.float32)

    def run(gate, up, rows):
        machine = Machine(dtype)
        source, beside = machine.buffer(gate[:rows]), machine.buffer(np.concatenate((gate, up), 1)[:rows])
        outs = [machine.buffer(rows, width) for _ in range(2)]
        machine.linear(source, outs[0], one.astype(dtype), activation=kind)
        halves = np.split(np.eye(2 * width, dtype=np.float32).astype(dtype), 2)
        matrix = pack(gate_in_turn(*halves))
        machine.add(Kind.GATED, source=beside, out=outs[1], weight=matrix, activation=kind, eps=1)
        machine.run(rows, 3)
        return [machine.buffers[out] for out in outs]

    found = run(gate, up, rows)
    wide = [part.astype(np.float64) for part in (gate, up)]
    wanted = activated(kind, wide[0]), gated(kind, *wide)
    bound = {"rtol": 5e-6, "atol": 1e-30} if dtype == FLOAT32 else {"rtol": 2.0**-7, "atol": 1e-7}
    for one_found, one_wanted in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one_found.astype(np.float64), one_wanted, **bound)
    assert same(run(gate[-1:], up[-1:], 1), [part[-1:] for part in found])
    ends = np.pad(np.diag(WILD), ((0, 0), (0, width - len(WILD)))).astype(dtype)  # one a row
    with np.errstate(all="ignore"):
        wanted = activated(kind, np.diag(ends).astype(np.float64)).astype(np.float32)
    for part in run(ends, np.ones_like(ends), len(WILD)):
        np.testing.assert_allclose(np.diag(part).astype(np.float32), wanted, **bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_heads_that_lie_apart(dtype, apart, kind):
    rng, heads, dim, stride, at, rows, eps = np.random.default_rng(0), 3, 37, 50, 5, 9, 1e-5
    x = normal(rng, rows, at + heads * stride, dtype=dtype)
    weight, bias = (normal(rng, heads if apart else 1, dim) for _ in range(2))

    def run(count):
        machine = Machine(dtype)
        source = machine.buffer(x[rows - count :])
        machine.add(
            Kind.NORM_HEADS, source=source, at=at, heads=heads, dim=dim, stride=stride, eps=eps, weight=weight,
            bias=bias if kind == "layer" else None, columns=dim if apart else 0,
        )  # fmt: skip
        machine.run(count, 2)
        return machine.buffers[source]

    expected = x.astype(np.float64)
    parts = expected[:, at:].reshape(rows, heads, stride)[..., :dim]
    centred = parts - parts.mean(-1, keepdims=True) * (kind == "layer")
    expected[:, at:].reshape(rows, heads, stride)[..., :dim] = rms_norm(centred, weight, eps) + bias * (kind == "layer")
    found = run(rows)
    check(found, expected, 1e-6 if dtype == FLOAT32 else 2.0**-8)
    untouched = np.ones_like(x, bool)
    untouched[:, at:].reshape(rows, heads, stride)[..., :dim] = False
    assert same([found[untouched], run(1)], [x[untouched], found[-1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_grow_with_their_position(dtype):
    rng, heads, dim, stride, at, rows = np.random.default_rng(0), 3, 37, 50, 5, 9
    x, positions = normal(rng, rows, at + heads * stride, dtype=dtype), np.array([0, 4, 5, 9, 10, 11, 5000, 1, 70])
    machine, reads = Machine(dtype), np.array([1, 3, 6])
    growth = {"at": at, "heads": heads, "dim": dim, "stride": stride, "eps": 0.3, "positions": 5}
    sources = [machine.buffer(x), machine.buffer(x)]
    machine.add(Kind.BY_POSITION, source=sources[0], **growth)
    machine.add(Kind.PICK, source=sources[1], beside=1)
    machine.add(Kind.BY_POSITION, source=sources[1], **growth)
    machine.run(rows, 2, positions=positions, read=reads, picked=len(reads))
    expected = x.astype(np.float64)
    factors = 1 + 0.3 * np.log(1 + positions // 5)
    expected[:, at:].reshape(rows, heads, stride)[..., :dim] *= factors[:, None, None]
    found = machine.buffers[sources[0]]
    check(found, expected, 1e-6 if dtype == FLOAT32 else 2.0**-8)
    assert same([machine.buffers[sources[1]][: len(reads)]], [found[reads]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_times_a_number_for_each_of_theirs(dtype):
    rng, heads, dim, stride, at, rows = np.random.default_rng(0), 3, 37, 50, 5, 9
    x, weight = normal(rng, rows, at + heads * stride, dtype=dtype), normal(rng, heads, dim)

    def run(count):
        machine = Machine(dtype)
        source = machine.buffer(x[rows - count :])
        sizes = {"at": at, "heads": heads, "dim": dim, "stride": stride}
        machine.add(Kind.SCALE_HEADS, source=source, weight=weight, **sizes)
        machine.run(count, 2)
        return machine.buffers[source]

    expected, found = x.astype(np.float64), run(rows)
    expected[:, at:].reshape(rows, heads, stride)[..., :dim] *= weight
    check(found, expected, 1e-6 if dtype == FLOAT32 else 2.0**-8)
    untouched = np.ones_like(x, bool)
    untouched[:, at:].reshape(rows, heads, stride)[..., :dim] = False
    assert same([found[untouched], run(1)], [x[untouched], found[-1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OF_LINEARS, ids=lambda kind: kind.name)
def test_gates_that_are_activated_apart_from_their_product(kind, dtype):
    rng, rows, width = np.random.default_rng(0), 9, 37
    gate_up = normal(rng, rows, 2 * width, scale=4, dtype=dtype)

    def run(count):
        machine = Machine(dtype)
        source, out = machine.buffer(gate_up[rows - count :]), machine.buffer(count, width)
        machine.add(Kind.ACTIVATE_GATED, source=source, out=out, columns=width, activation=kind)
        machine.run(count, 2)
        return machine.buffers[out]

    found = run(rows)
    wanted = gated(kind, *np.split(gate_up.astype(np.float64), 2, 1))
    bound = {"rtol": 5e-6, "atol": 1e-30} if dtype == FLOAT32 else {"rtol": 2.0**-7, "atol": 1e-7}
    np.testing.assert_allclose(found.astype(np.float64), wanted, **bound)
    assert same([run(1)], [found[-1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_move_towards_others(dtype):
    rng, rows, width = np.random.default_rng(0), 9, 37
    x, y, rates = normal(rng, rows, width, dtype=dtype), normal(rng, rows, width, dtype=dtype), normal(rng, width)
    rates[:2] = 0, 1

    def run(count):
        machine = Machine(dtype)
        source, beside = machine.buffer(x[rows - count :]), machine.buffer(y[rows - count :])
        machine.add(Kind.INTERPOLATE, source=source, beside=beside, weight=rates)
        machine.run(count, 2)
        assert same([machine.buffers[beside]], [y[rows - count :]])
        return machine.buffers[source]

    found = run(rows)
    check(
        found, (1 - rates) * x.astype(np.float64) + rates * y.astype(np.float64), 1e-6 if dtype == FLOAT32 else 2.0**-8
    )
    assert same([found[:, 0], run(1)], [x[:, 0], found[-1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu(dtype):
    rng, rows, width = np.random.default_rng(0), 9, 37
    x, (p, n, beta, eps) = normal(rng, rows, width, scale=4, dtype=dtype), (0.8, 0.9, 0.5, -1e-6)
    x[0, : len(WILD)], x[1, :4] = WILD, [-1e-7, -1e-6, -1e-3, 1e-7]
    machine = Machine(dtype)
    source = machine.buffer(x)
    machine.add(Kind.XIELU, source=source, weight=np.array([p, n, beta, eps], np.float32))
    machine.run(rows, 2)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        below = n * (np.expm1(np.minimum(wide, eps)) - wide)
        wanted = (np.where(wide > 0, p * wide**2, below) + beta * wide).astype(np.float32)
    bound = {"rtol": 2e-6, "atol": 3e-7} if dtype == FLOAT32 else {"rtol": 2.0**-8, "atol": 3e-7}
    np.testing.assert_allclose(machine.buffers[source].astype(np.float32), wanted, **bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_a_buffer_times_factors(dtype, apart):
    rng, machine, rows = np.random.default_rng(0), Machine(dtype), 9
    x, weight = normal(rng, rows, 37, dtype=dtype), normal(rng, 37)
    source = machine.buffer(x)
    out = machine.buffer(rows, 37) if apart else source
    machine.add(Kind.SCALE_ROWS, source=source, out=out, weight=weight if apart else None, eps=-0.3)
    machine.run(rows, 2)
    wanted = x.astype(np.float64) * -0.3 * (weight if apart else 1)
    check(machine.buffers[out], wanted, 1e-6 if dtype == FLOAT32 else 2.0**-8)
    assert not apart or same([machine.buffers[source]], [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "others"), [(8, 8), (4, 4), (3, 1)])
def test_streams_are_mixed_by_shares_of_each_row(dtype, count, others):
    """Streams that mix each other, or get parts of another buffer."""
    rng, rows, width, gates = np.random.default_rng(0), 9, 37, 5
    streams = [normal(rng, rows, width, dtype=dtype) for _ in range(count)]
    by, beside = normal(rng, rows, gates + 2, dtype=dtype), normal(rng, rows, width, dtype=dtype)
    weight = normal(rng, count * others, gates)

    def run(last):
        machine = Machine(dtype)
        own = [machine.buffer(x[last:]) for x in streams]
        read = own if others == count else [machine.buffer(beside[last:])]
        buffers = np.array([*own, *read], np.int64)
        machine.add(
            Kind.MIX, beside=machine.buffer(by[last:]), heads=count, kv_heads=others, columns=gates, eps=0.7,
            weight=weight, bias=buffers,
        )  # fmt: skip
        machine.run(rows - last, 2)
        return [machine.buffers[number] for number in own]

    before = np.array(streams).astype(np.float64)
    read = before if others == count else beside[None].astype(np.float64)
    shares = 0.7 + np.tanh(by[:, :gates].astype(np.float64)) @ weight.astype(np.float64).T
    wanted = before + np.einsum("rij,jrd->ird", shares.reshape(rows, count, others), read)
    found = run(0)
    check(np.array(found), wanted, 1e-6 if dtype == FLOAT32 else 2.0**-8)
    assert same(run(rows - 1), [x[-1:] for x in found])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_the_length_of_others(dtype):
    rng, machine, rows, least = np.random.default_rng(0), Machine(dtype), 9, 1e-2
    x, like = normal(rng, rows, 37, dtype=dtype), normal(rng, rows, 37, scale=3, dtype=dtype)
    x[1], x[2], like[3], x[4, 5] = 0, x[2] * dtype.type(2.0**-7), 0, np.nan
    source = machine.buffer(x)
    machine.add(Kind.MATCH, source=source, beside=machine.buffer(like), eps=least)
    machine.run(rows, 2)
    own, wanted = (np.square(one.astype(np.float64)).mean(-1, keepdims=True) for one in (x, like))
    wanted = x.astype(np.float64) * np.sqrt(wanted / np.maximum(own, least))
    found, others = machine.buffers[source].astype(np.float64), np.arange(rows) != 4
    check(found[others], wanted[others], 1e-6 if dtype == FLOAT32 else 2.0**-7)
    assert np.isnan(found[4]).all() and not found[[1, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [Activation.GELU_TANH, Activation.SILU])
@pytest.mark.parametrize("deviations", [1.3, -0.5])
def test_gates_that_let_the_largest_through(dtype, activation, deviations):
    """Rows of the result may be longer than they have numbers: zeros lie behind these."""
    rng, rows, width = np.random.default_rng(0), 9, 37
    x = normal(rng, rows, 2 * width, dtype=dtype)
    x[1, :width] = 2  # no gate is larger than the mean

    def run(last):
        machine = Machine(dtype)
        source, out = machine.buffer(x[last:]), machine.buffer(rows - last, 48)
        machine.add(Kind.SPARSE_GATE, source=source, out=out, columns=width, activation=activation, eps=deviations)
        machine.run(rows - last, 2)
        return machine.buffers[out]

    gates, up = np.split(x.astype(np.float64), 2, -1)
    cut = gates.mean(-1, keepdims=True) + deviations * gates.std(-1, keepdims=True)
    wanted, found = activated(activation, np.maximum(gates - cut, 0)) * up, run(0)
    check(found[:, :width], wanted, 2e-6 if dtype == FLOAT32 else 1e-2)
    assert not found[:, width:].any() and not found[1].any()
    assert (found == 0).mean() > 0.5 or deviations < 0
    assert same([run(rows - 1)], [found[-1:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_router_reads_other_rows_than_experts(dtype):
    rng, machine, hidden, rows = np.random.default_rng(0), Machine(dtype), 24, 15
    experts, x = random_experts(rng, machine, hidden), normal(rng, rows, hidden, dtype=dtype)
    read, router = normal(rng, rows, 38, dtype=dtype), normal(rng, len(experts.router), 38, dtype=dtype)
    read[:, -hidden:], router[:, :-hidden], router[:, -hidden:] = x, 0, experts.router
    source, beside, out = machine.buffer(x), machine.buffer(read), machine.buffer(rows, hidden)
    machine.add(Kind.EXPERTS, source=source, beside=beside, out=out, **experts.fields | {"weight": pack(router)})
    machine.run(rows, 2)
    check(machine.buffers[out], experts.oracle(x.astype(np.float64)), 1e-5 if dtype == FLOAT32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_gates_are_scaled_before_the_activation(dtype, scale):
    rng, machine, hidden, width, rows = np.random.default_rng(0), Machine(dtype), 24, 40, 15
    x, gate, up = (normal(rng, *shape, dtype=dtype) for shape in ((rows, hidden), (width, hidden), (width, hidden)))
    weight = pack(gate_in_turn(gate, up))
    source, out = machine.buffer(x), machine.buffer(rows, 48)
    machine.add(Kind.GATED, source=source, out=out, weight=weight, activation=Activation.SILU, eps=scale)
    machine.run(rows, 2)
    x, gate, up = (array.astype(np.float64) for array in (x, gate, up))
    wanted = gated(Activation.SILU, scale * (x @ gate.T), x @ up.T)
    check(machine.buffers[out][:, :width], wanted, 1e-6 if dtype == FLOAT32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_square_of_what_is_above_0(dtype):
    rng, machine, rows = np.random.default_rng(0), Machine(dtype), 9
    x, weight = normal(rng, rows, 24, dtype=dtype), normal(rng, 40, 24, dtype=dtype)
    x[3] = np.nan
    source, out = machine.buffer(x), machine.buffer(rows, 40)
    machine.linear(source, out, weight, activation=Activation.RELU2)
    machine.run(rows, 2)
    found, others = machine.buffers[out].astype(np.float64), np.arange(rows) != 3
    wanted = np.maximum(x.astype(np.float64) @ weight.astype(np.float64).T, 0) ** 2
    check(found[others], wanted[others], 1e-6 if dtype == FLOAT32 else 1e-2)
    assert np.isnan(found[3]).all() and (found[others] == 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_within_limits(dtype):
    """In place, and into some columns of a wider buffer. NaN stays NaN, and no limit is none."""
    rng, machine, rows, width = np.random.default_rng(0), Machine(dtype), 9, 37
    x, wide = normal(rng, rows, width, dtype=dtype), normal(rng, rows, 60, dtype=dtype)
    x[3, 5], x[4, 6] = np.nan, np.inf
    for low, high in ((-0.5, 0.75), (-np.inf, np.inf), (0.25, np.inf)):
        machine.operations.clear()
        source, out = machine.buffer(x), machine.buffer(wide)
        limits = np.array([low, high], np.float32)
        machine.add(Kind.CLAMP, source=source, out=out, at=11, columns=width, weight=limits)
        machine.add(Kind.CLAMP, source=source, out=source, columns=width, weight=limits)
        machine.run(rows, 3)
        found, beside = (machine.buffers[number].astype(np.float32) for number in (source, out))
        wanted = np.clip(x.astype(np.float32), low, high)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(beside[:, 11:48], wanted)
        others = np.delete(np.arange(60), np.s_[11:48])
        np.testing.assert_array_equal(beside[:, others], wide[:, others].astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_gelu(dtype):
    rng, machine, rows, width = np.random.default_rng(0), Machine(dtype), 9, 37
    x, gates = (normal(rng, rows, width, dtype=dtype) for _ in range(2))
    source, beside = machine.buffer(x), machine.buffer(gates)
    fields = {"heads": 1, "dim": width, "stride": 1, "columns": width, "activation": Activation.GELU_TANH}
    machine.add(Kind.GATE, source=source, beside=beside, **fields)
    machine.run(rows, 2)
    wanted = gated(Activation.GELU_TANH, gates.astype(np.float64), x.astype(np.float64))
    check(machine.buffers[source], wanted, 1e-6 if dtype == FLOAT32 else 1e-2)


# Of gate and up, and of down.
TYPES = [("Q4_K", "Q6_K"), ("MXFP4", "MXFP4"), ("Q8_0", "Q5_K"), ("Q5_0", "Q4_1"), ("Q5_1", "Q4_0"), ("BF16", "F16")]


@pytest.mark.parametrize("one_form", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_experts_in_blocks(types, dtype, one_form):
    """Few rows of an expert are multiplied in another way than many, except in one form."""
    for rows in (1, 3, 90):
        rng, machine = np.random.default_rng(rows), Machine(dtype)
        width = 256 if any(kind.endswith("_K") for kind in types) else 96
        experts = random_experts(rng, machine, hidden := 256, width, types, one_form)
        x = normal(rng, rows, hidden, dtype=dtype)
        source, out = machine.buffer(x), machine.buffer(rows, hidden)
        machine.add(Kind.EXPERTS, source=source, out=out, **experts.fields)
        machine.run(rows, 1)
        found = machine.buffers[out].copy()
        check(found, experts.oracle(x.astype(np.float64)), 1e-5 if dtype == FLOAT32 else 2e-2)
        machine.run(rows, 3)
        assert same([machine.buffers[out]], [found])
        if one_form:
            machine.buffers[source][0] = x[-1]
            machine.run(1)
            assert same([machine.buffers[out][0]], [found[-1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_for_each_number_and_one_for_all(dtype):
    """The gates of a head lie behind its queries; the result of a number does not depend on its place."""
    rng, heads, dim, rows = np.random.default_rng(0), 5, 37, 40
    x, queries = (normal(rng, rows, heads * size, scale=4, dtype=dtype) for size in (dim, 2 * dim))
    gates = queries.reshape(rows, heads, 2, dim)[:, :, 1]

    def run(x, gates, count=rows, **fields):
        machine = Machine(dtype)
        source, beside = machine.buffer(x[:count]), machine.buffer(gates[:count])
        machine.add(Kind.GATE, source=source, beside=beside, **fields)
        machine.run(count, 3)
        return machine.buffers[source]

    def expected(x, gates):  # rounded twice
        return (x.astype(np.float64) * sigmoid(gates.astype(np.float64)).astype(dtype).astype(np.float64)).astype(dtype)

    each = {"heads": heads, "dim": dim, "at": dim, "stride": 2 * dim, "columns": dim}
    found, wanted = run(x, queries, **each), expected(x, gates.reshape(x.shape))
    check(found, wanted.astype(np.float64), 2e-7 if dtype == FLOAT32 else 2.0**-8)
    if dtype == BFLOAT16:
        assert (found == wanted).mean() > 0.99
    by_numbers = run(x, gates.reshape(x.shape), heads=heads * dim, dim=1, stride=1, columns=1)
    assert same([by_numbers, run(x, queries, 1, **each)], [found, found[:1]])
    one = normal(rng, rows, 1, scale=4, dtype=dtype)
    found = run(x, one, heads=1, dim=heads * dim, columns=1)
    check(found, expected(x, one).astype(np.float64), 2e-7 if dtype == FLOAT32 else 2.0**-8)
    wild = np.array([[np.nan, np.inf, -np.inf, 1000, -1000]], dtype)
    ones = np.ones_like(wild)
    np.testing.assert_array_equal(
        run(ones, wild, 1, heads=1, dim=5, columns=5).astype(np.float32), [[np.nan, 1, 0, 1, 0]]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("turned", [0, 12, 48])
def test_heads_that_lie_apart_are_rotated_in_part_behind_a_norm(dtype, wide, turned):
    rng, heads, dim, stride, at, rows, eps = np.random.default_rng(0), 3, 48, 70, 5, 9, 1e-5
    x = normal(rng, rows, at + heads * stride, dtype=dtype)
    weight = normal(rng, dim, dtype=FLOAT32 if wide else dtype)
    table, positions = normal(rng, 30, turned), rng.integers(0, 30, rows)
    addresses = np.array([table.ctypes.data], np.int64)

    def run(**fields):
        machine = Machine(dtype)
        buffer = machine.buffer(x)
        plane = 0 if turned else -1
        given = {"source": buffer, "at": at, "heads": heads, "dim": dim, "stride": stride, "eps": eps}
        machine.add(Kind.ROPE, **given | {"plane": plane} | fields)
        machine.run(
            rows, 2, positions=positions, tables=addresses, num_tables=bool(turned),
            dims=np.array([turned], np.int64),
            angles=np.empty((1, rows, turned), np.float32),
        )  # fmt: skip
        return machine.buffers[buffer]

    def expected(normed):
        found = x.astype(np.float64)
        parts = found[:, at:].reshape(rows, heads, stride)[..., :dim]
        if normed:
            parts = rms_norm(parts, weight.astype(np.float64), eps)
        cosines, sines = np.split(table[positions][:, None].astype(np.float64), 2, -1)
        a, b, rest = np.split(parts, [turned // 2, turned], -1)
        done = np.concatenate((a * cosines - b * sines, b * cosines + a * sines, rest), -1)
        found[:, at:].reshape(rows, heads, stride)[..., :dim] = done
        return found

    bound = 1e-6 if dtype == FLOAT32 else 2.0**-7
    check(run(weight=weight, wide=wide), expected(True), bound)
    plain = run()
    check(plain, expected(False), bound)
    untouched = np.ones_like(x, bool)
    untouched[:, at:].reshape(rows, heads, stride)[..., :dim] = False
    assert same([plain[untouched]], [x[untouched]])
    if not turned:
        assert same([plain], [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("picked", [False, True])
def test_queries_that_lie_apart_attend_as_those_side_by_side(dtype, folded, picked):
    rng, heads, kv_heads, dim, rows = np.random.default_rng(0), 4, 2, 24, 11
    queries = normal(rng, rows, heads * 2 * dim, dtype=dtype)
    near = np.ascontiguousarray(queries.reshape(rows, heads, 2, dim)[:, :, 0].reshape(rows, -1))
    kv, times = normal(rng, rows, 2 * kv_heads * dim, dtype=dtype), 2 if folded else 1
    end = np.repeat(np.arange(1, times + 1) * rows, rows)  # folded: the prompt twice
    compiled = kernels.load()
    assert compiled is not None

    def lists(wanted):
        return compiled.plan_rows(end, np.ascontiguousarray(wanted, np.int64), None, None)

    reads = np.array([0, 4, 10])
    plans = [lists(np.arange(times * rows)), lists(reads)]
    given = {
        "plans": plans[0].call, "read_plans": plans[1].call, "read": reads, "picked": len(reads) if picked else rows,
        "scale": 0.2, "positions": np.zeros(rows, np.int64),
    }  # fmt: skip
    if folded:
        room = np.empty((2 * rows, 2 * (heads + kv_heads) * dim), dtype)
        given |= {
            "unfolded": 2 * rows, "scatter": np.arange(2 * rows) % rows, "gather": np.arange(rows),
            "read_order": np.arange(len(reads)), "unfolded_room": room,
        }  # fmt: skip

    def run(q, stride):
        machine = Machine(dtype)
        paths = np.zeros(4, np.int64)
        source, beside, out = machine.buffer(q), machine.buffer(kv), machine.buffer(rows, heads * dim)
        if picked:
            machine.add(Kind.PICK, source=source, beside=1)
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "columns": dim, "stride": stride}
        machine.add(Kind.ATTEND, source=source, beside=beside, out=out, **sizes)
        machine.run(rows, 2, paths=paths, **given)
        return machine.buffers[out][: given["picked"]]

    found = run(queries, 2 * dim)
    assert np.isfinite(found.astype(np.float32)).all()
    assert same([found], [run(near, 0)])
    q, (k, v) = near.reshape(rows, heads, dim).astype(float), np.split(kv.reshape(rows, -1, dim).astype(float), 2, 1)
    k, v = (np.repeat(part, heads // kv_heads, 1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * 0.2 + np.triu(np.full((rows, rows), -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v).reshape(rows, -1)
    check(found, wanted[reads] if picked else wanted, 1e-5 if dtype == FLOAT32 else 2e-2)


def two_ranks() -> list[MemoryRanks]:
    file = memory_file(2, PART)
    ranks = [MemoryRanks(rank, 2, file, [], 60.0, PART) for rank in range(2)]
    os.close(file)
    return ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("columns", "copies"), [((40, 23), 1), ((17, 17), 2)])
def test_a_norm_of_numbers_of_several_ranks(dtype, wide, columns, copies):
    """Each rank has other numbers; or with copies both have the same."""
    ranks, rng, rows, at, eps = two_ranks(), np.random.default_rng(0), 6, 3, 1e-5
    whole = sum(columns) // copies
    x, weight = normal(rng, rows, whole, dtype=dtype), normal(rng, whole, dtype=FLOAT32 if wide else dtype)
    wanted = rms_norm(x.astype(float), weight.astype(float), eps)
    starts = (0, 0) if copies == 2 else (0, columns[0])
    parts = [slice(start, start + count) for start, count in zip(starts, columns, strict=True)]

    def run(rank: int) -> np.ndarray:
        machine, part = Machine(dtype), parts[rank]
        buffer = machine.buffer(np.pad(x[:, part], ((0, 0), (at, 2))))
        machine.add(
            Kind.NORM, source=buffer, out=buffer, beside=-1, at=at, columns=columns[rank], wide=wide, eps=eps,
            weight=np.ascontiguousarray(weight[part]), summed=1, heads=whole, kv_heads=copies,
        )  # fmt: skip
        machine.run(rows, ranks=addressof(ranks[rank].view))
        found = machine.buffers[buffer].astype(float)
        assert not found[:, :at].any() and not found[:, -2:].any()
        return found[:, at:-2]

    with ThreadPoolExecutor(2) as pool:
        for found, part in zip(pool.map(run, range(2)), parts, strict=True):
            np.testing.assert_allclose(found, wanted[:, part], rtol=1e-5 if dtype == FLOAT32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_and_sums_are_added_up_over_ranks(dtype):
    ranks = two_ranks()
    rng, hidden, rows = np.random.default_rng(0), 32, 7
    machines = [Machine(dtype) for _ in ranks]
    x, apart = normal(rng, rows, hidden, dtype=dtype), []
    for machine, summed in ((machine, summed) for summed in (0, 1) for machine in machines):
        machine.operations.clear()
        machine.buffers.clear()
        mixture = random_experts(np.random.default_rng(machines.index(machine)), machine, hidden)
        source, out = machine.buffer(x), machine.buffer(rows, hidden)
        machine.add(Kind.EXPERTS, source=source, beside=source, out=out, summed=summed, **mixture.fields)
        machine.add(Kind.ADD, source=source, beside=out, eps=1, summed=summed)
        if not summed:
            machine.run(rows)
            apart.append(machine.buffers[out].astype(np.float32))

    def run(rank: int) -> np.ndarray:
        machines[rank].run(rows, ranks=addressof(ranks[rank].view))
        return machines[rank].buffers[0]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    total = (apart[0] + apart[1]).astype(dtype).astype(np.float32)
    each = (x.astype(np.float32) + total).astype(dtype).astype(np.float32)
    assert same([first, second], [(each + each).astype(dtype)] * 2)
