"""Times RadixMLP's synthetic grid, a shared prefix and unique suffixes, in three modes, beside the theoretical caps.

    python benchmarks/grid.py [--model qwen3-0.6b] [--layers 4] [--batch 32] [--threshold 0.85] [--json FILE]

Weights are random, of a real model's shapes, cut to a few layers so that a CPU gets through. The cap of a mode is the
ratio of the FLOPs of plain varlen batching (linears on rows plus attention over visible pairs) to those of the mode.
With --threshold a fourth mode is auto with this sharing threshold: how long it takes, over the better of full and off.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from common import attention_flops, machine, median, run_engine, table, timed, visible_pairs, write_json

from prefold.checkpoint import Checkpoint, resolve
from prefold.engine import EngineOptions, ModelEngine
from prefold.model import load_model
from prefold.prefix import Trie
from prefold.types import Readout, Request
from prefold.worker.local import LocalWorker


def flops(config, rows: int, pairs: int) -> float:
    return rows * config.linear_flops + len(config.planes) * attention_flops(config, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prefixes", default="0,256,512,1024,2048")
    parser.add_argument("--suffixes", default="32,128,512")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-batch-rows", type=int, default=1 << 17, help="by default all prompts are one batch")
    parser.add_argument("--threshold", type=float, help="a sharing threshold that is timed too")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    config = resolve(arguments.model, load_format="dummy").config
    checkpoint = Checkpoint.dummy(config | {"num_hidden_layers": arguments.layers}, name=arguments.model)
    model = load_model(checkpoint, dtype=getattr(torch, arguments.dtype), device="cpu")
    rng, vocabulary = np.random.default_rng(0), min(100_000, model.config.vocab_size)
    print(machine(), f"{arguments.model}, {arguments.layers} layers, {arguments.dtype}, batch {arguments.batch}")
    rows, record = [], []
    for prefix in map(int, arguments.prefixes.split(",")):
        for suffix in map(int, arguments.suffixes.split(",")):
            shared = rng.integers(0, vocabulary, prefix)
            prompts = [
                np.concatenate((shared, rng.integers(0, vocabulary, suffix))).astype(np.int32)
                for _ in range(arguments.batch)
            ]
            seconds: dict[str, list[float]] = {"off": [], "mlp": [], "full": []}
            if arguments.threshold:
                seconds["auto"] = []
            engines = {}  # one for all rounds: with a threshold it learns from one to the next
            for mode in seconds:
                # Mean pooling: every row of the last layer is computed, as the published grid does.
                options = {"sharing": "full", "sharing_threshold": arguments.threshold}
                options = (options if mode == "auto" else {"sharing": mode}) | {
                    "max_batch_rows": arguments.max_batch_rows
                }
                engines[mode] = ModelEngine(LocalWorker(model), EngineOptions(**options))
            for number in range(arguments.repeats):
                for mode, values in list(seconds.items())[:: 1 if number % 2 else -1]:
                    requests = [Request(p) for p in prompts]
                    values += timed(lambda e=engines[mode], r=requests: run_engine(e, r, Readout("mean")), 1)
            flat, offsets = np.concatenate(prompts), np.cumsum([0, *map(len, prompts)])
            full, off = Trie.build(flat, offsets), Trie.build(flat, offsets, share=False)
            pairs = {"off": visible_pairs(off.end), "mlp": visible_pairs(off.end), "full": visible_pairs(full.end)}
            count = {"off": off.num_rows, "mlp": full.num_rows, "full": full.num_rows}
            base = flops(model.config, count["off"], pairs["off"])
            caps = {mode: base / flops(model.config, count[mode], pairs[mode]) for mode in count}
            times = {mode: median(values) for mode, values in seconds.items()}
            # Ratios within a round: the machine's speed drifts from one to the next.
            gains = {m: median([o / s for o, s in zip(seconds["off"], v, strict=True)]) for m, v in seconds.items()}
            rows.append(
                [
                    prefix,
                    suffix,
                    *(f"{times[m]:.2f}" for m in ("off", "mlp", "full")),
                    f"{gains['mlp']:.2f} / {caps['mlp']:.2f}",
                    f"{gains['full']:.2f} / {caps['full']:.2f}",
                    f"{gains['full'] / caps['full']:.0%}",
                ]
            )
            if arguments.threshold:
                better = "full" if times["full"] < times["off"] else "off"
                over = median([a / b for a, b in zip(seconds["auto"], seconds[better], strict=True)])
                rows[-1] += [f"{count['full'] / count['off']:.2f}", f"{over:.3f} of {better}"]
            record.append({"prefix": prefix, "suffix": suffix, "seconds": seconds, "caps": caps})
            print("  ", *rows[-1], flush=True)
    head = ["prefix", "suffix", "off s", "mlp s", "full s", "mlp gain / cap", "full gain / cap", "of cap"]
    if arguments.threshold:
        head += ["unique share", f"auto, {arguments.threshold}"]
    print(table(head, rows))
    write_json(arguments.json, grid=record)


if __name__ == "__main__":
    main()
