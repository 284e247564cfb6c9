"""One decode step outside attention, in parts: the linears, the whole forward pass, the LM head, against the machine.

    python benchmarks/decode_parts.py [--model smollm2-135m] [--rows 1,8,64,256] [--repeats N] [--json FILE]

Random weights. `linears` are those of all layers and nothing else; `forward` is the model with an attention
that does nothing; `head` is the LM head as it is, `widened` as it is without a kernel, `oneDNN` the same product
with its result in the model's dtype. Everything in turn, medians.
"""

from __future__ import annotations

import argparse

import torch
from attention import alternate
from common import machine, median, table, write_json

from prefold.checkpoint import resolve
from prefold.model import CausalLM, load_model


def attend(plane: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, read_only: bool = False) -> torch.Tensor:
    return q


def linears(model: CausalLM, rows: int) -> list[tuple]:
    """(linear, an input for it), in the order of a step."""
    names = ("q", "kv", "qkv", "o", "gate_up", "down")
    found = [getattr(layer, name) for layer in model.layers for name in names if hasattr(layer, name)]
    inputs = {size: torch.randn(rows, size).to(model.dtype) for size in {linear.inputs for linear in found}}
    return [(linear, inputs[linear.inputs]) for linear in found]


def systems(model: CausalLM, plain: CausalLM, rows: int) -> dict:
    vocab = model.config.vocab_size
    tokens, positions = torch.randint(0, vocab, (rows,)), torch.randint(0, 500, (rows,))
    products = linears(model, rows)
    hidden = model(tokens, positions, attend)
    weight = model.embedding if model.lm_head is None else model.lm_head
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return {
        "linears": lambda: [linear(x) for linear, x in products],
        "forward": lambda: model(tokens, positions, attend),
        "head": lambda: model.logits(hidden),
        "widened": lambda: plain.logits(hidden),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(hidden, packed, None, "none", [], ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    checkpoint, dtype = resolve(options.model, load_format="dummy"), getattr(torch, options.dtype)
    model = load_model(checkpoint, dtype=dtype, device="cpu")
    plain = load_model(checkpoint, dtype=dtype, device="cpu", pack=False)
    lines, record = [], []
    with torch.inference_mode():
        for rows in map(int, options.rows.split(",")):
            seconds = alternate(systems(model, plain, rows), options.repeats)
            lines.append([rows, *(f"{1e3 * median(values):.2f}" for values in seconds.values())])
            record.append({"rows": rows, "seconds": seconds})
    print(f"{options.model} in {options.dtype}, ms\n")
    print(table(["rows", *record[0]["seconds"]], lines))
    write_json(options.json, benchmark="decode_parts", model=options.model, dtype=options.dtype, results=record)


if __name__ == "__main__":
    main()
