"""Time weights in the form of their file against weights in the dtype: decode steps, and prompts.

    python benchmarks/weights.py --dtypes float32,bfloat16 --sequences 1,8,64 --json FILE

The model is the built-in one (a file of type Q4_1), or any other GGUF file. Sequences share nothing; each has a prompt
of 32 tokens. `prompts` embeds texts of 200 tokens with a shared prefix of 100 tokens. The systems of a dtype take
turns. Memory is the memory of the weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from generate import forget, generate
from harness import NUMBERS, Listed, benchmark, clocked, compared, step_seconds, table, take_turns

from prefold import LLM

PROMPTS, SHARED, LONG = 24, 100, 200


def cases_of(arguments: SimpleNamespace, llms: dict[str, LLM]) -> dict[str, dict[str, Any]]:
    """Return {case: {system: function}}. The functions return their seconds."""
    rng, vocab = np.random.default_rng(0), next(iter(llms.values())).config.vocab_size
    cases: dict[str, dict[str, Any]] = {}

    def step(llm: LLM, prompts: list[np.ndarray]) -> float:
        forget(llm)
        return step_seconds(lambda count: generate(llm, prompts, count), arguments.tokens)

    def read(llm: LLM, prompts: list[np.ndarray]) -> float:
        forget(llm)
        return clocked(lambda: llm.embed(prompts))[0]

    for count in arguments.sequences:
        prompts = [rng.integers(5, vocab, 32) for _ in range(count)]
        cases[f"decode step, {count} sequences"] = {
            name: lambda llm=llm, prompts=prompts: step(llm, prompts) for name, llm in llms.items()
        }
    stem = rng.integers(5, vocab, SHARED)
    prompts = [np.concatenate([stem, rng.integers(5, vocab, LONG - SHARED)]) for _ in range(PROMPTS)]
    cases["prompts"] = {name: lambda llm=llm: read(llm, prompts) for name, llm in llms.items()}
    return cases


@benchmark("threads", "repeats", repeats=5)
@click.option("--model", default="smollm2-135m", show_default=True, help="GGUF file, or the built-in model.")
@click.option("--dtypes", type=Listed(), default="float32,bfloat16", show_default=True, help="Dtypes of rows.")
@click.option("--sequences", type=NUMBERS, default="1,8,64", show_default=True, help="Side by side.")
@click.option("--tokens", type=int, default=33, show_default=True, help="Tokens that each sequence generates.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    seconds, rows = dict[str, Any](), []
    for dtype in arguments.dtypes:
        llms = {
            name: LLM(arguments.model, dtype=dtype, weights=weights, threads=arguments.threads, max_running=256)
            for name, weights in (("dtype", "dtype"), ("file", "file"))
        }
        sizes = {name: llm.model.memory.num_bytes for name, llm in llms.items()}
        rows.append([dtype, "weights, MB", *(f"{size / 1e6:.0f}" for size in sizes.values()), ""])
        for case, systems in cases_of(arguments, llms).items():
            found = take_turns(systems, arguments.repeats).seconds
            print(f"\n{dtype}, {case}\n\n{compared(found, unit='ms')}", flush=True)
            middle = {name: float(np.median(values)) for name, values in found.items()}
            shown = [f"{1e3 * value:.4g}" for value in middle.values()]
            rows.append([dtype, f"{case}, ms", *shown, f"{middle['file'] / middle['dtype']:.2f}"])
            seconds.setdefault(dtype, {})[case] = found
        for llm in llms.values():
            llm.close()
    shown = table(["dtype of rows", "", "weights in the dtype", "as stored", "ratio"], rows)
    print(f"\n{shown}")
    return {"model": arguments.model, "seconds": seconds, "tables": {"weights": shown}}


if __name__ == "__main__":
    main()
