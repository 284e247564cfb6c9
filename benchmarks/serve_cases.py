"""Holds the cases of serve.py that compare servers, each a process of its own: see there."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import export_folder, python_of, read_jsonl, table
from generation_cases import airline
from serve_systems import KV_GIB, Clients, ServedModel, interval_of_ratio, p, prefold_server, vllm_server

from prefold import LLM, CacheOptions
from prefold.engine import ModelEngine
from prefold.worker.local import LocalWorker

# `vllm bench serve`, which the CPU build's command does not start, as the package has another name.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FILLING = 10  # prompts of nothing-shared before the time counts: more than its servers have room for
SAME_HASHES = {"PYTHONHASHSEED": "0"}  # of which it makes the text of a trace's blocks
# How rows are shared, of msmarco.
MODES = {mode: ["--sharing", mode] for mode in ("full", "mlp", "off", "auto")}
MODES["0.85"] = ["--sharing", "auto", "--sharing-threshold", "0.85"]
__all__ = ["MODES", "live", "msmarco", "nothing_shared", "turns"]


def both(stack: ExitStack, arguments: argparse.Namespace, modes: dict[str, list[str]], *vllm: str) -> list[ServedModel]:
    """Returns the servers of a case, each paused: `prefold serve` with the options of each mode, and vLLM's where there
    is one."""
    found = [
        stack.enter_context(prefold_server(name, arguments.model, *options, dtype=arguments.dtype))
        for name, options in modes.items()
    ]
    if arguments.vllm:
        llm = LLM(arguments.model, dtype=arguments.dtype)
        folder = str(export_folder(llm.checkpoint, stack.enter_context(tempfile.TemporaryDirectory()), llm.dtype))
        options = ("--max-model-len", str(min(llm.config.max_positions, arguments.vllm_length)), *vllm)
        server = vllm_server("vLLM", arguments.vllm, folder, "--served-model-name", "model", *options)
        found.append(stack.enter_context(server))
    return found


# ------------------------------------------------------------------------------------------------------ msmarco


def msmarco(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reranks: each request holds all pairs of one query, at several concurrencies, all systems in turn."""
    count = 4 if arguments.smoke else arguments.queries
    llm = LLM(arguments.model, dtype=arguments.dtype)
    task = llm.task("rerank")
    lines = read_jsonl(Path(arguments.data, "msmarco_v11", "dev.jsonl.gz"))[:count]
    bodies: dict[str, list[bytes]] = {"/v1/embeddings": [], "/rerank": []}
    tokens = []
    for line in lines:
        texts = [one["text"] for one in line["passages"]]
        works = task.prepare([(line["query"], text) for text in texts])
        prompts = [work.requests[0].tokens.tolist() for work in works]
        tokens.append(sum(map(len, prompts)))
        bodies["/v1/embeddings"].append(json.dumps({"input": prompts}).encode())
        bodies["/rerank"].append(json.dumps({"query": line["query"], "documents": texts}).encode())
    print(f"{count} queries, {statistics.fmean(tokens):.0f} tokens each")
    del llm, task
    modes = {mode: [*MODES[mode], "--cache", "off"] for mode in arguments.modes}
    rows, at_once = [], [1] if arguments.smoke else arguments.concurrency
    with ExitStack() as stack:
        servers = both(stack, arguments, modes, "--runner", "pooling")
        for path in arguments.paths:
            for number in at_once:
                for server in servers:
                    if path == "/rerank" and server.name == "vLLM":
                        continue  # the model is no reranker there
                    server.go_on()
                    with Clients(server.port, number) as clients:
                        clients.ask_all(path, bodies[path][:1])
                        if server.name == "vLLM":  # the others keep nothing
                            server.forget()
                        begun = parts_of(server)
                        before = time.process_time()
                        whole, seconds, _ = clients.ask_all(path, bodies[path])
                        plan, model = (now - then for now, then in zip(parts_of(server), begun, strict=True))
                    row = {"path": path, "at once": number, "system": server.name, "rate": count / whole}
                    row |= {"p50": p(seconds, 50), "p99": p(seconds, 99), "cpu": time.process_time() - before}
                    rows.append(row | {"plan": plan / model if model else float("nan")})
                    server.pause()
        memory = {server.name: server.peak_mib for server in servers}
    base = {(row["path"], row["at once"]): row for row in rows if row["system"] == "full"}
    shown = table(
        ["path", "at once", "system", "P50, s", "P50 over full's", "queries/s", "planning over model",
         "client's CPU, ms a request"],
        [[row["path"], row["at once"], row["system"], f"{row['p50']:.2f}",
          f"{row['p50'] / base[row['path'], row['at once']]['p50']:.2f}", f"{row['rate']:.2f}",
          f"{row['plan']:.2%}".replace("nan%", ""), f"{row['cpu'] / count * 1e3:.1f}"] for row in rows],
    )  # fmt: skip
    print(shown)
    print("peak memory, MiB: " + ", ".join(f"{name} {value:.0f}" for name, value in memory.items()))
    return {"rows": rows, "memory": memory, "queries": count, "tables": {"table": shown}}


