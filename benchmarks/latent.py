"""Time latent attention (MLA), which stores a latent of each row, and attention that stores all keys and values.

    python benchmarks/latent.py --layers 2 --context 4096 --json FILE

Both models have the attention of GLM-4.7-Flash: 20 heads, whose keys and values have 256 numbers each. One model makes
keys and values from latents of 512 numbers, and stores the latent and 64 rotated numbers. The other model stores all
keys and values. Weights and stored keys are random. The MLPs are dense and small.

Decoding: a step over slots computes one token for each sequence. Each sequence has `--context` keys before the token:
its own keys, or the keys of one prompt that all sequences share.

Prompts: `--rows` rows behind `--context` keys are computed in three ways:

- over slots, as the planner chooses;
- over slots with absorbed queries only;
- in a stream of rows, which expands all keys and values.

The number of rows at which the last two take the same time is the break-even. The costs in
prefold/kernels/src/latent_plan.cpp are chosen so that the planner changes the form there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from harness import NUMBERS, benchmark, compared, median, take_turns

from prefold.checkpoint import Checkpoint
from prefold.engine.schedule.steps import SlotStep, StreamStep
from prefold.model import config_from
from prefold.model.config import ModelConfig
from prefold.worker.attention.slot_plan import plan_slots, runs_of
from prefold.worker.native.load import load_native
from prefold.worker.native.program import NativeProgram
from prefold.worker.native.steps import NativePath, PathKV, SlotBatch, prepare_slots, prepare_stream
from prefold.worker.native.store import NativeStore, layouts_of

SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 20,
    "num_key_value_heads": 20, "max_position_embeddings": 1 << 18, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
LATENT = {"architectures": ["Glm4MoeLiteForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64}
LATENT |= {"qk_nope_head_dim": 192, "v_head_dim": 256}
EXPANDED = {"architectures": ["LlamaForCausalLM"], "head_dim": 256}
GLM_LAYERS = 47


class Model:
    """A model with random weights, and a store of random keys."""

    def __init__(self, config: ModelConfig, dtype: str, slots: int):
        self.model = load_native(Checkpoint.dummy({}), config, dtype=dtype)
        self.program, self.config = NativeProgram(self.model), replace(config, invariant=False)
        self.store = NativeStore(layouts_of(self.model.kernels, config, self.model.dtype), slots, self.model.kernels)
        self.row_bytes = config.kv_numbers * self.model.dtype.itemsize
        rng = np.random.default_rng(0)
        for first in range(1, slots - 1, 4096):  # steps without a context write keys there
            at = np.arange(first, min(slots - 1, first + 4096))
            self.run(batch_of(self.config, rng, at, np.zeros(len(at)), []))

    def run(self, batch: SlotBatch) -> None:
        """Run a step over slots."""
        self.program.over_slots(batch, self.store)

    def path(self, rows: int) -> NativePath:
        """Return a path with random keys."""
        rng, kv = np.random.default_rng(1), list[tuple[np.ndarray, np.ndarray | None]]()
        for plane in range(len(self.config.planes)):
            sizes = self.config.kv_sizes(plane)
            keys = rng.standard_normal((rows, sizes.heads, sizes.dim), np.float32).astype(self.model.dtype)
            kv.append((keys, None if sizes.in_keys else keys[..., : sizes.value_dim].copy()))
        planes: PathKV = kv
        return NativePath(rows, planes)


def batch_of(
    config: ModelConfig,
    rng: np.random.Generator,
    slots: np.ndarray,
    positions: np.ndarray,
    runs: list[tuple[int, int, int, int]],
    own: np.ndarray | None = None,
    *,
    expands: bool = True,
) -> SlotBatch:
    """Return a step. Its rows see runs of slots, and rows of the step itself.

    Args:
        runs: (first slot, number of slots, first query that sees the run, first later query that does not).
        own: For each row, the first later query that does not see it; None: each row sees only itself.
        expands: Whether queries of latent attention may be expanded.
    """
    rows = np.arange(len(slots))
    starts, counts, first, last = (
        (np.array(part, np.int64) for part in zip(*runs, strict=True)) if runs else [rows[:0]] * 4
    )
    every = (
        np.append(starts, slots), np.append(counts, np.ones_like(slots)),
        np.append(np.zeros_like(starts), positions.astype(np.int64)), np.append(first, rows),
        np.append(last, rows + 1 if own is None else own),
    )  # fmt: skip
    tokens = rng.integers(0, config.vocab_size, len(slots)).astype(np.int32)
    step = SlotStep(tokens, positions.astype(np.int32), slots.astype(np.int64), *every, rows, rows)
    batch = prepare_slots(step, config)
    if expands:
        return batch
    plans = {None: plan_slots(runs_of(step)[0], len(rows), group=config.group_of[None])}
    return replace(batch, plans=plans, read_plans=plans)


def decoding(config: ModelConfig, sequences: int, context: int, shared: bool) -> SlotBatch:
    """Return a decode step."""
    rng, each = np.random.default_rng(sequences), context + 1
    if shared:
        slots, runs = 1 + context + np.arange(sequences), [(1, context, 0, sequences)]
    else:
        slots = each * np.arange(1, sequences + 1)
        runs = [(1 + each * number, context, number, number + 1) for number in range(sequences)]
    return batch_of(config, rng, slots, np.full(sequences, context), runs)


def prompt(config: ModelConfig, rows: int, context: int, *, expands: bool = True) -> SlotBatch:
    """Return a step with the rows of one prompt after a context. expands: see `batch_of`"""
    slots = 1 + context + np.arange(rows)
    runs, own = [(1, context, 0, rows)], np.full(rows, rows)
    rng, positions = np.random.default_rng(rows), context + np.arange(rows)
    return batch_of(config, rng, slots, positions, runs, own, expands=expands)


def stream_seconds(model: Model, rows: int, context: int) -> Any:
    """Return a function that runs the rows of `prompt` in a stream of rows."""
    rng, keys = np.random.default_rng(rows), np.arange(context + rows, dtype=np.int32)
    tokens = rng.integers(0, model.config.vocab_size, rows).astype(np.int32)
    step = StreamStep(tokens, keys[context:], context, np.full(len(keys), len(keys)), keys)
    return partial(model.program.over_rows, prepare_stream(step, model.config), model.path(context))


@benchmark("layers", "dtype", "repeats", layers=2, dtype="float32")
@click.option("--context", type=int, default=4096, show_default=True, help="Keys before the rows of a step.")
@click.option("--sequences", type=NUMBERS, default="1,32", show_default=True, help="Numbers of sequences that decode.")
@click.option(
    "--rows", type=NUMBERS, default="64,128,256,512,1024,2048", show_default=True, help="Lengths of prompts in rows."
)
def main(options: SimpleNamespace) -> dict[str, Any]:
    slots = (options.context + 1) * max(options.sequences) + max(options.rows) + 2
    sizes = SIZES | {"num_hidden_layers": options.layers}
    kinds = {"latent": LATENT | {"mlp_layer_types": ["dense"] * options.layers}, "expanded": EXPANDED}
    models = {name: Model(config_from(sizes | kind), options.dtype, slots) for name, kind in kinds.items()}
    row_bytes = {name: model.row_bytes for name, model in models.items()}
    all_layers = {name: size * GLM_LAYERS // options.layers for name, size in row_bytes.items()}
    print(f"Bytes of a row in the store: {row_bytes}; in {GLM_LAYERS} layers: {all_layers}\n")
    cases: list[dict[str, Any]] = []
    for shared in (False, True):
        for count in options.sequences:
            steps = {name: decoding(one.config, count, options.context, shared) for name, one in models.items()}
            calls = {name: partial(models[name].run, step) for name, step in steps.items()}
            seconds = take_turns(calls, options.repeats).seconds
            what = "one context" if shared else "a context each"
            print(f"\nDecoding, {count} sequences, {what}\n\n{compared(seconds, unit='ms')}\n", flush=True)
            cases.append({"case": "decode", "sequences": count, "shared": shared, "seconds": seconds})
    latent = models["latent"]
    for rows in options.rows:
        calls = {
            "over slots": partial(latent.run, prompt(latent.config, rows, options.context)),
            "absorbed": partial(latent.run, prompt(latent.config, rows, options.context, expands=False)),
            "in a stream": stream_seconds(latent, rows, options.context),
        }
        seconds = take_turns(calls, options.repeats).seconds
        ratios = {name: median(seconds[name]) / median(seconds["in a stream"]) for name in ("over slots", "absorbed")}
        print(
            f"\nA prompt of {rows} rows: over slots takes {ratios['over slots']:.2f} times, and absorbed "
            f"{ratios['absorbed']:.2f} times, as long as in a stream\n",
            flush=True,
        )
        cases.append({"case": "prompt", "rows": rows, "seconds": seconds, "ratios": ratios})
    return {"layers": options.layers, "context": options.context, "row_bytes": row_bytes, "cases": cases}


if __name__ == "__main__":
    main()
