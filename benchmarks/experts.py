"""Time a mixture of experts: against a dense MLP with as many operations, and decoding against other systems.

    python benchmarks/experts.py --sections step,decode --layers 4 --sequences 1,16,64 --transformers --llama VENV

The shape is Qwen3-30B-A3B's (hidden 2,048, 128 experts of 768 columns, 8 a row) with fewer layers, a vocabulary of
32,768 and random weights in bfloat16. `step` compares one layer's mixture with a dense MLP of 8 * 768 columns, which
has as many operations per row and 1/16 of the weights. Both are packed and take turns. `decode` runs a model with
sequences of eight prompt tokens. The time of a step is the time difference of two runs, one with half as many tokens,
divided by the difference in tokens. llama.cpp runs files with the same shapes and other random weights, which are equal
in all experts. A system of four layers takes 5 GB.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from gguf_files import write_random
from harness import FOLDER, NUMBERS, Listed, Peer, benchmark, compared, open_peers, step_seconds, take_turns

from prefold import LLM
from prefold.checkpoint import Checkpoint
from prefold.kernels import BFLOAT16
from prefold.model import config_from
from prefold.model.config import ModelConfig
from prefold.model.program import Experts, Linear
from prefold.worker.native.load import load_native
from prefold.worker.native.program import ProgramParts

DTYPE, PROMPT = torch.bfloat16, 8
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


class Alone:
    """The MLP of one layer, with random weights."""

    def __init__(self, config: ModelConfig):
        self._model = load_native(Checkpoint.dummy({}), config, dtype="bfloat16")
        (layer,) = self._model.program.layers
        operations = [one for one in layer if isinstance(one, Experts)] or [
            one for one in layer if isinstance(one, Linear) and one.name in ("gate_up", "down")
        ]
        self._source, self._out = operations[0].source, operations[-1].out
        self._parts = ProgramParts(self._model, [operations])

    def __call__(self, h: np.ndarray, out: np.ndarray) -> None:
        self._parts.run(0, {self._source: h, self._out: out})


def time_steps(options: SimpleNamespace) -> list[dict]:
    """Return the seconds of a layer's mixture and of a dense MLP, by rows."""
    config = config_from(SHAPE | {"num_hidden_layers": 1})
    dense = replace(config, mlp="gated", intermediate=config.chosen * config.intermediate)
    results = []
    mixture, mlp = Alone(config), Alone(dense)
    for rows in options.rows:
        h = np.random.default_rng(0).standard_normal((rows, config.hidden), np.float32).astype(BFLOAT16)
        out = np.empty_like(h)
        systems = {"mixture": partial(mixture, h, out), "dense": partial(mlp, h, out)}
        seconds = take_turns(systems, options.repeats).seconds
        print(f"\nA layer, {rows} rows\n\n{compared(seconds, unit='ms')}", flush=True)
        results.append({"rows": rows, "seconds": seconds})
    return results


def llama_peers(options: SimpleNamespace, stack: ExitStack, prompts: dict[int, np.ndarray]) -> dict[str, Peer]:
    """Start llama.cpp with a file of each type. Its cases are named "SEQUENCES TOKENS"."""
    cases = {
        f"{count} {tokens}": {"prompts": some.tolist(), "max_tokens": tokens}
        for count, some in prompts.items()
        for tokens in (options.tokens // 2, options.tokens)
    }
    folder = Path(options.files or stack.enter_context(tempfile.TemporaryDirectory()))
    files = {}
    for kind in options.types if options.llama else ():
        files[kind] = folder / f"mixture-{options.layers}-{kind}.gguf"
        if not files[kind].exists():
            write_random(files[kind], config_from(SHAPE | {"num_hidden_layers": options.layers}), "qwen3moe", kind, {})
    wanted = SimpleNamespace(llama=options.llama)  # transformers runs in this process
    return open_peers(stack, wanted, {"threads": options.threads, "cases": cases}, files=files)


def transformers_model(settings: dict[str, Any]) -> Any:
    import transformers

    torch.set_default_dtype(DTYPE)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings)).eval()
    torch.set_default_dtype(torch.float32)
    return model


def time_decoding(options: SimpleNamespace) -> list[dict]:
    """Return the seconds of a decode step of each system, by sequences."""
    settings = SHAPE | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        llm = LLM(
            folder, dtype="bfloat16", device="cpu", load_format="dummy", threads=options.threads, cache="off",
            max_batch_rows=512,
        )  # fmt: skip
    theirs = transformers_model(settings) if options.transformers else None
    rng, results = np.random.default_rng(0), []
    prompts = {count: rng.integers(5, SHAPE["vocab_size"], (count, PROMPT)) for count in options.sequences}

    @torch.inference_mode()
    def run_theirs(prompts: np.ndarray, count: int) -> None:
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        theirs.generate(torch.from_numpy(prompts), **lengths, do_sample=False, pad_token_id=0)

    def run_ours(prompts: np.ndarray, count: int) -> None:
        llm.generate(prompts.tolist(), max_tokens=count, ignore_eos=True)

    def run_peer(peer: Peer, sequences: int, count: int) -> float:
        return peer.run(f"{sequences} {count}")[0]

    with ExitStack() as stack:
        peers = llama_peers(options, stack, prompts)
        for count, some in prompts.items():
            runs: dict[str, Any] = {"prefold": partial(run_ours, some)}
            runs |= {"transformers": partial(run_theirs, some)} if theirs is not None else {}
            runs |= {name: partial(run_peer, peer, count) for name, peer in peers.items()}
            steps = {
                name: partial(step_seconds, run, options.tokens, options.tokens // 2) for name, run in runs.items()
            }
            seconds = take_turns(steps, options.repeats).seconds
            print(f"\nA step of {count} sequences\n\n{compared(seconds, unit='ms')}", flush=True)
            results.append({"sequences": count, "seconds": seconds})
    return results


SECTIONS = ("step", "decode")


@benchmark("layers", "threads", "repeats", "transformers", "llama", layers=4)
@click.option("--sections", type=Listed(among=SECTIONS), default="step,decode", show_default=True, help="Tables.")
@click.option("--rows", type=NUMBERS, default="2048,512,64,16,1", show_default=True, help="Numbers of rows of `step`.")
@click.option(
    "--sequences", type=NUMBERS, default="1,16,64", show_default=True, help="Numbers of sequences of `decode`."
)
@click.option("--tokens", type=int, default=16, show_default=True, help="Tokens generated per sequence.")
@click.option("--files", type=FOLDER, metavar="FOLDER", help="Where llama.cpp's files are kept, 5 GB for four layers.")
@click.option("--types", type=Listed(), default="BF16,Q8_0", show_default=True, help="Types of llama.cpp's weights.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    steps = time_steps(options) if "step" in options.sections else []
    decoding = time_decoding(options) if "decode" in options.sections else []
    return {"step": steps, "decode": decoding}


if __name__ == "__main__":
    main()