def parts_of(server: ServedModel) -> tuple[float, float]:
    """Returns the seconds that a server's engine has planned, and those of its model; zeros where it does not say."""
    found = server.counted("prefold:engine_seconds_total")
    return found.get('{part="plan"}', 0.0), found.get('{part="model"}', 0.0)


# --------------------------------------------------------------------------------------------------------- live


def live(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs `vllm bench serve` against both servers, with each workload: at once, and at shares of vLLM's rate then."""
    if not arguments.vllm:
        raise SystemExit("--case live needs --vllm, whose bench is the client of both servers")
    found = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        modes = {"prefold": ["--served-model-name", "model", "--kv-memory", f"{KV_GIB}GiB"]}
        servers = both(stack, arguments, modes, "--block-size", str(arguments.block), "--enable-prefix-caching")
        for workload in arguments.workload:
            found[workload] = live_workload(arguments, folder, servers, workload)
    return found | {"tables": {workload: of.pop("table") for workload, of in found.items()}}


def live_workload(
    arguments: argparse.Namespace, folder: Path, servers: list[ServedModel], workload: str
) -> dict[str, Any]:
    """Runs one workload against both servers, which have forgotten what came before each time."""
    title, options = workload_of(arguments, folder, workload)
    rows, saturation = [], 0.0
    for share in [None, *(arguments.shares[:1] if arguments.smoke else arguments.shares)]:
        rate = "inf" if share is None else f"{share * saturation:.3f}"
        for server in servers[::-1]:  # vLLM first: its rate is the measure
            server.go_on()
            warm(server)
            found = bench(arguments, folder, server, [*options, "--request-rate", rate])
            server.pause()
            if share is None and server.name == "vLLM":
                saturation = found["request_throughput"]
            rows.append({"share": share, "system": server.name} | found)
    names = {"output_throughput": "output tokens/s", "p50_ttft_ms": "P50 TTFT, ms", "p99_ttft_ms": "P99",
             "p50_itl_ms": "P50 inter-token, ms", "p99_itl_ms": "P99", "client_cpu": "client's CPU, s"}  # fmt: skip
    print(f"{title}; of vLLM's rate when all come at once, {saturation:.2f} requests/s:")
    shown = table(
        ["of that rate", "system", *names.values()],
        [["all at once" if row["share"] is None else row["share"], row["system"],
          *(f"{row[name]:.1f}" for name in names)] for row in rows],
    )  # fmt: skip
    print(shown, flush=True)
    return {"rows": rows, "workload": title, "table": shown}


def warm(server: ServedModel) -> None:
    """Lets a server compute a few prompts that nobody asks for, and forget what it keeps."""
    bodies = [{"model": "model", "prompt": [11 + i] * 200, "max_tokens": 8, "ignore_eos": True} for i in range(4)]
    with Clients(server.port, 4) as clients:
        clients.ask_all("/v1/completions", [json.dumps(body).encode() for body in bodies])
    server.forget()


def workload_of(arguments: argparse.Namespace, folder: Path, workload: str) -> tuple[str, list[str]]:
    """Returns a workload's name, and the options of `vllm bench serve` that make it."""
    count = 4 if arguments.smoke else arguments.requests
    llm = LLM(arguments.model, dtype=arguments.dtype)
    same = ["--num-prompts", str(count), "--ignore-eos", "--temperature", "0", "--seed", "0"]
    if workload == "prefix_repetition":
        prefix = ["--prefix-repetition-prefix-len", "512", "--prefix-repetition-suffix-len", "128"]
        prefix += ["--prefix-repetition-num-prefixes", "4", "--prefix-repetition-output-len", str(arguments.output)]
        name = f"prefix_repetition, {count} requests, 4 prefixes of 512, 128 own, {arguments.output} out"
        return name, ["--dataset-name", "prefix_repetition", *prefix, *same]
    file = folder / "prompts.jsonl"
    if workload == "mooncake":  # its blocks of 512 tokens become blocks of 16
        trace = read_jsonl(Path(arguments.data, "trace_mooncake_conversation", "dev.jsonl.gz"))[:count]
        for one in trace:
            one["input_length"] = max(1, one["input_length"] // 32)
            one["output_length"] = max(1, min(one["output_length"] // 32, arguments.output))
        file.write_text("\n".join(map(json.dumps, trace)))
        replay = ["--dataset-name", "timed_trace", "--dataset-path", str(file), "--no-self-timed"]
        sizes = [one["output_length"] for one in trace]
        name = f"Mooncake's conversations, blocks of 16, {count} requests, {statistics.fmean(sizes):.0f} out"
        return name, [*replay, "--timed-trace-chunk-hash-size", "16", *same]
    if workload == "tau_airline":
        texts = [llm.tokenizer.decode(ids) for ids in airline(Path(arguments.data), llm).prompts]
        sizes = [arguments.output] * len(texts)
    else:  # lengths of a trace, of text that nobody shares
        trace = read_jsonl(Path(arguments.data, workload, "trace.jsonl.gz"))
        drawn = random.Random(0).sample(trace, count)
        words, draw = [llm.tokenizer.decode([i]) for i in range(1000, 9000)], random.Random(1)
        most = arguments.vllm_length // 2
        texts = ["".join(draw.choices(words, k=min(one["input_length"], most))) for one in drawn]
        sizes = [max(1, min(one["output_length"], arguments.output)) for one in drawn]
    texts, sizes = texts[:count], sizes[:count]
    same[1] = str(len(texts))
    lines = [json.dumps({"prompt": text, "output_tokens": n}) for text, n in zip(texts, sizes, strict=True)]
    file.write_text("\n".join(lines))
    own = ["--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "-1", "--skip-chat-template"]
    return f"{workload}, {len(texts)} requests, {statistics.fmean(sizes):.0f} out", [*own, *same]


def bench(arguments: argparse.Namespace, folder: Path, server: ServedModel, options: list[str]) -> dict[str, Any]:
    """Returns what `vllm bench serve` says of a server, and the processor time that it took itself."""
    result = folder / "result.json"
    command = [python_of(arguments.vllm), "-c", BENCH, "--backend", "openai"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--endpoint", "/v1/completions", "--model", "model"]
    command += [
        "--tokenizer",
        tokenizer_folder(arguments, folder),
        "--disable-tqdm",
        "--percentile-metrics",
        "ttft,itl",
    ]
    command += ["--metric-percentiles", "50,99", "--save-result", "--result-filename", str(result), *options]
    before = children_cpu()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | SAME_HASHES)
    found = json.loads(result.read_text()) if result.exists() else {}
    result.unlink(missing_ok=True)
    if done.returncode or found.get("failed", 1):
        said = f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n{server.log_end}"
        raise RuntimeError(f"vllm bench serve: {found.get('failed')} requests failed at {server.name}:\n{said}")
    return {k: v for k, v in found.items() if isinstance(v, int | float)} | {"client_cpu": children_cpu() - before}


def children_cpu() -> float:
    """Returns the processor seconds of processes that were waited for."""
    times = os.times()
    return times.children_user + times.children_system


def tokenizer_folder(arguments: argparse.Namespace, folder: Path) -> str:
    """Returns a folder with the tokenizer's files, for the client."""
    made = folder / "tokenizer"
    if not made.exists():
        llm = LLM(arguments.model, dtype=arguments.dtype)
        export_folder(llm.checkpoint, made, llm.dtype)
        (made / "model.safetensors").unlink(missing_ok=True)
    return str(made)


# -------------------------------------------------------------------------------------------------------- turns


def turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends agents' conversations turn by turn, all of them side by side, with less and less memory."""
    runs = 3 if arguments.smoke else arguments.conversations
    llm = LLM(arguments.model, dtype=arguments.dtype)
    case = airline(Path(arguments.data), llm, runs, 1)
    # The case has one run after the other; a run's prompts grow.
    talks: list[list[list[int]]] = []
    for prompt in case.prompts:
        ids = list(map(int, prompt))
        if talks and len(ids) > len(last := talks[-1][-1]) and ids[: len(last) - 9] == last[:-9]:
            talks[-1].append(ids)
        else:
            talks.append([ids])
    order = [talk[turn] for turn in range(max(map(len, talks))) for talk in talks if turn < len(talk)]
    if arguments.most_turns:
        order = order[: arguments.most_turns]
    possible, rows_needed = unlimited(order)
    row_bytes = 2 * len(llm.config.planes) * llm.config.kv_size * llm.dtype.itemsize
    total = sum(map(len, order))
    del llm
    longest = max(map(len, order)) + 64
    rows = []
    for share in [1.0] if arguments.smoke else arguments.memory_shares:
        # Some room beside what is kept, for what runs.
        slots = max(int(rows_needed * share) + (longest if share == 1 else 0), longest)
        memory = f"{slots * row_bytes + (1 << 16)}"
        options = ["--kv-memory", memory, "--cache-reuse", "0"]
        with prefold_server("prefold", arguments.model, *options, dtype=arguments.dtype) as server:
            server.go_on()
            with Clients(server.port, 1) as clients:
                bodies = [json.dumps({"prompt": ids, "max_tokens": 1, "temperature": 0}).encode() for ids in order]
                before = time.process_time()
                _, seconds, answers = clients.ask_all("/v1/completions", bodies)
                cpu = time.process_time() - before
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        row = {"share": share, "slots": slots, "cached": cached, "p50": p(seconds, 50), "p99": p(seconds, 99)}
        rows.append(row | {"cpu": cpu})
    print(f"{len(order)} turns of {len(talks)} conversations, {total} tokens, {rows_needed} unique; an unlimited trie"
          f" would give {possible} from memory ({possible / total:.1%})")  # fmt: skip
    print(table(
        ["memory", "slots", "cached tokens", "of the unlimited trie", "P50 TTFT, ms", "P99", "client's CPU, ms a turn"],
        [[row["share"], row["slots"], row["cached"], f"{row['cached'] / possible:.2%}", f"{row['p50'] * 1e3:.0f}",
          f"{row['p99'] * 1e3:.0f}", f"{row['cpu'] / len(order) * 1e3:.1f}"] for row in rows],
    ))  # fmt: skip
    return {"rows": rows, "possible": possible, "tokens": total, "unique": rows_needed}


def unlimited(prompts: list[list[int]]) -> tuple[int, int]:
    """Returns (tokens of prompts that an unlimited trie of the earlier ones holds, rows of the trie at the end).

    The last token of a prompt is always computed, for its logits.
    """
    root: dict[int, Any] = {}
    hits = rows = 0
    for prompt in prompts:
        node, shared, is_there = root, 0, True
        for token in prompt:
            if token not in node:
                is_there = False
                node[token] = {}
                rows += 1
            shared += is_there
            node = node[token]
        hits += min(shared, len(prompt) - 1)
    return hits, rows


# ----------------------------------------------------------------------------------------------- nothing-shared


def nothing_shared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends prompts that share nothing to a server with its cache on, to one with it off, and to another with it off,
    in turns. Then it measures what looking after a cache takes when it is full.

    All have room for few rows, so that the cache is full, and gives rows back, when the time begins to count. They are
    in this process and have one model: two processes of one command differ by up to 6 % as long as they live, since
    their memory lies elsewhere. The two servers without a cache show how far chance goes.
    """
    from serving import serving

    sys.setswitchinterval(1e-3)  # as `prefold serve` does, and so is the garbage collector frozen
    kinds = {"lru": CacheOptions(min_overlap=0), "off": None, "off again": None}
    count = 4 if arguments.smoke else arguments.requests
    first = LLM(arguments.model, dtype=arguments.dtype)
    row_bytes = 2 * len(first.config.planes) * first.config.kv_size * first.dtype.itemsize
    prompts = np.random.default_rng(0).integers(100, first.config.vocab_size, size=(count + FILLING, 256))
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    answers: dict[str, list[str]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        clients = {}
        for name, cache in kinds.items():
            llm, options = copy.copy(first), first.engine.facts.options
            generation = replace(options.generation, kv_memory=row_bytes * 256 * (FILLING - 2), cache=cache)
            llm.engine = ModelEngine(LocalWorker(first.model), replace(options, generation=generation))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(serving(llm, data_dir=folder))
            clients[name] = stack.enter_context(Clients(server.bound_at[1], 1))
        gc.collect()
        gc.freeze()
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt.tolist(), "max_tokens": arguments.output, "temperature": 0, "ignore_eos": True}
            sent, names = json.dumps(body).encode(), list(kinds)
            for name in (names[number % 3 :] + names[: number % 3])[:: 1 if number % 2 else -1]:
                before = time.process_time()
                spent, answer = clients[name].ask("/v1/completions", sent)
                if number >= FILLING:
                    seconds[name].append(spent)
                    cpu[name].append(time.process_time() - before)
                    answers[name].append(answer["choices"][0]["text"])
    same = sum(a == b for a, b in zip(answers["lru"], answers["off"], strict=True))
    print(f"{count} requests, 256 in, {arguments.output} out; {same} of {count} outputs are the same")
    ratios: dict[str, dict[str, tuple[float, float, float]]] = {}
    for what, times in {"seconds": seconds, "CPU": cpu}.items():
        ratios[what] = {name: interval_of_ratio(times[name], times["off"]) for name in ("lru", "off again")}
        mean = ", ".join(f"{name} {statistics.fmean(values) * 1e3:.1f} ms" for name, values in times.items())
        print(f"{what}: {mean}")
        for name, (ratio, low, high) in ratios[what].items():
            print(f"  {name} over off: {ratio:.4f} (95 %: {low:.4f} to {high:.4f})")
    return {"seconds": seconds, "cpu": cpu, "ratios": ratios, "same": same} | bookkeeping(arguments)


def bookkeeping(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures in this process the time in the cache, with nothing kept and with many nodes of many tenants."""
    from prefold.cache import CacheOptions
    from prefold.tasks.run import run_items

    nodes = 1000 if arguments.smoke else arguments.nodes
    tenants, draw, rows = max(1, nodes // 10), np.random.default_rng(1), []
    for kept in (0, nodes):
        options = CacheOptions(min_overlap=0)
        memory = (kept * 4 + 40_000) * arguments.row_bytes
        llm = LLM(arguments.small or arguments.model, dtype="float32", kv_memory=memory, cache=options)
        prompts = draw.integers(100, llm.config.vocab_size, size=(kept, 3)).tolist()
        for first in range(0, kept, 2000):
            part = prompts[first : first + 2000]
            task = llm.task("generate", max_tokens=1)
            items = [{"prompt": ids, "salt": str((first + i) % tenants)} for i, ids in enumerate(part)]
            list(run_items(llm.engine, task, items))
        there = sum(1 for _ in llm.engine.generator.scheduler.tree.nodes())
        before, steps = llm.cache.seconds, llm.stats.steps
        model = llm.stats.seconds.get("model", 0.0)
        started = time.perf_counter()
        for _ in range(20 if arguments.smoke else 200):
            llm.generate([draw.integers(100, llm.config.vocab_size, size=64).tolist()], max_tokens=8, ignore_eos=True)
        whole = time.perf_counter() - started
        spent, steps = llm.cache.seconds - before, llm.stats.steps - steps
        rows.append({"kept": there, "tenants": tenants if kept else 1, "us": spent / steps * 1e6,
                     "step_us": (llm.stats.seconds["model"] - model) / steps * 1e6, "whole": whole})  # fmt: skip
        llm.close()
    print(table(
        ["nodes kept", "tenants", "in the cache, us a step", "of this model's step, us", "of a step of 20 ms"],
        [[row["kept"], row["tenants"], f"{row['us']:.1f}", f"{row['step_us']:.0f}", f"{row['us'] / 20e3:.2%}"]
         for row in rows],
    ))  # fmt: skip
    return {"bookkeeping": rows}
