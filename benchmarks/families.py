"""Times Qwen3 as a family of prefold's own, forced through transformers' modules, and in transformers.

    python benchmarks/families.py --dtype bfloat16 --json FILE

No prompts share anything. Prefill: hidden states of the last tokens of prompts of one length, so that transformers'
batches have no padding. Decode: tokens a second of sequences that generate side by side, greedily, after short prompts.
The decode time is a difference of two runs, and would be lost in the time of long prompts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import transformers
from harness import benchmark, compared, median, take_turns

from prefold import LLM
from prefold.hf.config import VARIABLE

# The shape of Qwen3-0.6B, with fewer layers and a small vocabulary.
SHAPE = {
    "vocab_size": 8192, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 4096, "tie_word_embeddings": True, "eos_token_id": None,
}  # fmt: skip
OWN, FORCED, THEIRS = "prefold's own family", "transformers' modules in prefold", "transformers"


@benchmark("layers", "dtype", "repeats", layers=16, repeats=5)
@click.option("--prompts", type=int, default=8, show_default=True, help="Prompts side by side.")
@click.option("--length", type=int, default=256, show_default=True, help="Tokens of a prompt of prefill.")
@click.option("--decode-length", type=int, default=16, show_default=True, help="Tokens of a prompt of decode.")
@click.option("--tokens", type=int, default=32, show_default=True, help="Tokens that each sequence generates.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    config = transformers.Qwen3Config(num_hidden_layers=options.layers, **SHAPE)
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
        systems = {OWN: ours(folder, options, "", OWN), FORCED: ours(folder, options, "all", FORCED)}
        systems[THEIRS] = theirs(folder, options, dtype)
        seconds = {}
        counts = {"prefill": options.prompts * options.length, "decode": options.prompts * options.tokens}
        for task, count in counts.items():
            turns = take_turns({name: partial(system[task], 0) for name, system in systems.items()}, options.repeats)
            seconds[task] = turns.seconds
            rate = {name: f"{count / median(values):,.0f}" for name, values in turns.seconds.items()}
            print(f"\n{task}\n\n{compared(turns.seconds, columns={'tokens/s': rate})}", flush=True)
    about = {"layers": options.layers, "dtype": options.dtype, "transformers": transformers.__version__}
    return about | {"seconds": seconds}


def prompts_of(options: SimpleNamespace, seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 8000, (options.prompts, length))


def ours(folder: str, options: SimpleNamespace, forced: str, name: str) -> dict[str, Callable[[int], object]]:
    os.environ[VARIABLE] = forced
    llm = LLM(folder, dtype=options.dtype, cache=None)
    os.environ.pop(VARIABLE)
    print(f"{name}: {llm.passes}", flush=True)

    def decode(seed: int) -> float:
        prompts = prompts_of(options, seed, options.decode_length).tolist()
        started = time.perf_counter()
        llm.generate(prompts, max_tokens=1, ignore_eos=True)
        middle = time.perf_counter()
        llm.generate(prompts, max_tokens=1 + options.tokens, ignore_eos=True)
        return time.perf_counter() - middle - (middle - started)

    return {
        "prefill": lambda seed: llm.embed(prompts_of(options, seed, options.length).tolist(), pooling="last"),
        "decode": decode,
    }


@torch.inference_mode()
def theirs(folder: str, options: SimpleNamespace, dtype: torch.dtype) -> dict[str, Callable[[int], object]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def prefill(seed: int) -> None:
        model.model(
            input_ids=torch.from_numpy(prompts_of(options, seed, options.length)), use_cache=False
        ).last_hidden_state[:, -1]

    def generate(prompts: torch.Tensor, tokens: int) -> None:
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, min_new_tokens=tokens,
                       do_sample=False, pad_token_id=0)  # fmt: skip

    def decode(seed: int) -> float:
        prompts = torch.from_numpy(prompts_of(options, seed, options.decode_length))
        started = time.perf_counter()
        generate(prompts, 1)
        middle = time.perf_counter()
        generate(prompts, 1 + options.tokens)
        return time.perf_counter() - middle - (middle - started)

    return {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    main()
