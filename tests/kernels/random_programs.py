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
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))
from blocks import stored_bytes
from programs import Machine, random_layers, random_runs

from prefold import kernels
from prefold.engine.schedule.steps import SlotStep, StreamStep
from prefold.kernels import BLOCK_TYPES, PanelPool, StoredRows, loader
from prefold.model import Adapter, CausalLM, ModelConfig
from prefold.model.config import Plane, RopeConfig
from prefold.model.layers import Linear
from prefold.model.lora import Delta, Part
from prefold.model.products import Panels
from prefold.trie import PrefixMap
from prefold.worker.attention import KVStore, RowAttention
from prefold.worker.program import Program, program_of
from prefold.worker.rows import Path as RowPath
from prefold.worker.rows import heads_of, prepare
from prefold.worker.slots import make_store, prepare_slots


def random_model(rng: np.random.Generator) -> CausalLM:
    kv_heads, dim = int(rng.integers(1, 4)), 2 * int(rng.integers(2, 40))
    layers, learned, plain = int(rng.integers(1, 4)), bool(rng.integers(2)), bool(rng.integers(2))
    kind = str(rng.choice(["", "", "sum_norms", "parallel", "row_qk_norm", "residual_scale"]))
    out_norms = kind not in ("sum_norms", "parallel") and bool(rng.integers(2))
    norm = str(rng.choice(["rms", "layer"]))
    kinds = {kind: 0.4 if kind == "residual_scale" else True} if kind else {}
    config = ModelConfig(
        vocab_size=int(rng.integers(40, 300)), hidden=2 * int(rng.integers(8, 90)), layers=layers,
        heads=kv_heads * int(rng.integers(1, 4)), kv_heads=kv_heads, head_dim=dim,
        intermediate=int(rng.integers(1, 9)) * 16 + 2 * plain * int(rng.integers(8)), norm_eps=1e-5,
        rope=None if learned else RopeConfig(theta=1e4), max_positions=400,
        planes=tuple(Plane(window) for window in rng.choice([None, 5, 40], layers)),
        norm=norm, mlp="plain" if plain else "gated",
        activation=str(rng.choice(["silu", "gelu_tanh"])), norm_bias=bool(rng.integers(2)),
        qk_norm=not learned and kind != "row_qk_norm" and bool(rng.integers(2)), out_norms=out_norms,
        in_norms=not out_norms or bool(rng.integers(2)), attention_cap=rng.choice([None, 2.0]),
        norm_offset=float(norm == "rms" and rng.integers(2)),
        qkv_bias=bool(rng.integers(2)), o_bias=bool(rng.integers(2)), mlp_bias=bool(rng.integers(2)),
        tie_embeddings=True, kv_dtype=rng.choice([None, "bfloat16"]), **kinds,
    )  # fmt: skip
    dtype = torch.bfloat16 if rng.integers(2) else torch.float32
    model = CausalLM(config, dtype=dtype, device=torch.device("cpu")).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(random_numbers(rng, *parameter.shape))
    compiled = loader.load()
    in_int8 = compiled.has_int8 and not rng.integers(4)
    for module in model.modules():
        if isinstance(module, Linear):
            quantised = None
            if in_int8 and module.panels is not None and module.weight is not None and rng.integers(4):
                quantised = module.in_int8(compiled, PanelPool())
            module.pack()
            if quantised is not None:
                module.product = quantised
            elif not rng.integers(4) and compiled.has_blocks("Q8_0", module.inputs):
                kind = str(rng.choice([name for name in BLOCK_TYPES if compiled.has_blocks(name, module.inputs)]))
                stored = stored_bytes(kind, module.outputs, module.inputs, int(rng.integers(99)))
                gated = len(stored) // 2  # of gate and up, which lie in turn
                module.use_stored(
                    [StoredRows(kind, part) for part in (stored[:gated], stored[gated:])], compiled, PanelPool()
                )
    model.head_product = Panels(model.embedding, compiled)
    return model


def random_numbers(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32)) / shape[-1] ** 0.5


def random_adapter(rng: np.random.Generator, model: CausalLM) -> Adapter:
    def delta(linear: Linear) -> Delta:
        ends = np.sort(rng.integers(0, linear.outputs + 1, 2)).tolist()
        ranks = [int(rng.integers(1, 40)) for _ in range(3)]
        a = random_numbers(rng, sum(ranks), linear.inputs).to(model.dtype)
        parts, first = [], 0
        for rank, start, stop in zip(ranks, [0, *ends], [*ends, linear.outputs], strict=True):
            b = random_numbers(rng, stop - start, rank).to(model.dtype)
            parts.append(Part(slice(first, first + rank), slice(start, stop), b))
            first += rank
        return Delta(a, tuple(parts))

    layers = []
    for layer in model.layers:
        named = {name.rpartition(".")[2]: part for name, part in layer.named_modules() if isinstance(part, Linear)}
        layers.append({name: delta(linear) for name, linear in named.items() if rng.integers(4)})
    return Adapter("", tuple(layers))


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


