"""Times the parts of a decode step outside attention, beside oneDNN's packed products.

    python benchmarks/decode_parts.py [--model smollm2-135m] [--rows 1,8,64,256] [--threads N] [--repeats N]
        [--json FILE]

Weights are random. `linears` are the linears of all layers and nothing else; `forward` is the model with an attention
that does nothing; `head` is the LM head. `oneDNN` computes the same products with its own packed weights, the head's
with the result in the model's dtype; `widened` is the head without kernels. All take turns; medians are shown.
`outside the calls` is what a decode step of an engine takes beside the pass: planning, tensors,
choosing tokens, and telling of them (as ids: random weights have no tokenizer).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from attention import alternate
from common import machine, median, table, write_json

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.model import CausalLM, load_model

# Steps of each run of an engine; the first ones, which compute prompts, are left out.
STEPS, FIRST = 32, 4


def attend(plane: int, q: torch.Tensor, *more: object) -> torch.Tensor:
    return q


def linears(model: CausalLM, rows: int) -> list[tuple]:
    """(linear, an input for it), in the order of a step."""
    names = ("q", "kv", "qkv", "o", "gate_up", "down")
    found = [getattr(layer, name) for layer in model.layers for name in names if hasattr(layer, name)]
    inputs = {size: torch.randn(rows, size).to(model.dtype) for size in {linear.inputs for linear in found}}
    return [(linear, inputs[linear.inputs]) for linear in found]


def run_all(products: list[tuple]) -> None:
    for linear, x in products:
        linear(x)


def one_dnn(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def outside_calls(llm: LLM, rows: int) -> list[float]:
    """Returns the seconds of each decode step of so many sequences in which neither a pass nor a product is computed;
    nothing where no pass is one call."""
    calls, spans = kernels.load()._calls, list[tuple[bool, float, float]]()

    def timed(function: Callable, is_pass: bool) -> Callable:
        def call(*arguments: object) -> object:
            started = time.perf_counter()
            result = function(*arguments)
            spans.append((is_pass, started, time.perf_counter()))
            return result

        return call

    own = {key: calls[key] for key in calls if key == "run_program" or key[0] == "linear"}
    calls |= {key: timed(function, key == "run_program") for key, function in own.items()}
    try:
        prompts = [[5, 6, 7, 8 + number] for number in range(rows)]
        llm.generate(prompts, max_tokens=STEPS, ignore_eos=True)
    finally:
        calls |= own
    passes = [i for i, (is_pass, *_) in enumerate(spans) if is_pass][FIRST:]
    return [
        spans[stop][1] - spans[first][1] - sum(ended - started for _, started, ended in spans[first:stop])
        for first, stop in pairwise(passes)
    ]


def systems(model: CausalLM, plain: CausalLM, theirs: list, rows: int) -> dict:
    """theirs: oneDNN's linears, and last its head."""
    vocab = model.config.vocab_size
    tokens, positions = torch.randint(0, vocab, (rows,)), torch.randint(0, 500, (rows,))
    products = linears(model, rows)
    their_products = [(linear, x) for linear, (_, x) in zip(theirs, products, strict=False)]
    hidden = model(tokens, positions, attend)
    return {
        "linears": lambda: run_all(products),
        "oneDNN linears": lambda: run_all(their_products),
        "forward": lambda: model(tokens, positions, attend),
        "head": lambda: model.logits(hidden),
        "oneDNN head": lambda: theirs[-1](hidden),
        "widened head": lambda: plain.logits(hidden),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    checkpoint, dtype = resolve(options.model, load_format="dummy"), getattr(torch, options.dtype)
    settings = {"load_format": "dummy", "threads": options.threads, "cache": "off"}
    llm = LLM(options.model, dtype=options.dtype, device="cpu", **settings)
    model = llm.model
    plain = load_model(checkpoint, dtype=dtype, device="cpu", pack=False)
    theirs = [one_dnn(linear.weight) for linear, _ in linears(plain, 1)]
    theirs.append(one_dnn(plain.embedding if plain.lm_head is None else plain.lm_head))
    lines, record = [], []
    with torch.inference_mode():
        for rows in map(int, options.rows.split(",")):
            seconds = alternate(systems(model, plain, theirs, rows), options.repeats)
            seconds |= {"outside the calls": outside} if (outside := outside_calls(llm, rows)) else {}
            lines.append([rows, *(f"{1e3 * median(values):.2f}" for values in seconds.values())])
            record.append({"rows": rows, "seconds": seconds})
    print(f"{options.model} in {options.dtype}, ms\n")
    print(table(["rows", *record[0]["seconds"]], lines))
    write_json(options.json, benchmark="decode_parts", model=options.model, dtype=options.dtype, results=record)


if __name__ == "__main__":
    main()
