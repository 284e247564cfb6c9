"""The case `tenants` of serve.py: what looking after a full cache of many tenants takes in a server; see there."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import table
from serve_systems import Clients, ServedModel, p, prefold_server

from prefold import LLM

__all__ = ["tenants"]

NODES = 10  # kept of a tenant, beside the one that they have in common
SPARE = 3000  # rows that are free when all are kept: the requests that are measured take more, and put others out
AT_ONCE = 16


def tenants(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures requests of one tenant after another while nothing is kept, and then with `--nodes` nodes kept, each
    tenant with a key of its own and an equal part of them."""
    count = 100 if arguments.smoke else arguments.nodes // NODES
    llm = LLM(arguments.model, dtype=arguments.dtype)
    row_bytes = 2 * len(llm.config.planes) * llm.config.kv_size * llm.dtype.itemsize
    vocabulary, draw, rows = llm.config.vocab_size, np.random.default_rng(0), []
    del llm
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        text = "".join(f'[[key]]\nkey = "k{i}"\ntenant = "t{i}"\n\n' for i in range(count))
        keys.write_text(f'{text}[[key]]\nkey = "admin"\ntenant = "admin"\nadmin = true\n')
        few = ["--cache-reuse", "0", "--kv-memory", str(row_bytes * ((NODES + 1) * count + SPARE))]
        options = [*few, "--api-keys", str(keys), "--max-waiting-requests", "1000"]
        with prefold_server("prefold", arguments.model, *options, dtype=arguments.dtype) as server:
            server.key = "admin"
            server.go_on()
            measured(server, draw, vocabulary, count, 10)
            rows.append(measured(server, draw, vocabulary, count, arguments.requests))
            server.forget()
            filled = fill(server, draw, vocabulary, count)
            rows.append(measured(server, draw, vocabulary, count, arguments.requests))
    print(f"{count} tenants; {filled:.0f} s until all of it was kept")
    names = ["nodes kept", "P50, ms", "P99, ms", "the cache, us a step", "planning, us a step", "a step, us"]
    print(table(
        [*names, "the cache, of a step", "planning, of a step"],
        [[row["nodes"], f"{row['p50'] * 1e3:.1f}", f"{row['p99'] * 1e3:.1f}", f"{row['cache']:.1f}",
          f"{row['plan']:.0f}", f"{row['model']:.0f}", f"{row['cache'] / row['model']:.2%}",
          f"{row['plan'] / row['model']:.2%}"] for row in rows],
    ))  # fmt: skip
    return {"rows": rows, "tenants": count, "filled": filled}


def fill(server: ServedModel, draw: np.random.Generator, vocabulary: int, count: int) -> float:
    """Lets each tenant ask for prompts that all begin with one token and end with another; returns the seconds."""
    started = time.perf_counter()
    bodies = []
    for first in draw.integers(100, vocabulary, size=count).tolist():
        lasts = draw.choice(vocabulary - 100, NODES, replace=False) + 100
        prompts = [[first, last] for last in lasts.tolist()]
        bodies.append(json.dumps({"prompt": prompts, "max_tokens": 1, "temperature": 0}).encode())
    with Clients(server.port, AT_ONCE) as clients:
        clients.ask_all("/v1/completions", bodies, [f"k{i}" for i in range(count)])
    return time.perf_counter() - started


def measured(
    server: ServedModel, draw: np.random.Generator, vocabulary: int, count: int, requests: int
) -> dict[str, float]:
    """Asks for 8 tokens after prompts of 64, each of a tenant drawn at random, one after the other."""
    prompts = draw.integers(100, vocabulary, size=(requests, 64)).tolist()
    bodies = [
        json.dumps({"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode() for ids in prompts
    ]
    nodes = server.asked("GET", "/cache")["rows"]["nodes"]
    before = counters(server)
    with Clients(server.port, 1) as clients:
        who = [f"k{i}" for i in draw.integers(count, size=requests)]
        _, seconds, answers = clients.ask_all("/v1/completions", bodies, who)
    assert statistics.fmean(answer["usage"]["completion_tokens"] for answer in answers) == 8
    spent = {name: value - before[name] for name, value in counters(server).items()}
    parts = {name: spent[name] / spent["steps"] * 1e6 for name in ("cache", "plan", "model")}
    return {"nodes": nodes, "p50": p(seconds, 50), "p99": p(seconds, 99)} | parts


def counters(server: ServedModel) -> dict[str, float]:
    """Returns how many steps a server has made, and the seconds of its parts."""
    parts = server.counted("prefold:engine_seconds_total")
    found = {name: parts.get(f'{{part="{name}"}}', 0.0) for name in ("cache", "plan", "model")}
    return found | {"steps": server.counted("prefold:steps_total")[""]}
