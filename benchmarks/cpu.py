"""Times decoding side by side and prompts on a CPU: prefold, llama.cpp, OpenVINO GenAI and vLLM's CPU build, beside the
limit.

    python benchmarks/cpu.py [--model smollm2-135m | qwen3-0.6b] [--sequences 1,2,4,8,16,32,64,256] [--prompts 512,2000]
        [--layers N] [--repeats 5] [--llama VENV] [--types BF16,Q8_0] [--stored] [--int8]
        [--openvino VENV] [--vllm VENV] [--json FILE]

`smollm2-135m` is the built-in model; other names are those of random weights (`prefold models`). Every system runs the
same weights, and those of llama.cpp's --types are made of them; with --stored prefold runs these files too, its
weights in memory as stored, with --int8 it multiplies in int8 besides (these files and its own format), and OpenVINO
runs the file of Q8_0 (of a model with a tokenizer). Sequences share nothing: each has a prompt of its own, of 330
tokens where at most 8 run side by side and of 32 otherwise. All systems get the same token ids and generate greedily,
past the end of text. The time of a decode step is that of a run with --tokens tokens less that of a run with the first
one alone, over the steps between them, so that prompts are no part of it. The systems take turns within a round, with
nothing left in their caches; they stay loaded, and are stopped while it is not their turn. Tables show medians over
rounds.

The limit of a decode step is the time in which all threads read the bytes of the weights, of the LM head and of the K/V
that the step's rows see, or the time of its operations at the best rate of packed weights, where that is longer. The
limit of a prompt is the time of its operations. Both rates are measured in every round. llama.cpp reads fewer bytes
where its weights have fewer; the limit is that of --dtype.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from common import (
    Peer,
    attention_flops,
    attention_rate,
    export_folder,
    linear_rate,
    machine,
    median,
    python_of,
    read_bandwidth,
    spread,
    table,
    write_json,
)
from generate import forget, generate
from safetensors import safe_open

from prefold import LLM
from prefold.checkpoint import resolve

OURS = "prefold"
# Makes a GGUF file of another type: the arguments are the file, the new file, and the type's name in llama.cpp.
QUANTIZE = """
import ctypes, sys, llama_cpp as llama
options = llama.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = getattr(llama, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3]), True
sys.exit(llama.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options)))
"""


class Case(NamedTuple):
    """So many sequences, each with a prompt of its own."""

    sequences: int
    context: int
    max_tokens: int

    def prompts(self, vocabulary: int) -> list[np.ndarray]:
        rng = np.random.default_rng(self.sequences)
        return list(rng.integers(100, min(vocabulary, 40000), (self.sequences, self.context)).astype(np.int32))


def cases_of(arguments: argparse.Namespace) -> dict[str, Case]:
    """For each number of sequences a run that ends with the first token, and a whole run; and prompts."""
    cases = {}
    for count in map(int, filter(None, arguments.sequences.split(","))):
        context = 330 if count <= 8 else 32
        cases[f"first {count}"] = Case(count, context, 1)
        cases[f"decode {count}"] = Case(count, context, arguments.tokens)
    for length in map(int, filter(None, arguments.prompts.split(","))):
        cases[f"prompt {length}"] = Case(1, length, 1)
    return cases


def write_gguf(folder: Path, config, path: Path) -> None:
    """Writes the folder's weights as a GGUF file without a tokenizer; of the Qwen3 family."""
    blocks = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.layers)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                values = tensors.get_tensor(name).float().numpy()
                values = values if values.ndim == 1 else values.astype(np.float16)
                writer.add_tensor(blocks.get_name(name, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_peers(
    arguments, llm: LLM, cases: dict[str, Case], scratch: Path, stack: ExitStack
) -> tuple[dict[str, Peer], dict[str, Path]]:
    """Returns the systems beside ours, and GGUF files by their types."""
    folder = export_folder(llm.checkpoint, scratch / "model", llm.dtype)
    prompts = {
        name: [prompt.tolist() for prompt in case.prompts(llm.config.vocab_size)] for name, case in cases.items()
    }
    job = {
        "model": str(folder),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "block": 32,
        "max_model_len": max(case.context + case.max_tokens for case in cases.values()) + 1,
        "cases": {name: {"prompts": prompts[name], "max_tokens": case.max_tokens} for name, case in cases.items()},
    }
    peers, files = {}, {}
    if arguments.llama:
        python = python_of(arguments.llama)
        whole = scratch / "whole.gguf"
        if llm.checkpoint.gguf is not None:
            whole = llm.checkpoint.path
        else:
            write_gguf(folder, llm.config, whole)
        for kind in arguments.types.split(","):
            made = files[kind] = scratch / f"{kind}.gguf"
            subprocess.run([python, "-c", QUANTIZE, str(whole), str(made), kind], check=True, stderr=subprocess.DEVNULL)
            peer = stack.enter_context(Peer(python, "llama", job | {"gguf": str(made)}))
            peers[f"llama.cpp {kind} (llama-cpp-python {peer.version})"] = peer
    if arguments.openvino:
        peer = stack.enter_context(Peer(python_of(arguments.openvino), "openvino", job | {"gguf": str(files["Q8_0"])}))
        peers[f"OpenVINO GenAI {peer.version} Q8_0"] = peer
    if arguments.vllm:
        peer = stack.enter_context(Peer(python_of(arguments.vllm), "vllm", job))
        peers[f"vLLM {peer.version}"] = peer
    return peers, files


def limit(config, case: Case, rates: dict[str, float], itemsize: int) -> float:
    """Seconds of a decode step, or of the prompt where one token is generated."""
    head = 2 * config.hidden * config.vocab_size
    if case.max_tokens == 1:
        pairs = case.sequences * case.context * (case.context + 1) // 2
        operations = case.sequences * (case.context * config.linear_flops + head)
        attention = len(config.planes) * attention_flops(config, pairs)
        return operations / rates["linear"] + attention / rates["attention"]
    seen = case.sequences * (case.context + case.max_tokens // 2)
    moved = itemsize * ((config.linear_flops + head) // 2 + len(config.planes) * 2 * config.kv_size * seen)
    return max(moved / rates["bandwidth"], case.sequences * (config.linear_flops + head) / rates["linear"])


def run_ours(llm: LLM, case: Case) -> float:
    forget(llm)
    started = time.perf_counter()
    generate(llm, case.prompts(llm.config.vocab_size), case.max_tokens)
    return time.perf_counter() - started


def measure(ours: dict[str, LLM], peers: dict[str, Peer], cases: dict[str, Case], arguments) -> tuple[dict, list[dict]]:
    """Seconds of every round, by system and case; and the rates of every round."""
    seconds: dict[str, dict[str, list[float]]] = {name: {case: [] for case in cases} for name in (*ours, *peers)}
    rates, llm = [], ours[OURS]
    for case in cases.values():
        for own in ours.values():
            run_ours(own, case._replace(max_tokens=min(4, case.max_tokens)))  # warm-up
    for _ in range(arguments.repeats):
        rates.append(
            {
                "linear": linear_rate(llm.config, llm.dtype),
                "attention": attention_rate(llm.config, llm.dtype),
                "bandwidth": read_bandwidth(),
            }
        )
        for name, case in cases.items():
            for system, own in ours.items():
                seconds[system][name].append(run_ours(own, case))
            for system, peer in peers.items():
                seconds[system][name].append(peer.run(name)[0])
            print("  " + name, *(f"{by[name][-1]:.3f}" for by in seconds.values()), flush=True)
    return seconds, rates


def report(model: str, llm: LLM, seconds: dict, rates: list[dict], cases: dict[str, Case]) -> None:
    rate = {name: median([one[name] for one in rates]) for name in rates[0]}
    print(f"\n{model}, {llm.dtype}: memory is read at {rate['bandwidth'] / 1e9:.1f} GB/s, ", end="")
    print(f"products run at {rate['linear'] / 1e9:,.0f} GFLOP/s, attention at {rate['attention'] / 1e9:,.0f}\n")
    rows = []
    for name, case in cases.items():
        if name.startswith("first"):
            continue
        least, own = limit(llm.config, case, rate, llm.dtype.itemsize), None
        tokens = case.sequences * (1 if case.max_tokens > 1 else case.context)
        for system, by in seconds.items():
            taken = by[name]
            if case.max_tokens > 1:
                pairs = zip(taken, by[f"first {case.sequences}"], strict=True)
                taken = [(whole - first) / (case.max_tokens - 1) for whole, first in pairs]
            own = own or taken
            ratio = median([other / one for other, one in zip(taken, own, strict=True)])
            rows.append([name, system, f"{1e3 * median(taken):.2f}", spread([1e3 * one for one in taken]),
                         f"{tokens / median(taken):,.0f}", f"{ratio:.2f}", f"{least / median(taken):.0%}"])  # fmt: skip
    print(table(["case", "system", "ms", "from-to", "tokens/s", "time, ours 1", "of the limit"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers of a model of random weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sequences", default="1,2,4,8,16,32,64,256")
    parser.add_argument("--prompts", default="512,2000")
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama", metavar="VENV")
    parser.add_argument("--types", default="BF16,Q8_0", help="types of llama.cpp's weights")
    parser.add_argument("--stored", action="store_true", help="run the files of --types, too")
    parser.add_argument("--int8", action="store_true", help="multiply in int8, too: those files, and our format")
    parser.add_argument("--openvino", metavar="VENV", help="with --llama, which makes its file")
    parser.add_argument("--vllm", metavar="VENV")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if (arguments.stored or arguments.openvino) and not arguments.llama:
        parser.error("llama.cpp writes the files of --types: give --llama")
    if arguments.openvino and "Q8_0" not in arguments.types.split(","):
        parser.error("OpenVINO runs the file of Q8_0: name it in --types")

    random = arguments.model != "smollm2-135m"
    checkpoint = resolve(arguments.model, load_format="dummy" if random else "auto")
    if arguments.layers:
        checkpoint = replace(checkpoint, config=checkpoint.config | {"num_hidden_layers": arguments.layers})
    options = {"dtype": arguments.dtype, "threads": arguments.threads, "max_running": 256}
    llm = LLM(checkpoint, weights="dtype", **options)
    cases = cases_of(arguments)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers, files = open_peers(arguments, llm, cases, scratch, stack)
        ours = {OURS: llm}
        for kind, file in files.items() if arguments.stored else ():
            ours[f"{OURS}, {kind} as stored"] = LLM(str(file), weights="file", **options)
        if arguments.int8 and checkpoint.gguf is None:
            ours[f"{OURS}, int8 of its own"] = LLM(checkpoint, weights="int8", arithmetic="int8", **options)
        for kind, file in files.items() if arguments.int8 else ():
            if kind not in ("BF16", "F16", "F32"):
                ours[f"{OURS}, {kind} in int8"] = LLM(str(file), arithmetic="int8", **options)
        seconds, rates = measure(ours, peers, cases, arguments)
    rate = {name: median([one[name] for one in rates]) for name in rates[0]}
    limits = {name: limit(llm.config, case, rate, llm.dtype.itemsize) for name, case in cases.items()}
    about = {"model": arguments.model, "dtype": arguments.dtype, "tokens": arguments.tokens}
    write_json(arguments.json, benchmark="cpu", **about, seconds=seconds, rates=rates, limit_seconds=limits)
    report(arguments.model, llm, seconds, rates, cases)
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
