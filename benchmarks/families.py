"""Time Qwen3 three ways: as prefold's own family, as transformers' modules inside prefold, and in transformers.

    python benchmarks/families.py --dtype bfloat16 --json FILE

Prompts share nothing. Prefill reads the hidden states of the last tokens; all prompts have the same length, so that
transformers' batches have no padding. Decode measures the tokens per second of sequences that generate together,
greedily, after short prompts. The seconds of decode are the seconds of one step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import transformers
from harness import benchmark, compared, median, step_seconds, take_turns

from prefold import LLM
from prefold.features.hf.config import VARIABLE

# The shape of Qwen3-0.6B, with fewer layers and a small vocabulary.
SHAPE = {
    "vocab_size": 8192, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 4096, "tie_word_embeddings": True, "eos_token_id": None,
}  # fmt: skip
OWN, FORCED, THEIRS = "prefold's own family", "transformers' modules in prefold", "transformers"


@benchmark("layers", "dtype", "repeats", layers=16, repeats=5)
@click.option("--prompts", type=int, default=8, show_default=True, help="Number of prompts.")
@click.option("--length", type=int, default=256, show_default=True, help="Tokens of a prefill prompt.")
@click.option("--decode-length", type=int, default=16, show_default=True, help="Tokens of a decode prompt.")
@click.option("--tokens", type=int, default=32, show_default=True, help="Tokens generated per sequence.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    config = transformers.Qwen3Config(num_hidden_layers=options.layers, **SHAPE)
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
        systems = {OWN: ours(folder, options, "", OWN), FORCED: ours(folder, options, "all", FORCED)}
        systems[THEIRS] = theirs(folder, options, dtype)
        seconds = {}
        counts = {"prefill": options.prompts * options.length, "decode": options.prompts}  # of a run, of a step
        for task, count in counts.items():
            turns = take_turns({name: system[task] for name, system in systems.items()}, options.repeats)
            seconds[task] = turns.seconds
            rate = {name: f"{count / median(values):,.0f}" for name, values in turns.seconds.items()}
            print(f"\n{task}\n\n{compared(turns.seconds, columns={'tokens/s': rate})}", flush=True)
    about = {"layers": options.layers, "dtype": options.dtype, "transformers": transformers.__version__}
    return about | {"seconds": seconds}


def prompts_of(options: SimpleNamespace, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 8000, (options.prompts, length))


def ours(folder: str, options: SimpleNamespace, forced: str, name: str) -> dict[str, Callable[[], object]]:
    os.environ[VARIABLE] = forced
    llm = LLM(folder, dtype=options.dtype, cache=None)
    os.environ.pop(VARIABLE)
    print(f"{name}: {llm.passes}", flush=True)

    short = prompts_of(options, options.decode_length).tolist()

    def generate(tokens: int) -> None:
        llm.generate(short, max_tokens=tokens, ignore_eos=True)

    return {
        "prefill": lambda: llm.embed(prompts_of(options, options.length).tolist(), pooling="last"),
        "decode": lambda: step_seconds(generate, 1 + options.tokens),
    }


@torch.inference_mode()
def theirs(folder: str, options: SimpleNamespace, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    short, long = (torch.from_numpy(prompts_of(options, n)) for n in (options.decode_length, options.length))

    @torch.inference_mode()
    def prefill() -> None:
        model.model(input_ids=long, use_cache=False).last_hidden_state[:, -1]

    def generate(tokens: int) -> None:
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(short, attention_mask=torch.ones_like(short), **lengths, do_sample=False, pad_token_id=0)

    return {"prefill": prefill, "decode": lambda: step_seconds(generate, 1 + options.tokens)}


if __name__ == "__main__":
    main()
