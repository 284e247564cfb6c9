"""Times reranking on a CPU: prefold's three modes, transformers, vLLM and llama.cpp on the same prompts, in one run.

    python benchmarks/rerank.py --data msmarco.jsonl.gz --vllm VENV [--llama VENV] [--pairs 800] [--repeats 3]
        [--json FILE]

All have the same weights, llama.cpp those of the model's GGUF file as it stores them.

Data: a line a query, {"query": ..., "passages": [{"text": ...}, ...]}. Timed from token ids to scores;
loading, and each system's warm-up, are not. Systems take turns, so that a drift of the machine's speed hits all.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack

import numpy as np
import torch
from common import (
    Peer,
    export_folder,
    limit_seconds,
    machine,
    median,
    python_of,
    read_jsonl,
    run_engine,
    spread,
    table,
    timed,
    write_json,
)

from prefold import LLM
from prefold.prefix import Trie


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--pairs", type=int, default=800)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-batch-rows", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--modes", default="full,mlp,off")
    parser.add_argument("--transformers", action="store_true", help="also transformers, batches of 16 by length")
    parser.add_argument("--vllm", help="a virtual environment with vLLM in it")
    parser.add_argument("--llama", help="a virtual environment with llama-cpp-python in it")
    parser.add_argument("--blocks", default="32,default", help="block sizes of vLLM, each in a process of its own")
    parser.add_argument("--json")
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model, dtype=arguments.dtype, threads=arguments.threads, max_batch_rows=arguments.max_batch_rows
    )
    task = llm.task("rerank")
    pairs = [(line["query"], p["text"]) for line in read_jsonl(arguments.data) for p in line["passages"]]
    works = task.prepare(pairs[: arguments.pairs])
    requests = [work.requests[0] for work in works]
    prompts = [request.tokens for request in requests]
    trie = Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]))
    print(f"{len(prompts)} pairs, {trie.num_tokens} tokens, {trie.num_rows} unique")

    seconds: dict[str, list[float]] = {}
    scores: dict[str, np.ndarray] = {}
    limits = []
    modes = arguments.modes.split(",")
    for mode in modes:  # warm-up
        run_engine(llm.engine, requests[:24], task.readout, mode)

    def run_mode(mode: str) -> None:
        results = run_engine(llm.engine, requests, task.readout, mode)
        scores[f"prefold {mode}"] = np.array([r.values[0] - r.values[1] for r in results])

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {
            "model": str(export_folder(llm.checkpoint, folder, llm.dtype)),
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "prompts": [p.tolist() for p in prompts],
            "ids": list(task.readout.ids),
        }
        peers = []
        if arguments.transformers:
            peers.append(("transformers", "transformers", python_of(None), {}))
        if arguments.vllm:
            python = python_of(arguments.vllm)
            sizes = {name: {"block": int(name)} if name != "default" else {} for name in arguments.blocks.split(",")}
            peers += [(f"vLLM, block {name}", "vllm", python, options) for name, options in sizes.items()]
        if arguments.llama:
            gguf = str(llm.checkpoint.gguf.path)
            peers.append(("llama.cpp", "llama", python_of(arguments.llama), {"gguf": gguf}))
        opened = {}
        for name, system, python, options in peers:
            peer = stack.enter_context(Peer(python, system, job | options))
            opened[f"{name} ({system} {peer.version})"] = peer
        for round_number in range(arguments.repeats):
            limits.append(limit_seconds(llm.config, trie, llm.dtype, num_reads=len(set(trie.last_row.tolist()))))
            for mode in modes:
                seconds.setdefault(f"prefold {mode}", []).extend(timed(lambda mode=mode: run_mode(mode), 1))
                print(f"  round {round_number + 1}: prefold {mode}: {seconds[f'prefold {mode}'][-1]:.1f} s", flush=True)
            for title, peer in opened.items():
                taken, values = peer.run()
                seconds.setdefault(title, []).append(taken)
                scores[title] = np.array([v[0] - v[1] for v in values])
                print(f"  round {round_number + 1}: {title}: {seconds[title][-1]:.1f} s", flush=True)

    limit = median([one["seconds"] for one in limits])
    ours = median(seconds["prefold full"]) if "full" in modes else limit
    reference = next(iter(scores.values()))
    rows = [
        [
            name,
            f"{median(values):.1f}",
            spread(values),
            f"{len(prompts) / median(values):.1f}",
            f"{median(values) / ours:.2f}",
            f"{limit / median(values):.0%}",
            f"{np.abs(scores[name] - reference).max():.2f}",
        ]
        for name, values in seconds.items()
    ]
    rows.append(
        ["limit", f"{limit:.1f}", spread([o["seconds"] for o in limits]), "", f"{limit / ours:.2f}", "100%", ""]
    )
    print(machine())
    print(
        f"limit: linears {median([o['linear_gflops'] for o in limits]):.0f} GFLOP/s, "
        f"attention {median([o['attention_gflops'] for o in limits]):.0f} GFLOP/s"
    )
    print(table(["system", "s", "spread", "pairs/s", "x full", "of limit", "max |d logit|"], rows))
    record = {"model": arguments.model, "dtype": arguments.dtype, "pairs": len(prompts)}
    counts = {"tokens": trie.num_tokens, "rows": trie.num_rows}
    write_json(arguments.json, benchmark="rerank", **record, **counts, seconds=seconds, limits=limits)


if __name__ == "__main__":
    main()
