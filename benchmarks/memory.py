"""Counts the resident memory of a process: after its imports, with a model loaded, after one token, after 1,000 tokens.

    python benchmarks/memory.py --models smollm2-135m,gemma3-270m,qwen3-0.6b --json FILE

Each model has a process of its own. qwen3-0.6b has that model's shape and random weights in bfloat16; the others are
built in. Memory is `Rss` of /proc/self/smaps_rollup, so Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from harness import Listed, benchmark, table

STAGES = ("imports", "loaded", "one token", "1,000 tokens")
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "hidden_act": "silu", "rope_theta": 1e6,
}  # fmt: skip


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def stages_of(name: str) -> dict[str, Any]:
    """Return the bytes after each stage, and the bytes of the model's file (0: the model has none)."""
    from prefold import LLM
    from prefold.checkpoint import Checkpoint

    found = {STAGES[0]: resident()}
    llm = LLM(Checkpoint.dummy(QWEN), dtype="bfloat16") if name == "qwen3-0.6b" else LLM(name)
    found[STAGES[1]] = resident()
    for stage, count in zip(STAGES[2:], (1, 1000), strict=True):
        llm.generate([[5, 6, 7]], max_tokens=count, ignore_eos=True)
        found[stage] = resident()
    path = llm.checkpoint.path
    size = Path(path).stat().st_size if path is not None and Path(path).is_file() else 0
    dtype = str(llm.dtype).removeprefix("torch.")
    return {"bytes": found, "file": size, "dtype": dtype, "passes": llm.passes}


@benchmark(limits=False)
@click.option("--models", type=Listed(), default="smollm2-135m,gemma3-270m,qwen3-0.6b", show_default=True,
              help="Built-in models, and qwen3-0.6b.")  # fmt: skip
@click.option("--child", default="", hidden=True)
def main(arguments: SimpleNamespace) -> dict[str, Any] | None:
    if arguments.child:
        print(json.dumps(stages_of(arguments.child)))
        return None
    models = {}
    for name in arguments.models:
        child = [sys.executable, __file__, "--child", name]
        models[name] = json.loads(
            subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
    cells = [
        [
            name,
            f"{one['file'] / 1e6:,.0f}" if one["file"] else "",
            one["dtype"],
            *(f"{one['bytes'][stage] / 1e6:,.0f}" for stage in STAGES),
        ]
        for name, one in models.items()
    ]
    shown = table(["model", "file, MB", "computed in", *(f"{stage}, MB" for stage in STAGES)], cells)
    print(shown)
    return {"models": models, "tables": {"memory": shown}}


if __name__ == "__main__":
    main()
