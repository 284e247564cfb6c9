"""Random programs of operations on NumPy memory, and what they compute by NumPy in float64: for the operations of
mixtures of experts, of layers with a state, and of gated attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass

import numpy as np
from blocks import dequantized, stored_bytes
from routing import route

from prefold import kernels
from prefold.kernels import StoredRows
from prefold.kernels.abi import (
    Activation,
    ConvCall,
    DeltaCall,
    ExpertsCall,
    Kind,
    MambaCall,
    Operation,
    PlaceLists,
    ProgramCall,
    RunLists,
    ShortConvCall,
    StatePlane,
    StateStep,
)
from prefold.kernels.interface import BFLOAT16, FLOAT32
from prefold.worker.native.program import SCORES

LANES, PANEL = 16, 32


class Machine:
    """Buffers of rows, and a list of operations. Arrays and structures in fields stand for their addresses."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.buffers, self.operations = dtype, list[np.ndarray](), list[Operation]()
        self._kept: list[object] = []

    def buffer(self, rows: np.ndarray | int, width: int = 0) -> int:
        """Adds a buffer with these numbers, or with so many rows that are no numbers; returns its number."""
        array = np.full((rows, width), np.nan) if isinstance(rows, int) else rows
        self.buffers.append(np.ascontiguousarray(array.astype(self.dtype)))
        return len(self.buffers) - 1

    def address(self, value):
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            self._kept.append(value)
            return value.ctypes.data
        if isinstance(value, Structure) and not isinstance(value, (ConvCall, RunLists)):
            self._kept.append(value)
            return addressof(value)
        return value

    def keep(self, value: object) -> None:
        """Lets a value live as long as the machine."""
        self._kept.append(value)

    def fields(self, **fields) -> dict:
        return {name: self.address(value) for name, value in fields.items()}

    def add(self, kind: Kind, **fields) -> None:
        self.operations.append(Operation(kind=kind, **self.fields(**fields)))

    def linear(self, source: int, out: int, weight: np.ndarray, **fields) -> None:
        self.add(Kind.LINEAR, source=source, out=out, weight=pack(weight), **fields)

    def run(self, rows: int, threads: int = 1, **fields) -> None:
        operations = (Operation * len(self.operations))(*self.operations)
        addresses = np.array([buffer.ctypes.data for buffer in self.buffers], np.int64)
        widths = np.array([buffer.shape[1] for buffer in self.buffers], np.int64)
        call = ProgramCall(
            operations=addressof(operations), count=len(operations), buffers=addresses.ctypes.data,
            widths=widths.ctypes.data, rows=rows, threads=threads, is_bf16=self.dtype == BFLOAT16,
            **{"picked": rows} | self.fields(**fields),
        )  # fmt: skip
        compiled = kernels.load()
        assert compiled is not None
        compiled.run_program(call)

    def snapshot(self) -> list[np.ndarray]:
        return [buffer.copy() for buffer in self.buffers]


