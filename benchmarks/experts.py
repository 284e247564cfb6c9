"""Times a mixture of experts: beside dense products of as many operations, and decoding beside transformers and
llama.cpp.

    python benchmarks/experts.py [step] [decode] [--layers 4] [--rows 2048,512,64,16,1] [--sequences 1,16,64]
        [--systems prefold,transformers] [--llama VENV] [--files FOLDER] [--types BF16,Q8_0] [--threads N]
        [--repeats N] [--json FILE]

The shape is that of Qwen3-30B-A3B (hidden 2,048, 128 experts of 768 columns, 8 a row), with fewer layers, a vocabulary
of 32,768, and random weights in bfloat16. `step` is one layer's mixture, and a dense MLP of 8 * 768 columns, which has
as many operations for a row and 1/16 of the weights; both are packed and take turns. `decode` is a model, and
sequences of eight prompt tokens, each of which generates `--tokens`: the seconds of a step are those of a run, less
those of a run of half as many tokens, by the tokens between. With --llama files of the same shape run in llama.cpp
(llama-cpp-python in the virtual environment VENV), with other random weights, of which all experts have the same. A
system of four layers takes 5 GB: --systems names those that are there at once; llama.cpp is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from attention import alternate
from common import Peer, machine, median, python_of, spread, table, write_json

from prefold import LLM
from prefold.model import config_from
from prefold.model.decoder_layer import Mlp
from prefold.model.lora import NO_ADAPTERS
from prefold.model.ops import choose_ops
from prefold.model.parallel import ALONE
from prefold.plugins import named_class

DTYPE, PROMPT = torch.bfloat16, 8
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def packed(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module with random weights, packed."""
    for linear in [module, *module.modules()]:
        if hasattr(linear, "pack"):
            linear.weight.normal_(std=linear.inputs**-0.5)
            linear.pack()
    return module.requires_grad_(False)


def time_steps(options: argparse.Namespace) -> list[dict]:
    """Returns the seconds of a layer's mixture and of a dense MLP, by rows."""
    config = config_from(SHAPE | {"num_hidden_layers": 1})
    dense = replace(config, mlp="gated", intermediate=config.chosen * config.intermediate)
    place = {"dtype": DTYPE, "device": torch.device("cpu")}
    results = []
    with torch.inference_mode():
        mixture = packed(named_class(config.mlp_kind.module)(config, 0, ALONE, **place))
        mlp = packed(Mlp(dense, 0, ALONE, **place))
        ops = choose_ops(DTYPE, place["device"])
        for rows in map(int, options.rows.split(",")):
            h = torch.randn(rows, config.hidden).to(DTYPE)
            systems = {
                "mixture": lambda h=h: mixture(h, NO_ADAPTERS, ops),
                "dense": lambda h=h: mlp(h, NO_ADAPTERS, ops),
            }
            seconds = alternate(systems, options.repeats)
            results.append({"rows": rows, "seconds": seconds})
    return results


