"""Measures what the simulator is calibrated with and held against: steps of this machine, and the router's speed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from prefold.simulate.costs import StepRows, machine_named, model_named

from .fit import fit

__all__ = ["machine", "router", "steps"]


def steps(out: Path, model: str, prompts: int) -> None:
    """Generates after prompts that repeat prefixes, and writes a line of JSON for each step of the engine."""
    from prefold import LLM
    from prefold.simulate.requests import prefix_repetition

    llm = LLM(model)
    requests = prefix_repetition(prompts, prefixes=max(1, prompts // 8), prefix=192, suffix=64, output=24)
    lines: list[dict[str, float]] = []

    def note(info) -> None:
        prefill = info.rows - info.running
        # A row of a prompt sees what lies before it: half of the prompt on average.
        pairs = prefill * (192 + 64) // 2
        reads = info.running + prefill // 64
        keys = info.path_rows
        row = {"prefill": prefill, "decode": info.running, "keys": keys, "pairs": pairs, "reads": reads}
        lines.append(row | {"seconds": info.seconds})

    with llm.engine.watching(note):
        llm.generate([request.drawn_tokens(40_000).tolist() for request in requests], max_tokens=24, ignore_eos=True)
    with out.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{len(lines)} steps, {sum(line['seconds'] for line in lines):.1f} s: {out}")


def machine(path: Path, out: Path, *, like: str, model: str) -> None:
    """Writes a machine for `prefold simulate --machine FILE`: the one named `like`, with the constants that explain
    best the steps of a file."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    measured = [(StepRows(**{name: line[name] for name in StepRows._fields}), line["seconds"]) for line in lines]
    found = fit(machine_named(like), model_named(model), measured)
    out.write_text(json.dumps(asdict(replace(found, name=f"{like}, calibrated"))) + "\n")
    print(
        f"{found.flops / 1e12:,.3g} TFLOP/s, {found.bandwidth / 1e9:,.4g} GB/s, {found.overhead * 1e3:,.3g} ms a step, "
        f"by {len(measured)} steps: {out}"
    )


def router(prefixes: int, replicas: int) -> dict[str, float]:
    """Fills the router's trie with prefixes of 256 tokens, and returns the rates of events, decisions and bookings."""
    import psutil

    from prefold.cache.events import CacheCleared, CacheEvents, RowsStored
    from prefold.cluster.router import Prompt, Router

    rng = np.random.default_rng(0)
    memory = psutil.Process().memory_info
    found, before = Router(), memory().rss
    for replica in range(replicas):
        found.join(replica)
    first, seconds, kept = [0] * replicas, 0.0, []
    for start in range(0, prefixes, 100 * replicas):
        tokens = rng.integers(0, 150_000, (min(100 * replicas, prefixes - start), 256)).astype(np.int32)
        for replica in range(replicas):
            events = [RowsStored(start + i, None, tokens[i]) for i in range(replica, len(tokens), replicas)]
            batch = CacheEvents(0, first[replica], tuple(([CacheCleared()] if not start else []) + events))
            first[replica] += len(batch.events)
            began = time.process_time()
            assert found.take(replica, batch)
            seconds += time.process_time() - began
        kept.append(tokens[::50].copy())
    pool = np.concatenate(kept)
    held = (memory().rss - before - pool.nbytes) / 1e9
    suffixes = rng.integers(0, 150_000, (20_000, 256)).astype(np.int32)
    prompts = [Prompt(np.concatenate((pool[i % len(pool)], suffix)), limit=128) for i, suffix in enumerate(suffixes)]
    began = time.process_time()
    for prompt in prompts:
        found.choose(prompt)
    decided = time.process_time()
    for i, prompt in enumerate(prompts):
        found.send(i, prompt, found.choose(prompt))
        if i >= 5000:
            found.end(i - 5000, output_rows=100, cached_rows=256)
    booked = time.process_time()
    print(f"{prefixes:,} prefixes of 256 tokens, {replicas} replicas; CPU time of one core")
    rates = {
        "events a second": prefixes / seconds,
        "decisions a second": len(prompts) / (decided - began),
        "with booking, end": len(prompts) / (booked - decided),
        "memory, GB": held,
    }
    for name, rate in rates.items():
        print(f"{name:<18}  {rate:>10,.{2 if name == 'memory, GB' else 0}f}")
    return rates
