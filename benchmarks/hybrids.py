"""Time row streams of hybrids with and without sharing, and count states and rows.

    python benchmarks/hybrids.py --shape qwen3.5 --layers 4 --cases shared,tree,short --decode 1,16,64 --json FILE

Weights are random, in the shape of Qwen3.5-0.8B or LFM2-350M with fewer layers and a small vocabulary. The last rows of
prompts are read. `full` and `off` take turns. The ratio is the median over the rounds of (time of `off` / time of
`full`). The table also has the ratio of their FLOPs (linears, attention and states). --decode times a step of sequences
that generate together.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from harness import NUMBERS, Listed, benchmark, clocked, compared, median, step_seconds, take_turns, timed

from prefold import LLM
from prefold.features.hybrid.layers import CHUNK
from prefold.features.hybrid.steps import StateFacts
from prefold.spec.requests import Readout, Request
from prefold.trie import Spool

VOCAB = 32_000
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
    },
}
# {case: (children of each node, tokens of each child) by level of the trie}
CASES = {
    "shared": [(1, 1000), (64, 100)],
    "tree": [(2, 500), (4, 200), (8, 50)],
    "short": [(1, 40), (64, 100)],
}


def checkpoint(folder: Path, shape: str, layers: int) -> str:
    """Write the config of a shape, and return its folder."""
    kinds = ("linear_attention",) if shape == "qwen3.5" else ("conv",)
    types = ["full_attention" if i % 4 == 3 else kinds[0] for i in range(layers)]
    sizes = {"num_hidden_layers": layers, "layer_types": types, "vocab_size": VOCAB, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | sizes))
    return str(folder)


def prompts(levels: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = [np.zeros(0, np.int32)]
    for number, tokens in levels:
        more = [rng.integers(100, VOCAB, tokens, dtype=np.int32) for _ in range(number * len(found))]
        found = [np.append(above, more.pop()) for above in found for _ in range(number)]
    return found


def flops(llm: LLM, levels: list[tuple[int, int]], sharing: str) -> float:
    """Return the FLOPs of linears, of attention's scores and sums, and of states in chunks."""
    config, per_layer = llm.config, 0
    if "value_heads" in config.sizes:
        keys, values = config.sizes["key_dim"], config.sizes["value_dim"]
        head = CHUNK * (4 * keys + keys + values + 2 * values) + 6 * keys * values
        per_layer = config.sizes["value_heads"] * head
    states = per_layer * (config.layers - len(config.planes))
    per_pair = 4 * config.q_size * len(config.planes)
    total, nodes, depth = 0.0, 1, 0
    leaves = np.prod([number for number, _ in levels])
    for number, tokens in levels:
        nodes *= number
        times = nodes if sharing == "full" else leaves
        pairs = tokens * depth + tokens * (tokens + 1) / 2
        total += float(times) * (tokens * (config.linear_flops + states) + per_pair * pairs)
        depth += tokens
    return total


def read_seconds(llm: LLM, texts: list[np.ndarray], sharing: str) -> float:
    """Return the seconds of one run that reads the last rows of all prompts."""
    with Spool() as spool:
        for number, text in enumerate(texts):
            spool.add(Request(text), str(number).encode())
        windows = list(spool.windows(max_tokens=1 << 24, share=sharing == "full"))
    seconds, done = clocked(lambda: sum(1 for _ in llm.engine.run(windows, Readout("last"), sharing=sharing)))
    assert done == len(texts)
    return seconds


def decode_seconds(llm: LLM, sequences: int, tokens: int) -> float:
    """Return the seconds of a decode step, after prompts of 8 tokens."""
    texts = np.random.default_rng(sequences).integers(100, VOCAB, (sequences, 8)).tolist()
    return step_seconds(lambda n: llm.generate(texts, max_tokens=n, ignore_eos=True, temperature=0), 1 + tokens)


def transformers_seconds(path: str, texts: list[np.ndarray]) -> list[float]:
    """Return the seconds of transformers for each prompt. It runs one prompt at a time, in float32."""
    import transformers

    settings = json.loads((Path(path) / "config.json").read_text())
    kind = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Lfm2ForCausalLM": "lfm2"}[settings["architectures"][0]]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [torch.from_numpy(text).long()[None] for text in texts]
        return [timed(lambda row=row: model.model(row, use_cache=False), 1)[0] for row in rows]


@benchmark("layers", "dtype", "repeats", layers=4, dtype="auto")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="qwen3.5", show_default=True, help="Shape of the model."
)
@click.option("--cases", type=Listed(among=CASES), default=",".join(CASES), show_default=True, help="Sets of prompts.")
@click.option("--prompts", type=int, default=64, show_default=True, help="Prompts of the cases shared and short.")
@click.option("--decode", type=NUMBERS, default="", help="Numbers of sequences to time decode steps of.")
@click.option("--tokens", type=int, default=32, show_default=True, help="Tokens generated per sequence of --decode.")
@click.option("--transformers", type=int, default=0, help="Number of prompts to run in transformers too.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), options.shape, options.layers)
        llm = LLM(path, load_format="dummy", dtype=options.dtype, cache=None)
        if options.transformers:
            texts = prompts([(1, 1000), (options.transformers + 1, 100)])
            middle = median(transformers_seconds(path, texts)[1:])
            print(f"transformers, prompts of 1,100 tokens: {middle:.2f} s each, {1100 / middle:,.0f} tokens/s")
    facts = llm.engine.worker.facts.of(StateFacts)
    print(f"{options.shape}, {options.layers} layers, {llm.model.dtype}; a state: {facts.state_bytes:,} bytes")
    found: list[dict[str, Any]] = []
    if options.decode:
        systems = {
            f"{count} sequences": lambda count=count: decode_seconds(llm, count, options.tokens)
            for count in options.decode
        }
        seconds = take_turns(systems, options.repeats).seconds
        print(f"\nA decode step\n\n{compared(seconds, unit='ms')}\n", flush=True)
        found += [{"case": f"decode-{name.split()[0]}", "seconds": steps} for name, steps in seconds.items()]
    for case in options.cases:
        levels = CASES[case] if case == "tree" else [CASES[case][0], (options.prompts, CASES[case][1][1])]
        texts, rows, states = prompts(levels), {}, {}

        def run(way: str, texts: list = texts, rows: dict = rows, states: dict = states) -> float:
            llm.engine.reset_stats()
            seconds = read_seconds(llm, texts, way)
            rows[way], states[way] = llm.engine.stats.rows_computed, llm.engine.stats.state_bytes_peak
            return seconds

        times = take_turns({way: lambda way=way: run(way) for way in ("full", "off")}, options.repeats).seconds
        ratio = median([off / full for full, off in zip(times["full"], times["off"], strict=True)])
        wanted = flops(llm, levels, "off") / flops(llm, levels, "full")
        entry = {"case": case, "rows": rows, "seconds": times, "ratio": ratio, "flops": wanted}
        found.append(entry | {"state_bytes": states["full"]})
        print(
            f"\n{case}: rows {rows['full']:,} of {rows['off']:,}; off takes {ratio:.2f} times the seconds and "
            f"{wanted:.2f} times the FLOPs of full; states held at most: {states['full'] / facts.state_bytes:.0f}\n\n"
            f"{compared(times)}",
            flush=True,
        )
    return {"shape": options.shape, "layers": options.layers, "prompts": options.prompts, "cases": found}


if __name__ == "__main__":
    main()
