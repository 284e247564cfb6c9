"""Times generation on a CPU: prefold, transformers and several block sizes of vLLM's CPU build, beside the limit.

    python benchmarks/generate.py --data FOLDER [--cases groups,mmlu,...] [--vllm VENV] [--transformers] [--json FILE]

The cases are those of generation_cases.py: `groups` (a), `mmlu` (b), `unrelated` (c), `airline` (d), `short` (e). Every
system gets the same token ids, runs the same weights and generates greedily, past the end of text, so many tokens. The
systems take turns within a round, each with nothing left in its cache from the round before; tables show medians over
rounds. Peers stay loaded, and are stopped while it is not their turn.

The limit is the time that this machine needs at least, measured in the same round:

    (rows of the prompts' trie + decode rows) x FLOPs of a row's linears, and one LM head row for every token that is
    generated, at the best rate of packed weights (that of large batches: a few decode rows do not reach it)
  + FLOPs of all (query row, visible key row) pairs, at the best rate of our attention kernel
  + for every decode step, were all requests to run side by side: the bytes of the weights and the LM head, and of the
    K/V of every row that is visible to someone, at the rate at which all threads read memory

"unlike ours" counts the requests whose tokens differ from prefold's, and says how many tokens they have in common
before that. In bfloat16 some do: where two tokens are about as likely either may be picked, and another text follows.

The case `cache` asks 60 unrelated questions, one call each, with the radix cache and without, and compares the outputs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from common import (
    Peer,
    attention_rate,
    export_folder,
    generation_limit,
    linear_rate,
    machine,
    median,
    python_of,
    read_bandwidth,
    spread,
    table,
    write_json,
)
from generation_cases import CASES, Case, questions

from prefold import LLM
from prefold.types import Generated, Stats

OURS = "prefold"


def continued(llm: LLM, prompts: list[np.ndarray], max_tokens: int) -> list[Generated]:
    return llm.generate(prompts, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def generate(llm: LLM, prompts: list[np.ndarray], max_tokens: int) -> list[list[int]]:
    return [list(one.tokens) for one in continued(llm, prompts, max_tokens)]


def forget(llm: LLM) -> None:
    """Nothing of earlier calls: no statistics, and no K/V that could be used again."""
    llm.engine.reset_stats()
    if llm.cache is not None:
        llm.cache.clear()


def run_ours(llm: LLM, case: Case) -> tuple[float, list[list[int]], Stats]:
    forget(llm)
    started = time.perf_counter()
    tokens = generate(llm, case.prompts, case.max_tokens)
    return time.perf_counter() - started, tokens, llm.stats


def open_peers(arguments, folder: str, cases: dict[str, Case], stack: ExitStack) -> dict[str, Peer]:
    """The systems that start, by their names in the tables."""
    longest = max(len(prompt) + case.max_tokens for case in cases.values() for prompt in case.prompts)
    job = {
        "model": folder,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "batch": arguments.batch,
        "max_model_len": longest + 1,
        "cases": {
            name: {"prompts": [prompt.tolist() for prompt in case.prompts], "max_tokens": case.max_tokens}
            for name, case in cases.items()
        },
    }
    wanted = []
    if arguments.vllm:
        python = python_of(arguments.vllm)
        wanted += [
            (f"vLLM, block {size}", python, "vllm", {"block": int(size)}) for size in arguments.blocks.split(",")
        ]
    if arguments.transformers:
        wanted.append((f"transformers, batches of {arguments.batch}", python_of(None), "transformers", {}))
    found = {}
    for name, python, system, options in wanted:
        try:
            peer = stack.enter_context(Peer(python, system, job | options))
        except RuntimeError as error:
            # The cause comes first, and what failed for it later.
            lines = str(error).splitlines()
            cause = next((line for line in lines if "Error: " in line), lines[-1])
            print(f"{name} does not start: {cause.strip()}", flush=True)
        else:
            found[f"{name} ({system} {peer.version})"] = peer
    return found


def unlike(tokens: list[list[int]], ours: list[list[int]]) -> str:
    """How many outputs differ, and the median of the tokens that those share with ours at their beginning."""
    common = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(tokens, ours, strict=True)
    ]
    shared = [count for count in common if count is not None]
    after = f", after {median(shared):.0f} tokens" if shared else ""
    return f"{len(shared)} of {len(tokens)}{after}"


def measure(name: str, case: Case, llm: LLM, peers: dict[str, Peer], arguments) -> dict:
    """All rounds of a case. Prints its table; returns what goes into the record."""
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[list[int]]] = {}
    limits = []
    generate(llm, case.prompts[:8], 4)  # warm-up
    for round_number in range(arguments.repeats):
        rates = {
            "linear": linear_rate(llm.config, llm.dtype),
            "attention": attention_rate(llm.config, llm.dtype),
            "bandwidth": read_bandwidth(),
        }
        limits.append(generation_limit(llm.config, case.prompts, case.max_tokens, rates, llm.dtype) | {"rates": rates})
        taken, tokens[OURS], stats = run_ours(llm, case)
        seconds.setdefault(OURS, []).append(taken)
        for system, peer in peers.items():
            if "transformers" in system and round_number >= arguments.transformers_repeats:
                continue
            taken, tokens[system] = peer.run(name)
            seconds.setdefault(system, []).append(taken)
        for system, values in seconds.items():
            if len(values) > round_number:
                print(f"  {name}, round {round_number + 1}: {system}: {values[-1]:.2f} s", flush=True)
    report(case, seconds, tokens, limits, stats)
    memory = {"peak": stats.generation.kv_bytes_peak, "unshared_peak": stats.generation.kv_bytes_unshared_peak}
    others = {system: unlike(out, tokens[OURS]) for system, out in tokens.items() if system != OURS}
    requests = {"requests": len(case.prompts), "max_tokens": case.max_tokens, "unlike": others}
    return {"case": name, "about": case.about, **requests, "seconds": seconds, "limits": limits, "kv": memory}


def report(case: Case, seconds: dict, tokens: dict, limits: list[dict], stats: Stats) -> None:
    limit = median([one["seconds"] for one in limits])
    # The block size that is best here.
    best = min((median(values) for system, values in seconds.items() if "vllm" in system), default=None)
    out = len(case.prompts) * case.max_tokens
    rows = [
        [
            system,
            f"{median(values):.2f}",
            spread(values),
            f"{out / median(values):.0f}",
            f"{best / median(values):.2f}" if best else "",
            f"{limit / median(values):.0%}",
            unlike(tokens[system], tokens[OURS]) if system != OURS else "",
        ]
        for system, values in seconds.items()
    ]
    of_vllm, spans = f"{best / limit:.2f}" if best else "", spread([one["seconds"] for one in limits])
    rows.append(["limit", f"{limit:.2f}", spans, f"{out / limit:.0f}", of_vllm, "", ""])
    one, made = limits[-1], stats.generation
    rates = {name: median([limit["rates"][name] for limit in limits]) / 1e9 for name in one["rates"]}
    for name in rates:
        measured = [limit["rates"][name] for limit in limits]
        if max(measured) > 3 * min(measured):
            spans = spread([value / 1e9 for value in measured])
            print(f"\nWARNING: the {name} rate was {spans} G/s over the rounds: the limit is not to be believed")
    print(f"\n{case.about}")
    print(
        f"{len(case.prompts)} requests, {one['prompt_tokens']} tokens of prompts, {one['prompt_rows']} unique; "
        f"computed: {made.prefill_rows} prompt rows, {made.decode_rows} decode rows in {made.steps} steps, "
        f"{made.recomputed_rows} again"
    )
    print(
        f"limit: linears {median([o['linear_seconds'] for o in limits]):.2f} s at {rates['linear']:.0f} GFLOP/s, "
        f"attention {median([o['attention_seconds'] for o in limits]):.2f} s at {rates['attention']:.0f} GFLOP/s, "
        f"decode bytes {median([o['bytes_seconds'] for o in limits]):.2f} s at {rates['bandwidth']:.1f} GB/s"
    )
    print(
        f"K/V at peak: {mib(made.kv_bytes_peak)}; the trie and all tails take {mib(one['kv_bytes'])}; "
        f"unshared at that moment {mib(made.kv_bytes_unshared_peak)}, unshared and all at once "
        f"{mib(one['kv_bytes_unshared'])}"
    )
    headers = ["system", "s", "spread", "tokens/s", "x best vLLM", "of limit", "unlike ours"]
    print(table(headers, rows), flush=True)


def mib(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"


def measure_cache(arguments) -> dict:
    """60 unrelated questions, one call each, as they would come to a server: little to reuse but their first words.

    In bfloat16 a token may differ where some was reused, as rows are then computed in another batch; float32 shows
    whether anything else is amiss.
    """
    models = {
        cache: LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, cache=cache)
        for cache in ("off", arguments.cache)
    }
    prompts = questions(arguments.data, models["off"])
    seconds: dict[str, list[float]] = {cache: [] for cache in models}
    inside: dict[str, list[float]] = {cache: [] for cache in models}
    found: dict[str, list] = {}
    for llm in models.values():
        generate(llm, prompts[:8], 4)  # warm-up
    for _ in range(arguments.repeats):
        for cache, llm in models.items():
            forget(llm)
            before = llm.cache.seconds if llm.cache is not None else 0.0
            started = time.perf_counter()
            found[cache] = [continued(llm, [prompt], arguments.cache_tokens)[0] for prompt in prompts]
            seconds[cache].append(time.perf_counter() - started)
            inside[cache].append(llm.cache.seconds - before if llm.cache is not None else 0.0)
    tokens = {cache: [list(one.tokens) for one in answers] for cache, answers in found.items()}
    reused = {cache: sum(one.cached_tokens for one in answers) for cache, answers in found.items()}
    rows = [
        [
            f"cache {cache}",
            f"{median(values):.2f}",
            spread(values),
            f"{median(values) / median(seconds['off']):.3f}",
            f"{median(inside[cache]) / median(values):.2%}",
            f"{reused[cache]} of {sum(map(len, prompts))}",
            unlike(tokens[cache], tokens["off"]),
        ]
        for cache, values in seconds.items()
    ]
    print(f"\n{len(prompts)} unrelated questions, one call each, {arguments.cache_tokens} out, {arguments.dtype}")
    headers = ["prefold", "s", "spread", "x off", "inside the cache's calls", "prompt tokens reused", "unlike off"]
    print(table(headers, rows), flush=True)
    differ = unlike(tokens[arguments.cache], tokens["off"])
    return {"case": "cache", "seconds": seconds, "inside": inside, "reused": reused, "unlike": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", default=",".join([*CASES, "cache"]))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", help="a virtual environment with vLLM in it")
    parser.add_argument("--blocks", default="32,64,128", help="block sizes of vLLM, each in a process of its own")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--transformers-repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="of transformers")
    parser.add_argument("--limit", type=int, help="only so many requests of each case, for a try")
    parser.add_argument("--cache", default="lru", help="our cache policy; the case `cache` compares it with none")
    parser.add_argument("--cache-tokens", type=int, default=64)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    # Peers that are stopped would outlive a benchmark that is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = arguments.cases.split(",")
    if unknown := sorted({*names} - {*CASES, "cache"}):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)} and cache")
    print(machine(), arguments.model, arguments.dtype, flush=True)
    record = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if chosen := [name for name in names if name != "cache"]:
            llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads, cache=arguments.cache)
            cases = {name: CASES[name](arguments.data, llm) for name in chosen}
            cases = {n: Case(c.about, c.prompts[: arguments.limit], c.max_tokens) for n, c in cases.items()}
            export_folder(llm.checkpoint, folder, llm.dtype)
            peers = open_peers(arguments, folder, cases, stack)
            record += [measure(name, case, llm, peers, arguments) for name, case in cases.items()]
        if "cache" in names:
            record.append(measure_cache(arguments))
    write_json(arguments.json, benchmark="generate", dtype=arguments.dtype, model=arguments.model, cases=record)


if __name__ == "__main__":
    main()