def pack(weight: np.ndarray) -> np.ndarray:
    """A matrix [outputs, inputs] as words in panels."""
    words = np.ascontiguousarray(weight).view(np.uint32)
    whole = np.zeros((-(-len(words) // PANEL) * PANEL, words.shape[1]), np.uint32)
    whole[: len(words)] = words
    return np.ascontiguousarray(whole.reshape(-1, PANEL, words.shape[1]).transpose(0, 2, 1))


def gate_in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of gate and of up, LANES of each in turn, filled up with zeros to whole LANES."""
    fill = ((0, -len(gate) % LANES), (0, 0))
    halves = [np.pad(half, fill).reshape(-1, LANES, half.shape[1]) for half in (gate, up)]
    return np.ascontiguousarray(np.stack(halves, 1).reshape(-1, gate.shape[1]))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def gated(kind: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if kind == Activation.RELU2:
        return np.maximum(gate, 0) ** 2 * up
    if kind == Activation.CLAMPED:
        gate = np.minimum(gate, 7)
        return gate * sigmoid(1.702 * gate) * (1 + up.clip(-7, 7))
    return activated(kind, gate) * up


def activated(kind: Activation, x: np.ndarray) -> np.ndarray:
    functions = {
        Activation.SILU: silu, Activation.GELU_TANH: gelu_tanh, Activation.RELU: lambda x: np.maximum(x, 0),
        Activation.GELU: lambda x: x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2,
        Activation.RELU2: lambda x: np.maximum(x, 0) ** 2,
    }  # fmt: skip
    return functions[kind](x)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@dataclass(frozen=True)
class Runs:
    """Runs of rows of the stream, which take states through the rows of a step.

    first, stop, source  of each run, in the order of rows. A source is a state, or -1 - i: the end of run i
    ends, slots          the runs whose last states are stored, and where
    states               how many there are
    scatter, gather      of a folded step, as in ProgramCall
    """

    first: list[int]
    stop: list[int]
    source: list[int]
    ends: list[int]
    slots: list[int]
    states: int
    scatter: np.ndarray | None = None
    gather: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.stop[-1]

    def place(self, run: int, offset: int, kept: int) -> int:
        """The place of a row, counted from the first row of a run; it may be on the path above."""
        if offset >= 0:
            return self.states * kept + self.first[run] + offset
        if self.source[run] >= 0:
            return self.source[run] * kept + kept + offset
        above = -1 - self.source[run]
        return self.place(above, self.stop[above] - self.first[above] + offset, kept)

    def places(self, kept: int) -> tuple[np.ndarray, np.ndarray]:
        """The places above each row, and those that make up each state to store."""
        length = [stop - first for first, stop in zip(self.first, self.stop, strict=True)]
        rows = [(run, row) for run, size in enumerate(length) for row in range(size)]
        above = [[self.place(run, row - back, kept) for run, row in rows] for back in range(1, kept + 1)]
        below = [[self.place(run, length[run] - back, kept) for back in range(kept, 0, -1)] for run in self.ends]
        return np.array(above, np.int64), np.array(below, np.int64)

    def fields(self, machine: Machine, mixers: Sequence[Mixer]) -> dict:
        """The fields of a call that say how states go through its rows."""
        runs = range(len(self.first))
        depth = list[int]()
        for source in self.source:
            depth.append(0 if source >= 0 else depth[-1 - source] + 1)
        to = [-1] * len(depth)
        for source in self.source:
            if source < 0 and to[-1 - source] < 0 and -1 - source not in self.ends:
                to[-1 - source] = max([self.states - 1, *to]) + 1
        between = max([self.states - 1, *to]) + 1 - self.states
        for run, slot in zip(self.ends, self.slots, strict=True):
            to[run] = slot
        source = [source if source >= 0 else to[-1 - source] for source in self.source]
        order = sorted(runs, key=depth.__getitem__)
        waves = np.cumsum([0, *np.bincount(depth)])
        lists = [[values[run] for run in order] for values in (self.first, self.stop, source, to)]
        addresses = [machine.address(np.array(values, np.int64)) for values in (*lists, waves)]
        places = (PlaceLists * 16)()
        for kept in {mixer.kept for mixer in mixers}:
            places[kept] = PlaceLists(*map(machine.address, self.places(kept)))
        planes = (StatePlane * len(mixers))(*[StatePlane(*map(machine.address, mixer.tables)) for mixer in mixers])
        machine.keep((places, planes))
        step = StateStep(
            addressof(places), machine.address(np.array(self.slots, np.int64)), len(self.ends),
            RunLists(*addresses, len(waves) - 1, self.states, between),
        )  # fmt: skip
        fold = {} if self.scatter is None else {"unfolded": self.rows, "scatter": self.scatter, "gather": self.gather}
        return {"states": addressof(planes), "state_step": step, **fold}

    def scan(self, x: np.ndarray, starts: list, step: Callable) -> tuple[np.ndarray, list]:
        """Takes states through rows x, one after the other. step(state, row): the row's result, and the next state.
        Returns the results, and the states at the ends that are stored."""
        out, ends = [], []
        for first, stop, source in zip(self.first, self.stop, self.source, strict=True):
            state = starts[source] if source >= 0 else ends[-1 - source]
            for row in x[first:stop]:
                result, state = step(state, row)
                out.append(result)
            ends.append(state)
        return np.array(out), [ends[run] for run in self.ends]


def random_runs(rng: np.random.Generator, states: int, folded: bool = False) -> Runs:
    """Runs some of which go on from others; folded: the stream has every row twice, and the model in another order."""
    lengths = rng.permutation([1, 1, 2, 3, 17, *rng.integers(1, 6, 3)])
    count = len(lengths)
    source = [
        int(rng.integers(states)) if run == 0 or rng.random() < 0.5 else -1 - int(rng.integers(run))
        for run in range(count)
    ]
    fold = {}
    if folded:
        rows = int(lengths.sum())
        order = rng.permutation(rows)
        fold = {"scatter": np.tile(order, 2), "gather": np.argsort(order) + rows * rng.integers(0, 2, rows)}
        source += [one if one >= 0 else one - count for one in source]
        lengths = np.tile(lengths, 2)
    stop = np.cumsum(lengths)
    ends = np.sort(rng.permutation(len(lengths))[:4])
    slots = [states + number for number in range(len(ends))]
    return Runs((stop - lengths).tolist(), stop.tolist(), source, ends.tolist(), slots, states + len(ends), **fold)


@dataclass(frozen=True)
class Mixer:
    """A mixer with random weights, and states of one layer.

    kind, call  of the operation; width, out: of a row before and after it; kept: columns of the convolution
    tables      the columns and the states
    oracle      a step of `Runs.scan`, whose states are (columns, state), in float64
    """

    kind: Kind
    call: Structure
    width: int
    out: int
    kept: int
    tables: list[np.ndarray]
    oracle: Callable

    def scan(self, runs: Runs, x: np.ndarray) -> tuple[np.ndarray, list]:
        """What `Runs.scan` gives for the rows that are computed, in float64."""
        starts = list(zip(*(table.astype(np.float64) for table in self.tables), strict=True))
        wide = x.astype(np.float64)
        out, ends = runs.scan(wide if runs.scatter is None else wide[runs.scatter], starts, self.oracle)
        return out if runs.gather is None else out[runs.gather], ends

    def stored(self, runs: Runs) -> list[np.ndarray]:
        """The states that a step has stored, part by part."""
        return [table[runs.slots] for table in self.tables]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0, dtype: np.dtype = FLOAT32) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def convolution(columns: np.ndarray, x: np.ndarray, taps: np.ndarray, bias: np.ndarray | None):
    """What a convolution gives for a row x, and the columns that it leaves."""
    columns = np.concatenate((columns, x[None]))
    return (columns * taps).sum(0) + (0 if bias is None else bias), columns[1:]


def short_conv(rng: np.random.Generator, machine: Machine, states: int, channels: int, kept: int) -> Mixer:
    taps, bias = normal(rng, kept + 1, channels), normal(rng, channels) if rng.integers(2) else None
    columns = normal(rng, states, kept, channels, dtype=machine.dtype)
    call = ShortConvCall(ConvCall(**machine.fields(taps=taps, bias=bias, channels=channels, kept=kept)))

    def oracle(state, row):
        b, c, x = np.split(row, 3)
        y, left = convolution(state[0], b * x, taps, bias)
        return c * y, (left,)

    return Mixer(Kind.SHORT_CONV, call, 3 * channels, channels, kept, [columns], oracle)


def gated_delta(
    rng: np.random.Generator, machine: Machine, states: int, key_heads: int, shared: int, key_dim: int, value_dim: int
) -> Mixer:
    heads, kept, beta_scale = key_heads * shared, int(rng.integers(1, 4)), float(rng.choice([1.0, 2.0]))
    keys, values = key_heads * key_dim, heads * value_dim
    channels, is_tiled = 2 * keys + values, bool(rng.integers(2))
    taps, norm = normal(rng, kept + 1, channels, scale=0.5), normal(rng, value_dim)
    rates, dt_bias = -np.exp(normal(rng, heads)), normal(rng, heads)
    tables = [
        normal(rng, states, kept, channels, dtype=machine.dtype),
        normal(rng, states, heads, key_dim, value_dim),
    ]
    call = DeltaCall(
        ConvCall(**machine.fields(taps=taps, channels=channels, kept=kept)),
        **machine.fields(rates=rates, dt_bias=dt_bias, norm=norm), heads=heads, key_heads=key_heads, key_dim=key_dim,
        value_dim=value_dim, eps=1e-5, beta_scale=beta_scale, tiled=is_tiled,
    )  # fmt: skip
    heads_of = np.arange(heads) % key_heads if is_tiled else np.arange(heads) // shared

    def oracle(state, row):
        x, z, b, a = np.split(row, np.cumsum([channels, values, heads]))
        y, left = convolution(state[0], x, taps, None)
        q, k, v = (part.reshape(-1, dim) for part, dim in zip(
            np.split(silu(y), [keys, 2 * keys]), (key_dim, key_dim, value_dim), strict=True))  # fmt: skip
        q, k = ((u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-6))[heads_of] for u in (q, k))
        s = np.exp(rates * np.log1p(np.exp(a + dt_bias)))[:, None, None] * state[1]
        added = beta_scale * sigmoid(b)[:, None] * (v - np.einsum("hk,hkv->hv", k, s))
        s = s + k[:, :, None] * added[:, None]
        o = rms_norm(np.einsum("hk,hkv->hv", q, s) / np.sqrt(key_dim), norm, 1e-5)
        return (o * silu(z.reshape(o.shape))).ravel(), (left, s)

    return Mixer(Kind.GATED_DELTA, call, channels + values + 2 * heads, values, kept, tables, oracle)


def mamba2(
    rng: np.random.Generator, machine: Machine, states: int, groups: int, shared: int, key_dim: int, value_dim: int
) -> Mixer:
    heads, kept = groups * shared, int(rng.integers(1, 4))
    values, keys = heads * value_dim, groups * key_dim
    channels = values + 2 * keys
    least, most = (0.0, np.inf) if rng.integers(2) else (0.4, 1.2)
    taps, bias = normal(rng, kept + 1, channels, scale=0.5), normal(rng, channels) if rng.integers(2) else None
    rates, dt_bias, skips = -np.exp(normal(rng, heads)), normal(rng, heads), normal(rng, heads)
    norm, norm_first = normal(rng, values) if rng.integers(3) else None, bool(rng.integers(2))
    gate_scale, step_scale = rng.choice([1.0, 0.7, 1.4], 2).tolist()
    tables = [
        normal(rng, states, kept, channels, dtype=machine.dtype),
        normal(rng, states, heads, key_dim, value_dim),
    ]
    call = MambaCall(
        ConvCall(**machine.fields(taps=taps, bias=bias, channels=channels, kept=kept)),
        **machine.fields(rates=rates, dt_bias=dt_bias, skips=skips, norm=norm), heads=heads, groups=groups,
        key_dim=key_dim, value_dim=value_dim, eps=1e-5, least=least, most=most, norm_first=norm_first,
        gate_scale=gate_scale, step_scale=step_scale,
    )  # fmt: skip

    def oracle(state, row):
        gate, x, dt = np.split(row, np.cumsum([values, channels]))
        y, left = convolution(state[0], x, taps, bias)
        x, b, c = np.split(silu(y), np.cumsum([values, keys]))
        x = x.reshape(heads, value_dim)
        b, c = (np.repeat(part.reshape(groups, key_dim), shared, 0) for part in (b, c))
        t = np.log1p(np.exp(step_scale * dt + dt_bias)).clip(least, most)
        s = np.exp(rates * t)[:, None, None] * state[1] + b[:, :, None] * (t[:, None] * x)[:, None]
        y = np.einsum("hk,hkv->hv", c, s) + skips[:, None] * x
        by, out = silu(gate_scale * gate), y.ravel()
        out = out if norm_first else out * by
        if norm is not None:
            out = rms_norm(out.reshape(groups, -1), norm.reshape(groups, -1), 1e-5).ravel()
        return out * by if norm_first else out, (left, s)

    return Mixer(Kind.MAMBA2, call, values + channels + heads, values, kept, tables, oracle)


def random_mixer(rng: np.random.Generator, machine: Machine, states: int) -> Mixer:
    kind = rng.integers(3)
    if kind == 0:
        return short_conv(rng, machine, states, 2 * int(rng.integers(1, 40)), int(rng.integers(1, 5)))
    sizes = [int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 40)), 2 * int(rng.integers(1, 50))]
    return (gated_delta if kind == 1 else mamba2)(rng, machine, states, *sizes)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts with random weights.

    call, fields  of the operation; router, bias: of the router; oracle: of rows, in float64
    """

    call: ExpertsCall
    fields: dict
    router: np.ndarray
    bias: np.ndarray | None
    oracle: Callable[[np.ndarray], np.ndarray]


def random_stacks(
    rng: np.random.Generator,
    machine: Machine,
    count: int,
    width: int,
    hidden: int,
    plain: bool,
    types: Sequence[str],
    one_form: bool,
) -> tuple[list[np.ndarray], dict]:
    """Gate, up and down of experts, [experts, outputs, inputs], and the fields of a call with them.

    plain     the experts have no gate; gate is then what up is otherwise
    types     of the blocks of gate and up, and of down; (): the matrices are packed
    one_form  as of `in_one_form`
    """
    if not types:
        dtype, fill = machine.dtype, -width % LANES
        gate, up = (normal(rng, count, width, hidden, scale=hidden**-0.5, dtype=dtype) for _ in range(2))
        down = normal(rng, count, hidden, width, scale=width**-0.5, dtype=dtype)
        firsts = gate if plain else [gate_in_turn(*pair) for pair in zip(gate, up, strict=True)]
        gate_up = np.stack([pack(matrix) for matrix in firsts])
        packed = np.stack([pack(np.pad(matrix, ((0, 0), (0, fill)))) for matrix in down])
        return [gate, up, down], {"gate_up": gate_up, "down": packed}
    compiled, matrices, given = kernels.load(), [], {}
    assert compiled is not None
    for kind, name, outputs, inputs in zip(
        types, ("gate_up", "down"), (width if plain else 2 * width, hidden), (hidden, width), strict=True
    ):
        rows = stored_bytes(kind, count * outputs, inputs, inputs)
        blocks = compiled.pack_blocks(
            [StoredRows(kind, rows)], inputs, gated=name == "gate_up" and not plain, experts=count
        )
        blocks = compiled.in_one_form(blocks) if one_form else blocks
        machine.keep(blocks)
        given[f"{name}_blocks"] = blocks.table
        matrices.append(dequantized(kind, rows).numpy().reshape(count, outputs, inputs))
    gate, up = 2 * matrices[:1] if plain else np.split(matrices[0], 2, 1)
    return [gate, up, matrices[1]], given


def random_experts(
    rng: np.random.Generator,
    machine: Machine,
    hidden: int,
    width: int | None = None,
    types: Sequence[str] = (),
    one_form: bool = False,
) -> Experts:
    """width: None: any; types, one_form: as of `random_stacks`"""
    kinds = (Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED, Activation.RELU2)
    count, some, kind = int(rng.integers(2, 9)), int(rng.integers(1, 80)), kinds[rng.integers(len(kinds))]
    plain = bool(rng.integers(2)) and kind != Activation.CLAMPED
    chosen, normalised, biased = int(rng.integers(1, count + 1)), bool(rng.integers(2)), bool(rng.integers(2))
    dtype, width = machine.dtype, width or some
    router = normal(rng, count, hidden, scale=2 * hidden**-0.5, dtype=dtype)
    (gate, up, down), given = random_stacks(rng, machine, count, width, hidden, plain, types, one_form)
    inner = width if plain else 2 * width
    biases = [normal(rng, *shape, dtype=dtype) for shape in ((count,), (count, inner), (count, hidden))]
    fill = -width % LANES
    if biased:
        given |= {"gate_up_bias": biases[1], "down_bias": biases[2]}
    groups = int(rng.choice([n for n in range(1, count + 1) if count % n == 0 and count // n * n >= chosen]))
    least = -(-chosen // (count // groups))
    options = {
        "normalised": normalised, "score": "sigmoid" if rng.integers(2) else "softmax",
        "scale": float(rng.choice([1.0, 2.5])),
        "correction": normal(rng, count, scale=0.3) if rng.integers(2) else None, "groups": groups,
        "chosen_groups": int(rng.integers(least, groups + 1)), "group_best": int(rng.integers(1, 3)),
    }  # fmt: skip
    if options["correction"] is not None:
        given["correction"] = options["correction"]
        options |= {"corrects_logits": bool(rng.integers(2)), "least_sum": float(rng.choice([0.0, 0.4]))}
    elif groups == 1 and not rng.integers(3):
        options |= {"score": "sparsemixer", "tolerance": float(rng.choice([0.0, 0.02, 0.9]))}
    call = ExpertsCall(
        **machine.fields(**given), experts=count, chosen=chosen, width=width + fill, bias_width=width,
        normalised=normalised, score=SCORES[options["score"]], scale=options["scale"], groups=groups,
        **{key: options[key] for key in ("corrects_logits", "least_sum", "tolerance") if key in options},
        chosen_groups=options["chosen_groups"], group_best=options["group_best"], is_plain=plain,
    )  # fmt: skip
    fields = machine.fields(weight=pack(router), bias=biases[0] if biased else None, activation=kind, call=call)

    def oracle(x):
        parts = (router, gate, up, down, biases[0], biases[1].reshape(count, -1, width), biases[2])
        wide = [part.astype(np.float64) for part in parts]
        logits = x @ wide[0].T + biased * wide[4]
        out = np.zeros_like(x)
        for row, of_row in enumerate(logits):
            best, weights = route(of_row, chosen, **options)
            for expert, share in zip(best, weights[best], strict=True):
                halves = [
                    wide[1 + half][expert] @ x[row] + biased * wide[5][expert, half]
                    for half in range(1 if plain else 2)
                ]
                inside = gated(kind, *halves) if len(halves) > 1 else gated(kind, halves[0], np.ones(width))
                out[row] += share * (wide[3][expert] @ inside + biased * wide[6][expert])
        return out

    return Experts(call, fields, router, biases[0] if biased else None, oracle)


def random_layers(rng: np.random.Generator, machine: Machine, runs: Runs, reads: np.ndarray | None) -> RandomLayers:
    """A program of layers with a mixer and experts each. The last layer computes the rows that are read."""
    rows = runs.rows if runs.gather is None else len(runs.gather)
    # Some experts are in blocks, whose rows are whole ones.
    types = rng.choice(["Q8_0", "Q4_1", "MXFP4", "BF16"], 2).tolist() if not rng.integers(3) else []
    hidden = 32 * int(rng.integers(1, 4)) if types else 2 * int(rng.integers(4, 40))
    start = normal(rng, rows, hidden, dtype=machine.dtype)
    x, h, delta, gate = machine.buffer(start), *(machine.buffer(rows, width) for width in (hidden, hidden, 1))
    mixers = [random_mixer(rng, machine, runs.states) for _ in range(int(rng.integers(1, 4)))]
    parts = list[tuple]()
    for plane, mixer in enumerate(mixers):
        inner, outer = machine.buffer(rows, mixer.width), machine.buffer(rows, mixer.out)
        matrices = [
            normal(rng, outputs, inputs, scale=inputs**-0.5, dtype=machine.dtype)
            for inputs, outputs in ((hidden, mixer.width), (mixer.out, hidden), (hidden, 1))
        ]
        norms = [normal(rng, hidden, dtype=machine.dtype) for _ in range(2)]
        experts = random_experts(rng, machine, hidden, 32 if types else None, types)
        norm = {"source": x, "out": h, "beside": -1, "columns": hidden, "eps": 1e-5}
        machine.add(Kind.NORM, weight=norms[0], **norm)
        machine.linear(h, inner, matrices[0])
        is_last = plane == len(mixers) - 1 and reads is not None
        picks_itself = is_last and bool(rng.integers(2))
        if is_last and not picks_itself:
            machine.add(Kind.PICK, source=x, beside=1)
        machine.add(mixer.kind, source=inner, out=outer, call=mixer.call, plane=plane, beside=picks_itself)
        if picks_itself:
            machine.add(Kind.PICK, source=x, beside=1)
        machine.linear(outer, delta, matrices[1])
        machine.add(Kind.ADD, source=x, beside=delta, eps=1)
        machine.add(Kind.NORM, weight=norms[1], **norm)
        machine.add(Kind.EXPERTS, source=h, beside=h, out=delta, **experts.fields)
        machine.linear(h, gate, matrices[2])
        machine.add(Kind.GATE, source=delta, beside=gate, heads=1, dim=hidden, columns=1)
        machine.add(Kind.ADD, source=x, beside=delta, eps=1)
        parts.append((mixer, matrices, norms, experts))
    fields = runs.fields(machine, mixers)
    if reads is not None:
        fields |= {"read": reads, "picked": len(reads)}
    return RandomLayers(machine, runs, reads, start, mixers, parts, fields)


@dataclass(frozen=True)
class RandomLayers:
    """What `random_layers` has made."""

    machine: Machine
    runs: Runs
    reads: np.ndarray | None
    start: np.ndarray
    mixers: list[Mixer]
    parts: list[tuple]
    fields: dict

    def run(self, threads: int) -> list[np.ndarray]:
        """The residual stream of the rows that are read, and the states that are stored."""
        x = self.machine.buffers[0]
        x[:] = self.start
        self.machine.run(len(x), threads, **self.fields)
        picked = len(x) if self.reads is None else len(self.reads)
        return [x[:picked].copy(), *(part for mixer in self.mixers for part in mixer.stored(self.runs))]

    def expected(self) -> np.ndarray:
        """The residual stream in float64."""
        x = self.start.astype(np.float64)
        for mixer, matrices, norms, experts in self.parts:
            first, last, gate = (matrix.astype(np.float64) for matrix in matrices)
            x = x + mixer.scan(self.runs, rms_norm(x, norms[0], 1e-5) @ first.T)[0] @ last.T
            h = rms_norm(x, norms[1], 1e-5)
            x = x + experts.oracle(h) * sigmoid(h @ gate.T)
        return x if self.reads is None else x[self.reads]
