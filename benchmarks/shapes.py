"""Time one sequence and prompts in the shapes of current models, and the machine's limits.

    python benchmarks/shapes.py --cases qwen3.5-35b-a3b,lfm3-1.7b,gemma-4-e2b,glm-4.7-flash --llama VENV --json FILE

Weights are random, with each model's layer sizes, fewer layers and a small vocabulary; Qwen3.5 has 128 of its 256
experts. The limit of a decode step is the time in which all threads read the weights that one row uses, and the LM
head. The limit of a prompt is the time of its operations in linears at the best rate of packed products. Both rates are
measured in every round.

With --llama, prefold and llama.cpp also run a GGUF file of each shape that llama.cpp supports, with matrices of type
--type. llama.cpp's decode step is the difference of a run of all tokens and a run of half of them. Its prompt is a run
of one token.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from gguf_files import write_random
from harness import Listed, benchmark, clocked, compared, machine_limits, median, open_peers, step_seconds, table

from prefold import LLM
from prefold.model.config import ModelConfig

VOCAB = 32_000
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 8192, "tie_word_embeddings": True}
QWEN = ["linear_attention"] * 3 + ["full_attention"]
LFM3 = ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"]
GEMMA = ["sliding_attention"] * 4 + ["full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "layer_types": QWEN,
    },
    "lfm3-1.7b": {
        "architectures": ["Lfm3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 7680,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "layer_types": LFM3,
    },
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "intermediate_size": 6144,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True,
        "num_kv_shared_layers": 5, "layer_types": GEMMA * 2,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240,
        "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536, "n_shared_experts": 1, "num_hidden_layers": 3,
    },
}  # fmt: skip


def _qwen(config: ModelConfig) -> dict[str, Any]:
    sizes = config.sizes
    assert config.experts is not None
    return {
        "ssm.conv_kernel": sizes["taps"], "ssm.state_size": sizes["key_dim"], "ssm.group_count": sizes["key_heads"],
        "ssm.time_step_rank": sizes["value_heads"], "ssm.inner_size": sizes["value_dim"] * sizes["value_heads"],
        "full_attention_interval": 4, "rope.dimension_count": config.rotated_dim,
        "rope.dimension_sections": [11, 11, 10, 0], "expert_shared_feed_forward_length": config.experts.shared,
    }  # fmt: skip


def _gemma(config: ModelConfig) -> dict[str, Any]:
    near, far, types = 256, 512, SHAPES["gemma-4-e2b"]["layer_types"]
    lengths = {
        f"attention.{part}_length{end}": near if end else far for part in ("key", "value") for end in ("", "_swa")
    }
    return lengths | {
        "rope.dimension_count": far, "rope.dimension_count_swa": near, "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.shared_kv_layers": SHAPES["gemma-4-e2b"]["num_kv_shared_layers"],
        "embedding_length_per_layer_input": 256, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "feed_forward_length": [config.mlp_width(number) for number in range(config.layers)],
        "final_logit_softcapping": 30.0,
    }  # fmt: skip


def _glm(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    assert latent is not None and config.experts is not None
    return {
        "attention.kv_lora_rank": latent.rank, "attention.q_lora_rank": latent.query_rank, "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + latent.tail, "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.dim + latent.tail, "attention.value_length_mla": latent.value_dim,
        "rope.dimension_count": latent.tail, "leading_dense_block_count": 1, "expert_shared_count": 1,
        "expert_weights_scale": 1.8, "expert_weights_norm": True, "expert_gating_func": 2,
    }  # fmt: skip


# llama.cpp's names of the shapes, and the keys of their files that a ModelConfig has under other names.
FILES: dict[str, tuple[str, Any]] = {
    "qwen3.5-35b-a3b": ("qwen35moe", _qwen), "gemma-4-e2b": ("gemma4", _gemma), "glm-4.7-flash": ("deepseek2", _glm),
}  # fmt: skip


def beside_llama(options: SimpleNamespace, name: str, config: ModelConfig, folder: str) -> list[dict[str, Any]]:
    """Return the seconds of a step and of a prompt by prefold and by llama.cpp, over the same file, in each round."""
    arch, keys = FILES[name]
    path, rng = Path(folder, f"{name}.gguf"), np.random.default_rng(0)
    write_random(path, config, arch, options.type, keys(config))
    text, rows = (rng.integers(100, VOCAB, count).tolist() for count in (32, options.prompt))
    half = options.tokens // 2
    cases = {f"step {count}": {"prompts": [text], "max_tokens": count} for count in (half, options.tokens)}
    cases["prompt"] = {"prompts": [rows], "max_tokens": 1}
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        [(named, peer)] = open_peers(
            stack, options, {"threads": options.threads, "cases": cases}, files={"": path}
        ).items()
        llm = stack.enter_context(LLM(str(path), dtype=options.dtype, cache="off"))
        seconds_of(llm, options.prompt, 2)
        for _ in range(options.repeats):
            ours = dict(zip(("step", "prompt"), seconds_of(llm, options.prompt, options.tokens), strict=True))
            few, many, prompt = (peer.run(case)[0] for case in cases)
            theirs = {"step": (many - few) / (options.tokens - half), "prompt": prompt}
            found.append({f"prefold {options.type}": ours, named: theirs})
    return found


def step_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of weights that a step with one row reads."""
    return (config.linear_flops // 2 + config.vocab_size * config.hidden) * itemsize


def seconds_of(llm: LLM, prompt: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a decode step of one sequence, and of a prompt whose last row is read."""
    rng = np.random.default_rng(0)
    text = rng.integers(100, VOCAB, 32).tolist()
    step = step_seconds(lambda n: llm.generate([text], max_tokens=n, ignore_eos=True, temperature=0), 1 + tokens)
    rows = rng.integers(100, VOCAB, prompt).tolist()
    return step, clocked(lambda: llm.embed([rows], pooling="last"))[0]


@benchmark("dtype", "repeats", "threads", "llama", dtype="float32")
@click.option("--cases", type=Listed(among=SHAPES), default=",".join(SHAPES), show_default=True, help="Shapes to run.")
@click.option("--prompt", type=int, default=512, show_default=True, help="Length of a prompt in tokens.")
@click.option("--type", default="Q8_0", show_default=True, help="Type of the matrices in files for llama.cpp.")
@click.option("--tokens", type=int, default=24, show_default=True, help="Tokens to generate.")
def main(options: SimpleNamespace) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for name in options.cases:
        shape = COMMON | SHAPES[name]
        shape = {"num_hidden_layers": len(shape.get("layer_types", ()))} | shape
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            llm = LLM(folder, load_format="dummy", dtype=options.dtype, cache="off")
        config, itemsize = llm.config, 2 if options.dtype == "bfloat16" else 4
        seconds_of(llm, options.prompt, 2)
        rounds: list[dict[str, float]] = []
        for _ in range(options.repeats):
            limits, (step, prompt) = machine_limits(), seconds_of(llm, options.prompt, options.tokens)
            least = step_bytes(config, itemsize) / (limits["memory GB/s"] * 1e9)
            best = options.prompt * config.linear_flops / (limits["product GFLOP/s"] * 1e9)
            rounds.append({"step": step, "prompt": prompt, "step_limit": least, "prompt_limit": best})
        middle = {key: median([one[key] for one in rounds]) for key in rounds[0]}
        shares = {key: middle[f"{key}_limit"] / middle[key] for key in ("step", "prompt")}
        rows = [
            [what, f"{1e3 * middle[what]:.4g}", f"{1e3 * middle[f'{what}_limit']:.4g}", f"{shares[what]:.0%}"]
            for what in ("step", "prompt")
        ]
        print(f"\n{name}, {config.layers} layers\n\n{table(['', 'ms', 'limit, ms', 'of the limit'], rows)}", flush=True)
        llm.close()
        case: dict[str, Any] = {"shape": name, "layers": config.layers, "rounds": rounds, "shares": shares}
        if options.llama and name in FILES:
            with tempfile.TemporaryDirectory() as folder:
                case["beside"] = beside_llama(options, name, config, folder)
            for what in ("step", "prompt"):
                seconds = {system: [one[system][what] for one in case["beside"]] for system in case["beside"][0]}
                print(f"\n{name}, {what}, {options.type}\n\n{compared(seconds, unit='ms')}", flush=True)
        found.append(case)
    return {"prompt": options.prompt, "cases": found}


if __name__ == "__main__":
    main()
