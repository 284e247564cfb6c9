"""Time reranking on a CPU: prefold's three modes, transformers, vLLM and llama.cpp on the same prompts.

    python benchmarks/rerank.py --data msmarco.jsonl.gz --transformers --vllm VENV --llama VENV --json FILE

All systems run the same weights; llama.cpp runs the model's GGUF file as stored. The data has one query per line:
{"query": ..., "passages": [{"text": ...}, ...]}. Times are from token ids to scores, without loading and warm-up.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from harness import (
    Listed,
    Rounds,
    benchmark,
    compared,
    export_folder,
    limit_seconds,
    median,
    open_peers,
    read_jsonl,
    run_engine,
)

from prefold import LLM
from prefold.trie import Trie


@benchmark("data", "model", "dtype", "threads", "repeats", "transformers", "vllm", "llama", "blocks")
@click.option("--pairs", type=int, default=800, show_default=True, help="Number of query-passage pairs.")
@click.option("--max-batch-rows", type=int, help="Rows of a step.")
@click.option("--modes", type=Listed(), default="full,mlp,off", show_default=True, help="prefold's sharing modes.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    options = {"dtype": arguments.dtype, "threads": arguments.threads, "max_batch_rows": arguments.max_batch_rows}
    llm = LLM(arguments.model, **options)
    task = llm.task("rerank")
    pairs = [(line["query"], p["text"]) for line in read_jsonl(arguments.data) for p in line["passages"]]
    requests = [work.requests[0] for work in task.prepare(pairs[: arguments.pairs])]
    prompts = [request.tokens for request in requests]
    trie = Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]))
    print(f"{len(prompts)} pairs, {trie.num_tokens} tokens, {trie.num_rows} unique")
    for mode in arguments.modes:  # warm-up
        run_engine(llm.engine, requests[:24], task.readout, mode)
    rounds, limits = Rounds(), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {
            "model": str(export_folder(llm.checkpoint, folder, llm.dtype)),
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "prompts": [p.tolist() for p in prompts],
            "ids": list(task.readout.ids),
        }
        files = {} if llm.checkpoint.gguf is None else {"": llm.checkpoint.gguf.path}
        peers = open_peers(stack, arguments, job, files=files)
        for _ in range(arguments.repeats):
            limits.append(limit_seconds(llm.config, trie, llm.dtype, num_reads=len(set(trie.last_row.tolist()))))
            for mode in arguments.modes:
                rounds.run(
                    f"prefold {mode}",
                    lambda mode=mode: [r.values for r in run_engine(llm.engine, requests, task.readout, mode)],
                )
            for title, peer in peers.items():
                rounds.add(title, *peer.run())
    scores = {name: np.array([v[0] - v[1] for v in values]) for name, values in rounds.found.items()}
    reference = next(iter(scores.values()))
    columns = {
        "pairs/s": {name: f"{len(prompts) / median(values):.1f}" for name, values in rounds.seconds.items()},
        "largest difference of a logit": {n: f"{np.abs(s - reference).max():.2f}" for n, s in scores.items()},
    }
    limit = median([one["seconds"] for one in limits])
    print(compared(rounds.seconds, limit=limit, columns=columns))
    counts = {"pairs": len(prompts), "tokens": trie.num_tokens, "rows": trie.num_rows}
    about = {"model": arguments.model, "dtype": arguments.dtype}
    return about | counts | {"seconds": rounds.seconds, "limits": limits}


if __name__ == "__main__":
    main()
