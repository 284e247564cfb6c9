"""Measure the resident memory of a process: after imports, after loading a model, after one token, after 1,000 tokens.

    python benchmarks/memory.py --models smollm2-135m,qwen3-4b-q4_k --json FILE

Each model has its own process. `smollm2-135m` and `gemma3-270m` are built in; `smollm2-135m-bf16` has the weights of
the first one in bfloat16. qwen3-0.6b has the shape of that model and random weights in bfloat16. qwen3-0.6b-q8_0 and
qwen3-4b-q4_k are GGUF files with the shapes of Qwen3-0.6B and Qwen3-4B, and random blocks. The bound is 1.15 times the
bytes of the weights in memory, plus 130 MB. Memory is `Rss` of /proc/self/smaps_rollup, so Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import gguf
import numpy as np
from harness import Listed, benchmark, table
from resident import QWEN, STAGES

CHILD = Path(__file__).with_name("resident.py")  # imports no PyTorch, as this file does
QWEN_4B = QWEN | {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip


def write_blocks(path: Path, shape: dict[str, Any], kind: str) -> None:
    """Write a GGUF file with a shape of Qwen3 and random blocks of one type, without a tokenizer."""
    writer, type_ = gguf.GGUFWriter(path, "qwen3"), gguf.GGMLQuantizationType[kind]
    hidden, wide, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    shapes = {"token_embd": (shape["vocab_size"], hidden)}
    norms = {"output_norm": hidden}
    for number in range(shape["num_hidden_layers"]):
        sizes = {
            "attn_q": (heads * dim, hidden),
            "attn_k": (kv_heads * dim, hidden),
            "attn_v": (kv_heads * dim, hidden),
        }
        sizes |= {"attn_output": (hidden, heads * dim), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
        sizes |= {"ffn_down": (hidden, wide)}
        shapes |= {f"blk.{number}.{name}": size for name, size in sizes.items()}
        norms |= {f"blk.{number}.{name}": hidden for name in ("attn_norm", "ffn_norm")}
        norms |= {f"blk.{number}.{name}": dim for name in ("attn_q_norm", "attn_k_norm")}
    numbers, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(0)
    for name, (rows, inputs) in shapes.items():
        blocks = rng.integers(0, 256, (rows, inputs // numbers, size), np.uint8)
        for at in (0, 2) if kind.endswith("_K") else (0,):  # its scales
            blocks[..., at : at + 2] = np.float16(0.001).reshape(1).view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=type_)
    for name, length in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


MODELS = ("smollm2-135m", "smollm2-135m-bf16", "gemma3-270m", "qwen3-0.6b", "qwen3-0.6b-q8_0", "qwen3-4b-q4_k")
FILES = {"qwen3-0.6b-q8_0": (QWEN, "Q8_0"), "qwen3-4b-q4_k": (QWEN_4B, "Q4_K")}


@contextmanager
def file_of(name: str) -> Iterator[str]:
    """Yield the model to load: the path of a file that exists inside the context, or `name` itself."""
    if name not in FILES:
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        write_blocks(path, *FILES[name])
        yield str(path)


@benchmark(limits=False)
@click.option("--models", type=Listed(), default=",".join(MODELS), show_default=True, help="Models.")  # fmt: skip
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    models = {}
    for name in arguments.models:
        with file_of(name) as given:
            child = [sys.executable, str(CHILD), given]
            done = subprocess.run(child, check=True, capture_output=True, text=True)
        models[name] = json.loads(done.stdout.splitlines()[-1])
    cells = []
    for name, one in models.items():
        one["bound"] = round(1.15 * one["weights"] + 130e6)
        sizes = [one["file"], one["weights"], *one["bytes"].values(), one["bound"]]
        cells.append([name, one["dtype"], *(f"{size / 1e6:,.0f}" if size else "" for size in sizes)])
    shown = table(["model", "computed in", *(f"{name}, MB" for name in ("file", "weights", *STAGES, "bound"))], cells)
    print(shown)
    return {"models": models, "tables": {"memory": shown}}


if __name__ == "__main__":
    main()
