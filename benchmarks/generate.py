"""Time generation on a CPU: prefold, transformers, vLLM with several block sizes, and the machine's limit.

    python benchmarks/generate.py --data FOLDER --cases groups,unrelated,short --vllm VENV --transformers --json FILE

Cases: `groups`, `mmlu`, `unrelated`, `airline` (steps of agents) and `short`. All systems get the same token ids and
run the same weights. They generate a fixed number of tokens greedily, past the end of text. The systems take turns
within a round, with empty caches. They stay loaded, and are stopped while another system runs.

The limit is the least time that this machine needs. It is a sum, with rates from the same round:

    (rows of the prompts' trie + decode rows) x FLOPs of a row's linears, and one LM head row for every generated token,
    at the best rate of packed weights (few decode rows do not reach this rate)
  + FLOPs of all (query row, visible key row) pairs, at the best rate of prefold's attention kernel
  + for every decode step of all requests together: the bytes of the weights, of the LM head and of the K/V of every
    visible row, at the rate at which all threads read memory

"unlike ours" has the number of requests with other tokens than prefold's, and the number of equal tokens before the
first difference. In bfloat16 some requests differ: of two about equally likely tokens either may win, and the text then
continues differently.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from classify import spread_over
from harness import (
    Listed,
    Peer,
    Rounds,
    benchmark,
    clocked,
    compared,
    export_folder,
    generation_limit,
    median,
    open_peers,
    rates_of,
    read_jsonl,
    spread,
)

from prefold import LLM
from prefold.spec.requests import Generated, Stats

OURS = "prefold"


def continued(llm: LLM, prompts: list[np.ndarray], max_tokens: int) -> list[Generated]:
    return llm.generate(prompts, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def generate(llm: LLM, prompts: list[np.ndarray], max_tokens: int) -> list[list[int]]:
    return [list(one.tokens) for one in continued(llm, prompts, max_tokens)]


def forget(llm: LLM) -> None:
    """Forget statistics and cached K/V of earlier calls."""
    llm.engine.reset_stats()
    if llm.cache is not None:
        llm.cache.clear()


def run_ours(llm: LLM, case: Case) -> tuple[float, list[list[int]], Stats]:
    forget(llm)
    return *clocked(lambda: generate(llm, case.prompts, case.max_tokens)), llm.stats


Prompts = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """Prompts, and the number of tokens to generate for each."""

    about: str  # heading of the table
    prompts: Prompts
    max_tokens: int

    @property
    def job(self) -> dict[str, Any]:
        """Return the case in the form of a peer's job."""
        return {"prompts": [prompt.tolist() for prompt in self.prompts], "max_tokens": self.max_tokens}


class Pool:
    """Text as token ids (GSM8K's questions and answers). Each piece is used once."""

    def __init__(self, data: Path, tokenizer):
        lines = read_jsonl(data / "gsm8k" / "dev.jsonl.gz")
        texts = [f"{line['question']}\n{line['answer']}\n\n" for line in lines]
        self._ids = np.concatenate(tokenizer.encode_batch(texts, special=False))
        self._at = 0

    def take(self, count: int) -> np.ndarray:
        if self._at + count > len(self._ids):
            raise RuntimeError("there is no more text")
        self._at += count
        return self._ids[self._at - count : self._at]


def groups(data: Path, llm) -> Case:
    pool = Pool(data, llm.tokenizer)
    prompts = [
        np.concatenate((shared, pool.take(64))) for shared in [pool.take(256) for _ in range(8)] for _ in range(8)
    ]
    return Case("64 requests, 8 groups, 256 shared + 64 own, 32 out", prompts, 32)


def mmlu(data: Path, llm) -> Case:
    prefixes = {line["prefix_id"]: line["prefix"] for line in read_jsonl(data / "mmlu_5shot" / "prefixes.jsonl.gz")}
    items = spread_over(read_jsonl(data / "mmlu_5shot" / "dev.jsonl.gz"), 240)
    prompts = llm.tokenizer.encode_batch([prefixes[item["prefix_id"]] + item["suffix"] for item in items])
    return Case("MMLU 5-shot, 240 questions, 8 out", prompts, 8)


def unrelated(data: Path, llm) -> Case:
    pool = Pool(data, llm.tokenizer)
    return Case("64 unrelated prompts, 128 in, 128 out", [pool.take(128) for _ in range(64)], 128)


def airline(data: Path, llm, runs: int = 6, max_tokens: int = 48) -> Case:
    """Return a prompt for every step of an agent in several runs: policy and tools, then the conversation so far.

    Each run has another task. A prompt that is too long loses its end, so that its shared start stays.
    """
    (shared,) = read_jsonl(data / "tau_airline" / "shared.jsonl.gz")
    by_task = {line["task_id"]: line for line in reversed(read_jsonl(data / "tau_airline" / "dev.jsonl.gz"))}
    tools = "\n".join(json.dumps(tool) for tool in shared["tools"])
    system = {"role": "system", "content": f"{shared['system']}\n\n# Tools\n\n{tools}"}
    texts = []
    for run in spread_over([by_task[number] for number in sorted(by_task)], runs):
        for number, message in enumerate(run["messages"]):
            if message["role"] == "assistant":
                talk = [system, *map(plain_message, run["messages"][:number])]
                texts.append(llm.tokenizer.render_chat(talk, add_generation_prompt=True))
    room = llm.config.max_positions - max_tokens
    prompts = [ids[:room] for ids in llm.tokenizer.encode_batch(texts, special=False)]
    return Case(f"tau-bench airline, {len(prompts)} steps of {runs} runs, {max_tokens} out", prompts, max_tokens)


