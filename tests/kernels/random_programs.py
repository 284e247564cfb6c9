"""Runs programs of random models on random steps with a compiled library: a process of its own for test_sanitizers.py.

    python random_programs.py LIBRARY SEED MODELS [refused | forked]

Beside each dense model there are layers of mixers and experts, as `programs.random_layers` makes them.
Each step runs on one thread and on several, from several threads of Python at once, and gives the same bits every time.
A digest of all results is printed. refused: the system refuses AMX's tiles to the process; forked: each program also
runs in a process that was forked from this one, and here again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))
from blocks import stored_bytes
from programs import Machine, random_layers, random_runs

from prefold import kernels
from prefold.checkpoint import Checkpoint
from prefold.checkpoint.settings import Settings
from prefold.engine.schedule.steps import SlotStep, StreamStep
from prefold.kernels import BLOCK_TYPES, LANES, StoredRows, loader
from prefold.model import ModelConfig
from prefold.model.adapters import AdapterArrays, LinearAdapter
from prefold.model.config import HeadNorm, Plane, RopeConfig
from prefold.model.program import Linear
from prefold.trie import PrefixMap
from prefold.worker.native.load import load_native
from prefold.worker.native.model import NativeModel, in_turn
from prefold.worker.native.program import NativeProgram
from prefold.worker.native.steps import NativePath, prepare_slots, prepare_stream
from prefold.worker.native.store import NativeStore, layouts_of

SLOTS = 2000


def random_model(rng: np.random.Generator) -> NativeModel:
    kv_heads, dim = int(rng.integers(1, 4)), 2 * int(rng.integers(2, 40))
    layers, learned, plain = int(rng.integers(1, 4)), bool(rng.integers(2)), bool(rng.integers(2))
    kind = str(rng.choice(["", "", "sum_norms", "parallel", "row_qk_norm", "residual_scale"]))
    out_norms = kind not in ("sum_norms", "parallel") and bool(rng.integers(2))
    norm = str(rng.choice(["rms", "layer"]))
    kinds = {kind: 0.4 if kind == "residual_scale" else True} if kind else {}
    weights = str(rng.choice(["shared", "each", "apart", "none"]))
    head_norm = HeadNorm(str(rng.choice(["rms", "layer"])), weights, weights != "none", bool(rng.integers(2)))
    norm_weight = bool(rng.integers(4))
    config = ModelConfig(
        vocab_size=int(rng.integers(40, 300)), hidden=2 * int(rng.integers(8, 90)), layers=layers,
        heads=kv_heads * int(rng.integers(1, 4)), kv_heads=kv_heads, head_dim=dim,
        intermediate=int(rng.integers(1, 9)) * 16 + 2 * int(rng.integers(8)), norm_eps=1e-5,
        rope=None if learned else RopeConfig(theta=1e4), max_positions=400,
        planes=tuple(Plane(window) for window in rng.choice([None, 5, 40], layers)),
        norm=norm, mlp="plain" if plain else "gated",
        activation=str(rng.choice(["silu", "gelu_tanh", "gelu", "relu", "relu2", *(["xielu"] if plain else [])])),
        gate_scale=float(rng.choice([1.0, 0.7])), head_gates=[False, True, "numbers"][int(rng.integers(3))],
        norm_bias=bool(rng.integers(2)), norm_weight=norm_weight, embedding_norm=not rng.integers(4),
        inner_norms=not rng.integers(4), mlp_norm=bool(rng.integers(2)), first_position=int(rng.integers(3)),
        query_growth=None if rng.integers(4) else (0.3, int(rng.integers(1, 60))),
        qk_norm=kind != "row_qk_norm" and [False, not learned, head_norm][int(rng.integers(3))], out_norms=out_norms,
        in_norms=not out_norms or bool(rng.integers(2)), attention_cap=rng.choice([None, 2.0]),
        norm_offset=float(rng.integers(2)),
        qkv_bias=bool(rng.integers(2)), o_bias=bool(rng.integers(2)), mlp_bias=bool(rng.integers(2)),
        tie_embeddings=True, kv_dtype=rng.choice([None, "bfloat16"]), **kinds,
    )  # fmt: skip
    dtype = "bfloat16" if rng.integers(2) else "float32"
    checkpoint = Checkpoint("random", None, "dummy", Settings.of({}))
    model = load_native(checkpoint, config, dtype=dtype, seed=int(rng.integers(99)))
    in_int8 = model.kernels.has_int8 and not rng.integers(4)
    for linear in linears_of(model):
        held = in_blocks(rng, model, linear) if not rng.integers(4) else None
        if in_int8 and rng.integers(4):
            held = random_int8(rng, model, linear)
        if held is not None:
            model.memory.matrices[linear.weight] = held
    return model


def linears_of(model: NativeModel) -> list[Linear]:
    return [operation for operation in model.program.operations if isinstance(operation, Linear)]


def in_blocks(rng: np.random.Generator, model: NativeModel, linear: Linear) -> kernels.Blocks | None:
    """Random blocks in the place of a linear's matrix; None: they do not fit."""
    outputs, inputs = linear.weight.rows, model.widths[linear.source]
    kinds = [name for name in BLOCK_TYPES if model.kernels.has_blocks(name, inputs)]
    if not kinds or inputs != linear.weight.inputs[0] or (linear.gated and outputs % (2 * LANES)):
        return None
    kind = str(rng.choice(kinds))
    stored = stored_bytes(kind, outputs, inputs, int(rng.integers(99)))
    parts = [stored]
    if linear.gated:  # gate and up lie in turn
        halves = stored[: outputs // 2], stored[outputs // 2 :]
        parts = [half[at : at + LANES] for at in range(0, outputs // 2, LANES) for half in halves]
    return model.kernels.pack_blocks([StoredRows(kind, part) for part in parts], inputs)


def random_int8(rng: np.random.Generator, model: NativeModel, linear: Linear) -> kernels.Blocks:
    outputs, (inputs,) = linear.weight.rows, linear.weight.inputs
    values = random_numbers(rng, outputs, inputs)
    fill = model.widths[linear.source] - inputs
    return model.kernels.pack_int8(np.pad(in_turn(values) if linear.gated else values, ((0, 0), (0, fill))))


def random_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5).astype(np.float32)


def random_adapter(rng: np.random.Generator, model: NativeModel) -> AdapterArrays:
    def added(linear: Linear) -> LinearAdapter:
        outputs, (inputs,) = linear.weight.rows, linear.weight.inputs
        ends = np.sort(rng.integers(0, outputs + 1, 2)).tolist()
        parts = []
        for start, stop in zip([0, *ends], [*ends, outputs], strict=True):
            rank = int(rng.integers(1, 40))
            a, b = random_numbers(rng, rank, inputs), random_numbers(rng, stop - start, rank)
            parts.append((a, b, slice(start, stop)))
        return LinearAdapter.joined(parts)

    layers = []
    for layer in model.program.layers:
        linears = [one for one in layer if isinstance(one, Linear) and one.name]
        layers.append({linear.name: added(linear) for linear in linears if rng.integers(4)})
    return AdapterArrays("", tuple(layers))


def slot_steps(rng: np.random.Generator, vocab: int, slots: int, adapters: int) -> list[SlotStep]:
    """A step that computes prompts, and some that add a row to each."""
    sizes = rng.integers(1, 30, int(rng.integers(1, 12))) if rng.integers(2) else rng.integers(1, 3, 40)
    begins = np.cumsum([0, *sizes + 4])[:-1]
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    last = np.cumsum(sizes)
    of_prompt = rng.integers(-1, adapters, len(sizes))
    rows = np.arange(len(positions))
    at = begins[row_of] + positions
    read = rows if rng.integers(2) else last - 1

    def step(positions, at, runs, read, of):
        tokens = rng.integers(0, vocab, len(at)).astype(np.int32)
        numbers = None if of.max() < 0 else of.astype(np.int64)
        return SlotStep(tokens, positions.astype(np.int32), at, *runs, read, np.arange(len(read)), adapters=numbers)

    steps = [step(positions, at, (at, np.ones_like(at), positions, rows, last[row_of]), read, of_prompt[row_of])]
    each = np.arange(len(sizes))
    for more in range(3):
        runs = begins, sizes + more + 1, np.zeros_like(begins), each, each + 1
        steps.append(step(sizes + more, begins + sizes + more, runs, each, of_prompt))
    assert int(begins[-1] + sizes[-1] + 4) < slots
    return steps


def over_slots(program: NativeProgram, store: NativeStore, steps: list[SlotStep]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    config = program.model.config
    for number, step in enumerate(steps):
        batch = program.follow(step) if number > 1 else None  # each step of outputs follows on the one before
        if batch is None:
            batch = prepare_slots(step, replace(config, invariant=False))
        found += [program.over_slots(batch, store), program.greedy(batch, store).copy()]
    return found


def over_rows(program: NativeProgram, seed: int) -> list[np.ndarray]:
    """Two steps of a stream of one prompt, the second of which reads some rows."""
    rng = np.random.default_rng(seed)
    model, path, found, before = program.model, NativePath(), [], 0
    for rows in rng.integers(1, 60, 2).tolist():
        end, stop = np.full(before + rows, before + rows), before + rows
        tokens, keys = rng.integers(0, model.config.vocab_size, rows).astype(np.int32), np.arange(stop, dtype=np.int32)
        read = np.flatnonzero(rng.integers(0, 2, rows)) if before else None
        step = StreamStep(tokens, keys[before:], before, end, keys, np.arange(stop), read_rows=read)
        if rng.integers(2):
            step = replace(step, adapter=0)
        hidden, kv = program.over_rows(prepare_stream(step, replace(model.config, invariant=False)), path)
        path, before = NativePath(len(kv[0][0]), kv), stop
        found += [hidden, kv]
    return [*found, *folded_rows(program, rng)]


def folded_rows(program: NativeProgram, rng: np.random.Generator) -> list[np.ndarray]:
    """Prompts that begin alike, whose tokens are folded; some rows are read, or all."""
    model, sizes = program.model, rng.integers(1, 20, int(rng.integers(1, 9)))
    begins, end = np.cumsum([0, *sizes]), np.repeat(np.cumsum(sizes), sizes)
    positions = (np.arange(len(end)) - np.repeat(begins[:-1], sizes)).astype(np.int32)
    alike = rng.integers(0, model.config.vocab_size, 20).astype(np.int32)[positions]
    tokens = np.where(positions < rng.integers(20), alike, rng.integers(0, model.config.vocab_size, len(end)))
    fold = PrefixMap.build(tokens, begins)
    read = np.flatnonzero(rng.integers(0, 2, len(fold.gather))) if rng.integers(2) else None
    step = StreamStep(
        tokens[fold.gather].astype(np.int32), positions[fold.gather], 0, end, positions, np.arange(len(end)),
        read_rows=read, fold=fold,
    )  # fmt: skip
    return [*program.over_rows(prepare_stream(step, replace(model.config, invariant=False)), NativePath())]


def run_all(program: NativeProgram, store: NativeStore, steps: list[SlotStep], seed: int) -> list[np.ndarray]:
    return over_slots(program, store, steps) + over_rows(program, seed)


def run_layers(rng: np.random.Generator) -> Callable[[], list[np.ndarray]]:
    """Returns a function that runs a step of random layers of mixers and experts."""
    runs = random_runs(rng, 5, bool(rng.integers(2)))
    rows = runs.rows if runs.gather is None else len(runs.gather)
    reads = np.flatnonzero(rng.integers(0, 2, rows)) if rng.integers(2) else None
    layers = random_layers(rng, Machine(kernels.BFLOAT16 if rng.integers(2) else kernels.FLOAT32), runs, reads)
    return lambda: layers.run(kernels.threads())


def run_model(rng: np.random.Generator) -> Callable[[], list[np.ndarray]]:
    """Returns a function that runs steps of a random model."""
    model = random_model(rng)
    adapters = [random_adapter(rng, model) for _ in range(3)]
    program = NativeProgram(model, adapters)
    store = NativeStore(layouts_of(model.kernels, model.config, model.dtype), SLOTS, model.kernels)
    steps = slot_steps(rng, model.config.vocab_size, SLOTS, len(adapters))
    return partial(run_all, program, store, steps, int(rng.integers(99)))


class SignalStack(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def refuse_tiles() -> ctypes.Array:
    """Returns a stack for signals, in use, that is too small for the registers of tiles: a process that has such a
    stack is given no tiles (https://docs.kernel.org/arch/x86/xstate.html)."""
    memory = ctypes.create_string_buffer(4096)
    stack = SignalStack(ctypes.addressof(memory), 0, len(memory))
    assert ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) == 0
    return memory


def has_tiles() -> bool:
    """Returns whether this process was given tiles (ARCH_GET_XCOMP_PERM of arch_prctl, XFEATURE_XTILEDATA)."""
    permitted = ctypes.c_uint64()
    return ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(permitted)) == 0 and bool(permitted.value >> 18 & 1)


def main(library: str, seed: int, models: int, mode: str = "") -> None:
    memory = refuse_tiles() if mode == "refused" else None
    loader.process.loaded = loader.LoadedKernels(loader.Kernels(Path(library)), "sanitized")
    rng, runs, digest = np.random.default_rng(seed), [], hashlib.sha256()
    for make in [run_model, run_layers] * models:
        run = make(rng)
        kernels.set_threads(1)
        expected = run()
        assert all(np.isfinite(array.astype(np.float32)).all() for array in expected)
        for array in expected:
            digest.update(array.tobytes())
        kernels.set_threads(int(rng.integers(2, 9)))
        runs.append((run, expected))
        check(run(), expected)
        caller = Thread(target=run)  # whose thread ends, and with it what the kernels keep for it
        caller.start()
        caller.join()
        if mode == "forked":
            check_forked(run, expected)
        check(run(), expected)
    with ThreadPoolExecutor(3) as pool:  # each model has buffers of its own
        for found, (_, expected) in zip(pool.map(lambda one: one[0](), runs), runs, strict=True):
            check(found, expected)
    if memory is not None:
        assert not has_tiles()
    print(digest.hexdigest())


def check(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True))


def check_forked(run: Callable[[], list[np.ndarray]], expected: list[np.ndarray]) -> None:
    child = os.fork()
    if not child:
        try:
            check(run(), expected)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
