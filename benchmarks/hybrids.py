"""Times row streams of hybrids with what their prompts share computed once, and without; states and rows are counted.

    python benchmarks/hybrids.py [--shape qwen3.5|lfm2] [--layers 4] [--rounds 3] [--cases shared,tree,short]
        [--prompts 64] [--decode 1,16,64] [--transformers 5]

Weights are random, in the shape of Qwen3.5-0.8B or LFM2-350M with fewer layers and a small vocabulary; last rows are
read. The ways take turns, and the ratio is the median over the rounds of the time of `off` by that of `full` in the
same round, beside the ratio of their floating-point operations (linears, attention and states). `--decode` times a step
of so many sequences that generate side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, write_json

from prefold import LLM
from prefold.hybrid.delta import CHUNK
from prefold.hybrid.steps import StateFacts
from prefold.stream import Spool
from prefold.types import Readout, Request

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
# How many children each node of the trie has, and how many tokens each of these adds.
CASES = {
    "shared": [(1, 1000), (64, 100)],
    "tree": [(2, 500), (4, 200), (8, 50)],
    "short": [(1, 40), (64, 100)],
}


def checkpoint(folder: Path, shape: str, layers: int) -> str:
    """Writes the config of a shape, and returns its folder."""
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
    """Returns the floating-point operations of a way: linears, attention's scores and sums, and states in chunks."""
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


def timed(llm: LLM, texts: list[np.ndarray], sharing: str) -> float:
    """Returns the seconds of reading the last rows of all prompts."""
    with Spool() as spool:
        for number, text in enumerate(texts):
            spool.add(Request(text), str(number).encode())
        windows = list(spool.windows(max_tokens=1 << 24, share=sharing == "full"))
    started = time.perf_counter()
    done = sum(1 for _ in llm.engine.run(windows, Readout("last"), sharing=sharing))
    assert done == len(texts)
    return time.perf_counter() - started


def step_seconds(llm: LLM, sequences: int, tokens: int) -> float:
    """Returns the seconds of a step in which so many sequences get a token each, begun behind prompts of 8 tokens."""
    texts = np.random.default_rng(sequences).integers(100, VOCAB, (sequences, 8)).tolist()
    started = time.perf_counter()
    llm.generate(texts, max_tokens=1, ignore_eos=True, temperature=0)
    middle = time.perf_counter()
    llm.generate(texts, max_tokens=1 + tokens, ignore_eos=True, temperature=0)
    return (time.perf_counter() - middle - (middle - started)) / tokens


def transformers_seconds(path: str, texts: list[np.ndarray]) -> list[float]:
    """Returns the seconds that transformers takes for each prompt, one at a time, in float32."""
    import transformers

    settings = json.loads((Path(path) / "config.json").read_text())
    kind = {"Qwen3_5ForCausalLM": "qwen3_5_text", "Lfm2ForCausalLM": "lfm2"}[settings["architectures"][0]]
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    seconds = []
    with torch.inference_mode():
        for text in texts:
            started = time.perf_counter()
            model.model(torch.from_numpy(text).long()[None], use_cache=False)
            seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--prompts", type=int, default=64, help="of the cases shared and short")
    parser.add_argument("--decode", default="", help="numbers of sequences")
    parser.add_argument("--tokens", type=int, default=32, help="of `--decode`, by each sequence")
    parser.add_argument("--transformers", type=int, default=0, help="prompts that transformers computes, too")
    parser.add_argument("--json", help="file that the figures are written to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), options.shape, options.layers)
        llm = LLM(path, load_format="dummy", dtype=options.dtype, cache=None)
        if options.transformers:
            texts = prompts([(1, 1000), (options.transformers + 1, 100)])
            middle = statistics.median(transformers_seconds(path, texts)[1:])
            print(f"transformers, prompts of 1,100 tokens: {middle:.2f} s each, {1100 / middle:,.0f} tokens/s")
    facts = llm.engine.worker.facts.of(StateFacts)
    print(
        f"{machine()}; {options.shape}, {options.layers} layers, {llm.model.dtype}; "
        f"a state: {facts.state_bytes:,} bytes"
    )
    found: list[dict[str, Any]] = []
    for sequences in map(int, filter(None, options.decode.split(","))):
        step_seconds(llm, sequences, 2)
        steps = [step_seconds(llm, sequences, options.tokens) for _ in range(options.rounds)]
        found.append({"case": f"decode-{sequences}", "seconds": steps})
        middle = 1e3 * statistics.median(steps)
        print(f"decode of {sequences}: {middle:.2f} ms a step ({min(steps):.4f} to {max(steps):.4f} s)")
    for case in filter(None, options.cases.split(",")):
        levels = CASES[case] if case == "tree" else [CASES[case][0], (options.prompts, CASES[case][1][1])]
        texts, times, rows, states = prompts(levels), {"full": [], "off": []}, {}, 0
        for number in range(options.rounds + 1):
            for way in times:
                if number == 0 and way == "off":
                    continue  # the first round warms up
                llm.engine.reset_stats()
                seconds = timed(llm, texts, way)
                rows[way] = llm.engine.stats.rows_computed
                if way == "full":
                    states = llm.engine.stats.state_bytes_peak
                if number:
                    times[way].append(seconds)
        ratios = [off / full for full, off in zip(times["full"], times["off"], strict=True)]
        ratio, wanted = statistics.median(ratios), flops(llm, levels, "off") / flops(llm, levels, "full")
        entry = {"case": case, "rows": rows, "seconds": times, "ratio": ratio, "flops": wanted, "state_bytes": states}
        found.append(entry)
        print(
            f"{case:8} rows {rows['full']:,} of {rows['off']:,}; full {min(times['full']):.2f} s, off "
            f"{min(times['off']):.2f} s: {ratio:.2f} times ({min(ratios):.2f} to {max(ratios):.2f}), FLOPs "
            f"{wanted:.2f} times: {ratio / wanted:.2f} of it; states held at most: {states / facts.state_bytes:.0f}"
        )
    if options.json:
        write_json(options.json, options=vars(options), cases=found)


if __name__ == "__main__":
    main()