def per_token(generate, tokens: int, repeats: int) -> list[float]:
    """Returns the seconds of a decode step. generate: makes so many tokens of each sequence."""
    generate(2)

    def seconds(count: int) -> float:
        started = time.perf_counter()
        generate(count)
        return time.perf_counter() - started

    return [(seconds(tokens) - seconds(tokens // 2)) / (tokens - tokens // 2) for _ in range(repeats)]


def write_gguf(path: Path, layers: int, kind: str) -> None:
    """Writes a file of the shape with random weights of one of llama.cpp's types, without a tokenizer."""
    shape, type_ = SHAPE, gguf.GGMLQuantizationType[kind]
    hidden, width, experts = shape["hidden_size"], shape["moe_intermediate_size"], shape["num_experts"]
    q, kv = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(shape["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(width)
    writer.add_tokenizer_model("no_vocab")
    matrices = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
    matrices |= {f"ffn_{part}_exps": (experts, width, hidden) for part in ("gate", "up")}
    matrices |= {"ffn_down_exps": (experts, hidden, width)}
    rng = np.random.default_rng(0)

    def matrix(name: str, size: tuple[int, ...]) -> None:
        stored = gguf.quants.quantize(rng.standard_normal(size[-2:], np.float32) * size[-1] ** -0.5, type_)
        writer.add_tensor(name, np.broadcast_to(stored, (*size[:-2], *stored.shape)), raw_dtype=type_)

    matrix("token_embd.weight", (shape["vocab_size"], hidden))
    matrix("output.weight", (shape["vocab_size"], hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": 128, "attn_k_norm": 128}
    for number in range(layers):
        for name, size in matrices.items():
            matrix(f"blk.{number}.{name}.weight", size)
        writer.add_tensor(f"blk.{number}.ffn_gate_inp.weight", rng.standard_normal((experts, hidden), np.float32) / 45)
        for name, length in norms.items():
            writer.add_tensor(f"blk.{number}.{name}.weight", np.ones(length, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def time_llama(options: argparse.Namespace, kind: str) -> dict[int, list[float]]:
    """Returns the seconds of a decode step of llama.cpp, by sequences. kind: the type of its weights"""
    counts, cases = list(map(int, options.sequences.split(","))), {}
    half, generator = options.tokens // 2, torch.Generator().manual_seed(0)
    for count in counts:
        prompts = torch.randint(5, SHAPE["vocab_size"], (count, PROMPT), generator=generator).tolist()
        cases |= {f"{count} {some}": {"prompts": prompts, "max_tokens": some} for some in (half, options.tokens)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.files or folder) / f"mixture-{options.layers}-{kind}.gguf"
        if not path.exists():
            write_gguf(path, options.layers, kind)
        job = {"gguf": str(path), "threads": options.threads, "cases": cases}
        with Peer(python_of(options.llama), "llama", job) as peer:

            def step(count: int) -> float:
                few, many = (peer.run(f"{count} {some}")[0] for some in (half, options.tokens))
                return (many - few) / (options.tokens - half)

            found = {count: [step(count) for _ in range(options.repeats)] for count in counts}
    print(f"llama.cpp {kind}", {n: [round(1e3 * s, 1) for s in values] for n, values in found.items()}, flush=True)
    return found


def time_decoding(options: argparse.Namespace) -> list[dict]:
    """Returns the seconds of a decode step of each system, by sequences."""
    import transformers

    settings = SHAPE | {"num_hidden_layers": options.layers}
    llm = theirs = None
    if "prefold" in options.systems:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(settings))
            llm = LLM(
                folder, dtype="bfloat16", device="cpu", load_format="dummy", threads=options.threads, cache="off",
                max_batch_rows=512,
            )  # fmt: skip
    if "transformers" in options.systems:
        torch.set_default_dtype(DTYPE)
        theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings)).eval()
        torch.set_default_dtype(torch.float32)
    generator, results = torch.Generator().manual_seed(0), []
    for sequences in map(int, options.sequences.split(",")):
        prompts = torch.randint(5, settings["vocab_size"], (sequences, PROMPT), generator=generator)

        def ours(count: int, prompts: torch.Tensor = prompts) -> None:
            llm.generate(prompts.tolist(), max_tokens=count, ignore_eos=True)

        @torch.inference_mode()
        def other(count: int, prompts: torch.Tensor = prompts) -> None:
            theirs.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)

        systems = ({} if llm is None else {"prefold": ours}) | ({} if theirs is None else {"transformers": other})
        seconds = {name: per_token(run, options.tokens, options.repeats) for name, run in systems.items()}
        results.append({"sequences": sequences, "seconds": seconds})
        print(sequences, {name: [round(1e3 * s, 1) for s in values] for name, values in seconds.items()}, flush=True)
    llm = theirs = None
    for kind in options.types.split(",") if options.llama else ():
        for result, seconds in zip(results, time_llama(options, kind).values(), strict=True):
            result["seconds"][f"llama.cpp {kind}"] = seconds
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["step", "decode"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", default="2048,512,64,16,1")
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--systems", default="prefold,transformers", help="of decoding; none: an empty string")
    parser.add_argument("--llama", metavar="VENV")
    parser.add_argument("--files", metavar="FOLDER", help="where llama.cpp's files are kept, 5 GB for four layers")
    parser.add_argument("--types", default="BF16,Q8_0", help="of llama.cpp's weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    steps = time_steps(options) if "step" in options.parts else []
    decoding = time_decoding(options) if "decode" in options.parts else []
    lines = []
    for result in steps:
        mixture, dense = (result["seconds"][name] for name in ("mixture", "dense"))
        share = f"{median(dense) / median(mixture):.0%}"
        lines.append([result["rows"], *(f"{1e3 * median(v):.2f} ({spread(v)})" for v in (mixture, dense)), share])
    if lines:
        print(table(["rows", "mixture, ms", "dense, ms", "speed of dense"], lines))
    lines = [
        [result["sequences"], *(f"{1e3 * median(values):.1f}" for values in result["seconds"].values())]
        for result in decoding
    ]
    if lines:
        print(table(["sequences", *(f"{name}, ms a step" for name in decoding[0]["seconds"])], lines))
    write_json(options.json, benchmark="experts", step=steps, decode=decoding)


if __name__ == "__main__":
    main()