def plain_message(message: dict) -> dict:
    """Return a message for a chat template without tools, with calls as JSON text."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    content = "\n".join([message.get("content") or "", *map(json.dumps, calls)]).strip()
    return {"role": message["role"], "content": content}


def short(data: Path, llm) -> Case:
    """Return many groups with system prompts that are shorter than most blocks of a paged cache."""
    pool, rng = Pool(data, llm.tokenizer), np.random.default_rng(0)
    prompts = [
        np.concatenate((shared, pool.take(int(rng.integers(32, 49)))))
        for shared in [pool.take(int(rng.integers(20, 61))) for _ in range(32)]
        for _ in range(8)
    ]
    return Case("256 requests, 32 groups, 20-60 shared + about 40 own, 32 out", prompts, 32)


CASES: dict[str, Callable[[Path, object], Case]] = {
    "groups": groups,
    "mmlu": mmlu,
    "unrelated": unrelated,
    "airline": airline,
    "short": short,
}


def unlike(tokens: list[list[int]], ours: list[list[int]]) -> str:
    """Return the number of outputs that differ, and the median number of equal tokens before the first difference."""
    common = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(tokens, ours, strict=True)
    ]
    shared = [count for count in common if count is not None]
    after = f", after {median(shared):.0f} tokens" if shared else ""
    return f"{len(shared)} of {len(tokens)}{after}"


def measure(name: str, case: Case, llm: LLM, peers: dict[str, Peer], arguments: SimpleNamespace) -> dict[str, Any]:
    """Run all rounds of a case, print its table, and return its part of the JSON file."""
    rounds, limits = Rounds(name), []
    generate(llm, case.prompts[:8], 4)  # warm-up
    for number in range(arguments.repeats):
        rates = rates_of(llm.config, llm.dtype)
        limits.append(generation_limit(llm.config, case.prompts, case.max_tokens, rates, llm.dtype) | {"rates": rates})
        seconds, tokens, stats = run_ours(llm, case)
        rounds.add(OURS, seconds, tokens)
        for system, peer in peers.items():
            if "transformers" not in system or number < arguments.transformers_repeats:
                rounds.add(system, *peer.run(name))
    ours, out = rounds.found[OURS], len(case.prompts) * case.max_tokens
    others = {system: unlike(tokens, ours) for system, tokens in rounds.found.items() if system != OURS}
    rate = {system: f"{out / median(seconds):.0f}" for system, seconds in rounds.seconds.items()}
    made, one = stats.generation, limits[-1]
    print(
        f"\n{case.about}\n{len(case.prompts)} requests, {one['prompt_tokens']} tokens of prompts, {one['prompt_rows']} "
        f"unique; computed: {made.prefill_rows} prompt rows, {made.decode_rows} decode rows in {made.steps} steps, "
        f"{made.recomputed_rows} again"
    )
    warn_of_rates([limit["rates"] for limit in limits])
    limit = median([one["seconds"] for one in limits])
    print(compared(rounds.seconds, limit=limit, columns={"tokens/s": rate, "unlike ours": others}), flush=True)
    memory = {"peak": made.kv_bytes_peak, "unshared_peak": made.kv_bytes_unshared_peak}
    requests = {"requests": len(case.prompts), "max_tokens": case.max_tokens, "unlike": others}
    return {"case": name, "about": case.about, **requests, "seconds": rounds.seconds, "limits": limits, "kv": memory}


def warn_of_rates(rates: list[dict[str, float]]) -> None:
    """Warn if a rate of the machine differs by more than a factor of 3 between rounds."""
    for name in rates[0]:
        values = [one[name] / 1e9 for one in rates]
        if max(values) > 3 * min(values):
            print(f"WARNING: the {name} rate was {spread(values)} G/s over the rounds; do not trust the limit")


@benchmark("data", "model", "dtype", "threads", "repeats", "transformers", "vllm", "blocks", blocks="32,64,128")
@click.option("--cases", type=Listed(among=CASES), default=",".join(CASES), show_default=True, help="Cases to run.")
@click.option("--transformers-repeats", type=int, default=1, show_default=True, help="Rounds of transformers.")
@click.option("--limit", type=int, help="Run only the first N requests of each case.")
@click.option("--cache", default="lru", show_default=True, help="prefold's cache policy.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, cache=arguments.cache)
    cases = {name: CASES[name](arguments.data, llm) for name in arguments.cases}
    cases = {name: replace(case, prompts=case.prompts[: arguments.limit]) for name, case in cases.items()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {
            "model": str(export_folder(llm.checkpoint, folder, llm.dtype)),
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "max_model_len": 1 + max(len(p) + case.max_tokens for case in cases.values() for p in case.prompts),
            "cases": {name: case.job for name, case in cases.items()},
        }
        peers = open_peers(stack, arguments, job)
        found = [measure(name, case, llm, peers, arguments) for name, case in cases.items()]
    return {"dtype": arguments.dtype, "model": arguments.model, "cases": found}


if __name__ == "__main__":
    main()
