"""Time decode steps and prompts on a CPU: prefold, llama.cpp, OpenVINO GenAI and vLLM, and the machine's limit.

    python benchmarks/cpu.py --sequences 1,8 --prompts 512 --llama VENV --vllm VENV --json FILE

`smollm2-135m` is the built-in model; other names (see `prefold models`) have random weights. All systems run the same
weights; the files for llama.cpp (--types) are made from them. With --stored prefold also runs these files, and with
--int8 it also multiplies in int8. OpenVINO runs the file of type Q8_0, and needs a model with a tokenizer.

Sequences share nothing. Each has its own prompt: 330 tokens if there are at most 8 sequences, else 32 tokens. All
systems get the same token ids and generate greedily, past the end of text. The time of a decode step is (time of a run
with --tokens tokens - time of a run with one token) / (--tokens - 1). The systems take turns within a round, with empty
caches. They stay loaded, and are stopped while another system runs.

The limit of a decode step is the longer of two times: reading the weights, the LM head and the K/V of all visible rows
with all threads; and the step's operations at the best rate of packed weights. The limit of a prompt is the time of its
operations. Both rates are measured in every round. The limit is for --dtype: llama.cpp reads fewer bytes if its weights
are smaller.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import gguf
import numpy as np
from generate import forget, generate
from harness import (
    NUMBERS,
    Listed,
    Peer,
    attention_flops,
    benchmark,
    clocked,
    compared,
    export_folder,
    median,
    open_peers,
    python_of,
    rates_of,
)
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
    """Sequences, each with its own prompt."""

    sequences: int
    context: int
    max_tokens: int

    def prompts(self, vocabulary: int) -> list[np.ndarray]:
        rng = np.random.default_rng(self.sequences)
        return list(rng.integers(100, min(vocabulary, 40000), (self.sequences, self.context)).astype(np.int32))


def cases_of(arguments: SimpleNamespace) -> dict[str, Case]:
    """Return, for each number of sequences, a run of one token and a whole run; and the prompts."""
    cases = {}
    for count in arguments.sequences:
        context = 330 if count <= 8 else 32
        cases[f"first {count}"] = Case(count, context, 1)
        cases[f"decode {count}"] = Case(count, context, arguments.tokens)
    for length in arguments.prompts:
        cases[f"prompt {length}"] = Case(1, length, 1)
    return cases


def write_gguf(folder: Path, config, path: Path) -> None:
    """Write the weights of a Qwen3 folder as a GGUF file without a tokenizer."""
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


def open_systems(
    arguments: SimpleNamespace, llm: LLM, cases: dict[str, Case], scratch: Path, stack: ExitStack
) -> tuple[dict[str, Peer], dict[str, Path]]:
    """Return the other systems, and GGUF files by their types."""
    folder = export_folder(llm.checkpoint, scratch / "model", llm.dtype)
    prompts = {
        name: [prompt.tolist() for prompt in case.prompts(llm.config.vocab_size)] for name, case in cases.items()
    }
    job = {
        "model": str(folder),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "max_model_len": max(case.context + case.max_tokens for case in cases.values()) + 1,
        "cases": {name: {"prompts": prompts[name], "max_tokens": case.max_tokens} for name, case in cases.items()},
    }
    files = {}
    if arguments.llama:
        whole = scratch / "whole.gguf"
        if llm.checkpoint.gguf is not None:
            whole = llm.checkpoint.path
        else:
            write_gguf(folder, llm.config, whole)
        for kind in arguments.types:
            made = files[kind] = scratch / f"{kind}.gguf"
            command = [python_of(arguments.llama), "-c", QUANTIZE, str(whole), str(made), kind]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    peers = open_peers(stack, arguments, job, files=files)
    if arguments.openvino:
        peer = stack.enter_context(Peer(python_of(arguments.openvino), "openvino", job | {"gguf": str(files["Q8_0"])}))
        peers[f"OpenVINO GenAI {peer.version} Q8_0"] = peer
    return peers, files


def limit(config, case: Case, rates: dict[str, float], itemsize: int) -> float:
    """Return the least seconds of a decode step, or of the prompt if one token is generated."""
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
    return clocked(lambda: generate(llm, case.prompts(llm.config.vocab_size), case.max_tokens))[0]


def measure(
    ours: dict[str, LLM], peers: dict[str, Peer], cases: dict[str, Case], repeats: int
) -> tuple[dict[str, dict[str, list[float]]], list[dict[str, float]]]:
    """Return the seconds of every round by system and case, and the rates of every round."""
    seconds: dict[str, dict[str, list[float]]] = {name: {case: [] for case in cases} for name in (*ours, *peers)}
    rates, llm = [], ours[OURS]
    for case in cases.values():
        for own in ours.values():
            run_ours(own, case._replace(max_tokens=min(4, case.max_tokens)))  # warm-up
    for _ in range(repeats):
        rates.append(rates_of(llm.config, llm.dtype))
        for name, case in cases.items():
            for system, own in ours.items():
                seconds[system][name].append(run_ours(own, case))
            for system, peer in peers.items():
                seconds[system][name].append(peer.run(name)[0])
            print("  " + name, *(f"{by[name][-1]:.3f}" for by in seconds.values()), flush=True)
    return seconds, rates


def report(seconds: dict, limits: dict[str, float], cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        if name.startswith("first"):
            continue
        taken = {system: by[name] for system, by in seconds.items()}
        if case.max_tokens > 1:
            first = f"first {case.sequences}"
            taken = {
                system: [(a - b) / (case.max_tokens - 1) for a, b in zip(by[name], by[first], strict=True)]
                for system, by in seconds.items()
            }
        tokens = case.sequences * (1 if case.max_tokens > 1 else case.context)
        rate = {system: f"{tokens / median(values):,.0f}" for system, values in taken.items()}
        print(f"\n{name}\n\n{compared(taken, limit=limits[name], unit='ms', columns={'tokens/s': rate})}")


@benchmark("model", "layers", "dtype", "threads", "repeats", "llama", "vllm", "blocks", repeats=5)
@click.option(
    "--sequences",
    type=NUMBERS,
    default="1,2,4,8,16,32,64,256",
    show_default=True,
    help="Numbers of sequences that decode together.",
)
@click.option("--prompts", type=NUMBERS, default="512,2000", show_default=True, help="Lengths of prompts in tokens.")
@click.option("--tokens", type=int, default=33, show_default=True, help="Tokens generated per sequence.")
@click.option("--types", type=Listed(), default="BF16,Q8_0", show_default=True, help="Types of llama.cpp's weights.")
@click.option("--stored", is_flag=True, help="Also run the files of --types in prefold.")
@click.option("--int8", is_flag=True, help="Multiply in int8 in prefold too: these files, and its own format.")
@click.option("--openvino", metavar="VENV", help="Run OpenVINO GenAI too; needs --llama, which makes its file.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    if (arguments.stored or arguments.openvino) and not arguments.llama:
        raise click.UsageError("llama.cpp writes the files of --types: give --llama")
    if arguments.openvino and "Q8_0" not in arguments.types:
        raise click.UsageError("OpenVINO runs the file of Q8_0: name it in --types")
    random = arguments.model != "smollm2-135m"
    checkpoint = resolve(arguments.model, load_format="dummy" if random else "auto")
    if arguments.layers:
        checkpoint = replace(checkpoint, config=checkpoint.config | {"num_hidden_layers": arguments.layers})
    options = {"dtype": arguments.dtype, "threads": arguments.threads, "max_running": 256}
    llm = LLM(checkpoint, weights="dtype", **options)
    cases = cases_of(arguments)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers, files = open_systems(arguments, llm, cases, scratch, stack)
        ours = {OURS: llm}
        for kind, file in files.items() if arguments.stored else ():
            ours[f"{OURS}, {kind} as stored"] = LLM(str(file), weights="file", **options)
        if arguments.int8 and checkpoint.gguf is None:
            ours[f"{OURS}, int8 of its own"] = LLM(checkpoint, weights="int8", arithmetic="int8", **options)
        for kind, file in files.items() if arguments.int8 else ():
            if kind not in ("BF16", "F16", "F32"):
                ours[f"{OURS}, {kind} in int8"] = LLM(str(file), arithmetic="int8", **options)
        seconds, rates = measure(ours, peers, cases, arguments.repeats)
    rate = {name: median([one[name] for one in rates]) for name in rates[0]}
    limits = {name: limit(llm.config, case, rate, llm.dtype.itemsize) for name, case in cases.items()}
    report(seconds, limits, cases)
    about = {"model": arguments.model, "dtype": arguments.dtype, "tokens": arguments.tokens}
    return about | {"seconds": seconds, "rates": rates, "limit_seconds": limits}


if __name__ == "__main__":
    main()
