"""Print the resident memory of this process at stages of a model's life, in bytes. `memory.py` runs it.

    python benchmarks/resident.py MODEL

The script imports only what a user's program imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    """Return the bytes after each stage, the bytes of the weights, and the bytes of the model's file (0: no file)."""
    from prefold import LLM
    from prefold.checkpoint import Checkpoint

    found = {STAGES[0]: resident()}
    if name == "qwen3-0.6b":
        llm = LLM(Checkpoint.dummy(QWEN), dtype="bfloat16")
    elif name == "smollm2-135m-bf16":
        llm = LLM("smollm2-135m", dtype="bfloat16", weights="dtype")
    else:
        llm = LLM(name)
    found[STAGES[1]] = resident()
    for stage, count in zip(STAGES[2:], (1, 1000), strict=True):
        llm.generate([[5, 6, 7]], max_tokens=count, ignore_eos=True)
        found[stage] = resident()
    path = llm.checkpoint.path
    size = Path(path).stat().st_size if path is not None and Path(path).is_file() else 0
    dtype = str(llm.dtype).removeprefix("torch.")
    weights = llm.model.memory.num_bytes
    return {"bytes": found, "weights": weights, "file": size, "dtype": dtype, "passes": llm.passes}


if __name__ == "__main__":
    print(json.dumps(stages_of(sys.argv[1])))
