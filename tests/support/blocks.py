"""Random matrices in the number formats of GGUF, and a small model of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

HIDDEN, WIDTH, VOCAB, HEADS, KV_HEADS, DIM = 256, 512, 300, 4, 2, 64
# Where float16 numbers, which are no random bits here, lie in a block.
HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,), "MXFP4": ()}
NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_bytes(kind: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Random rows of a type, uint8 [rows, bytes]; numbers are of the size of a model's weights."""
    rng = np.random.default_rng(seed)
    if kind in NUMBERS:
        values = torch.from_numpy(rng.normal(size=(rows, inputs), scale=0.1))
        return values.to(NUMBERS[kind]).view(torch.uint8).numpy()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    values = rng.integers(0, 256, (rows, inputs // block, size), np.uint8)
    if kind == "MXFP4":  # an exponent
        values[..., 0] = rng.integers(119, 126, values.shape[:2])
    for at in HALVES.get(kind, (0, 2)):
        scales = rng.normal(size=values.shape[:2], scale=0.002 if kind.endswith("K") else 0.02).astype(np.float16)
        values[..., at : at + 2] = scales[..., None].view(np.uint8)
    return values.reshape(rows, -1)


def dequantized(kind: str, rows: np.ndarray) -> torch.Tensor:
    """The numbers of such rows, float32, by the gguf package."""
    return torch.from_numpy(dequantize(rows, gguf.GGMLQuantizationType[kind]).copy())


def write_model(
    path: Path, type_of: Callable[[str], str], *, layers: int = 2, tied: bool = True, experts: int = 0
) -> Path:
    """A GGUF file of a small Llama without a tokenizer; `type_of` says the type of each matrix by its name.

    experts: of a layer, of which a row goes through two; 0: the MLPs are dense
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    shapes = {"token_embd": (VOCAB, HIDDEN)} | ({} if tied else {"output": (VOCAB, HIDDEN)})
    norms = ["output_norm"]
    for number in range(layers):
        layer = f"blk.{number}."
        shapes |= {layer + "attn_q": (HEADS * DIM, HIDDEN), layer + "attn_k": (KV_HEADS * DIM, HIDDEN)}
        shapes |= {layer + "attn_v": (KV_HEADS * DIM, HIDDEN), layer + "attn_output": (HIDDEN, HEADS * DIM)}
        end, of_all = ("_exps", (experts,)) if experts else ("", ())
        shapes |= {f"{layer}ffn_{half}{end}": (*of_all, WIDTH, HIDDEN) for half in ("gate", "up")}
        shapes |= {f"{layer}ffn_down{end}": (*of_all, HIDDEN, WIDTH)}
        shapes |= {f"{layer}ffn_gate_inp": (experts, HIDDEN)} if experts else {}
        norms += [layer + "attn_norm", layer + "ffn_norm"]
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = "F32" if name.endswith("gate_inp") else type_of(name)
        rows = stored_bytes(kind, math.prod(shape[:-1]), shape[-1], seed=seed).reshape(*shape[:-1], -1)
        writer.add_tensor(name + ".weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in norms:
        writer.add_tensor(name + ".weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