def over_slots(program: Program, model: CausalLM, store: KVStore, steps: list[SlotStep], adapters) -> list[Tensor]:
    found: list[Tensor] = []
    for number, step in enumerate(steps):
        batch = program.follow(step) if number > 1 else None  # each step of outputs follows on the one before
        if batch is None:
            batch = prepare_slots(step, store, model.config.planes, adapters)
        found += [program.over_slots(batch, store), torch.from_numpy(program.greedy(batch, store))]
    return found


def over_rows(program: Program, model: CausalLM, seed: int, adapters: list[Adapter]) -> list[Tensor]:
    """Two steps of a stream of one prompt, the second of which reads some rows."""
    rng = np.random.default_rng(seed)
    attention, path, found, before = RowAttention(heads_of(model), model.device), RowPath(), [], 0
    for rows in rng.integers(1, 60, 2).tolist():
        end, stop = np.full(before + rows, before + rows), before + rows
        tokens, keys = rng.integers(0, model.config.vocab_size, rows).astype(np.int32), np.arange(stop, dtype=np.int32)
        read = np.flatnonzero(rng.integers(0, 2, rows)) if before else None
        step = StreamStep(tokens, keys[before:], before, end, keys, np.arange(stop), read_rows=read)
        if rng.integers(2):
            step = replace(step, adapter=0)
        batch = prepare(step, model.config.planes, attention, adapters)
        hidden, kv = program.over_rows(batch, path)
        path, before = RowPath(kv), stop
        found += [hidden, *(tensor for pair in kv.values() for tensor in pair)]
    return [*found, *folded_rows(program, model, rng)]


def folded_rows(program: Program, model: CausalLM, rng: np.random.Generator) -> list[Tensor]:
    """Prompts that begin alike, whose tokens are folded; some rows are read, or all."""
    sizes = rng.integers(1, 20, int(rng.integers(1, 9)))
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
    batch = prepare(step, model.config.planes, RowAttention(heads_of(model), model.device))
    hidden, kv = program.over_rows(batch, RowPath())
    return [hidden, *(tensor for pair in kv.values() for tensor in pair)]


def run_all(
    program: Program, model: CausalLM, store: KVStore, steps: list[SlotStep], adapters: dict[str, Adapter], seed: int
) -> list[Tensor]:
    with torch.inference_mode():
        found = over_slots(program, model, store, steps, adapters)
        return found + over_rows(program, model, seed, list(adapters.values()))


def run_layers(rng: np.random.Generator) -> Callable[[], list[Tensor]]:
    """Returns a function that runs a step of random layers of mixers and experts."""
    runs = random_runs(rng, 5, bool(rng.integers(2)))
    rows = runs.rows if runs.gather is None else len(runs.gather)
    reads = np.flatnonzero(rng.integers(0, 2, rows)) if rng.integers(2) else None
    layers = random_layers(rng, Machine(kernels.BFLOAT16 if rng.integers(2) else kernels.FLOAT32), runs, reads)
    return lambda: [torch.from_numpy(array.astype(np.float32)) for array in layers.run(kernels.threads())]


def run_model(rng: np.random.Generator) -> Callable[[], list[Tensor]]:
    """Returns a function that runs steps of a random model."""
    model = random_model(rng)
    program = program_of(model)
    assert program is not None
    adapters = {str(number): random_adapter(rng, model) for number in range(3)}
    store = make_store(model, 2000)
    steps = slot_steps(rng, model.config.vocab_size, 2000, len(adapters))
    return partial(run_all, program, model, store, steps, adapters, int(rng.integers(99)))


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
    # Products by the library, also where it would leave them to PyTorch.
    from prefold.model import products

    products.product_kernels = lambda weight: loader.load()
    rng, runs, digest = np.random.default_rng(seed), [], hashlib.sha256()
    for make in [run_model, run_layers] * models:
        run = make(rng)
        kernels.set_threads(1)
        expected = run()
        assert all(tensor.isfinite().all() for tensor in expected)
        for tensor in expected:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
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


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def check_forked(run: Callable[[], list[Tensor]], expected: list[Tensor]) -> None:
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
