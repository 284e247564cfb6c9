"""Measure the server: the overhead of HTTP, batches with live requests, and prefold's server against vLLM's.

    python benchmarks/serve.py --case overhead
    python benchmarks/serve.py --case batches --lines 200
    python benchmarks/serve.py --case msmarco --data FOLDER --vllm VENV --queries 24 --concurrency 1,4,16
    python benchmarks/serve.py --case live --data FOLDER --vllm VENV --workload prefix_repetition --requests 40

In `overhead` and `batches` the server runs in this process. It shares one LLM with the calls that it is compared with.
The client is another process, which sends HTTP over sockets with the standard library only. Calls and requests take
turns.

overhead  P50 of requests of each kind, one after the other, by HTTP and by a call in the process; the processor time of
          a request in the server and in the client; many concurrent requests against one call with as many prompts
batches   a batch against a job of `prefold run` with the same lines in this process; requests of one token, one after
          the other, with and without a running batch

In `msmarco` and `live` each server is another process, and is stopped while another server runs (`servers.py`). The
client is this process, or `vllm bench serve`.

msmarco   requests with all pairs of one MS MARCO query in the reranker's prompt, as embeddings and as /rerank, at
          several concurrencies: prefold's modes, and vLLM's pooling; peak memory
live      `vllm bench serve` is the client of both servers, with all requests at once, and at shares of vLLM's rate.
          Workloads: prefix_repetition, tau_airline (steps of agents), mooncake (conversations of a trace), or the
          lengths of trace_azure2023_conv
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from generate import airline
from harness import NUMBERS, Listed, benchmark, clocked, export_folder, median, python_of, read_jsonl, table, timed
from servers import KV_GIB, Clients, ServedModel, p, prefold_server, vllm_server

from prefold import LLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

# `vllm bench serve`. The command of the CPU build cannot start it, because the package has another name.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SAME_HASHES = {"PYTHONHASHSEED": "0"}  # `vllm bench serve` makes the text of a trace's blocks from hashes
MODES = ("full", "mlp", "off", "auto")
QUERY = "how do prefix caches work"
DOCUMENTS = [f"Document {i}: a prefix that many prompts share is computed once." for i in range(10)]
PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0, "ignore_eos": True}
# {kind of request: (path, body)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion, 1 token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | GREEDY),
    "completion, 16 tokens": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 16} | GREEDY),
    "16 tokens, streamed": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 16, "stream": True} | GREEDY),
    "embedding of a text": ("/v1/embeddings", {"input": PROMPT}),
    "rerank of 10 documents": ("/rerank", {"query": QUERY, "documents": DOCUMENTS}),
}


def call(llm: Any, kind: str) -> Any:
    """Do the work of a request of this kind in this process."""
    path, body = KINDS[kind]
    if path == "/v1/completions":
        return llm.generate(body["prompt"], max_tokens=body["max_tokens"], ignore_eos=True)
    return llm.embed(body["input"]) if path == "/v1/embeddings" else llm.rerank(QUERY, DOCUMENTS)


# ------------------------------------------------------------------------------------------------------ the client


def client(port: int) -> None:
    """Send the requests that lines of standard input name. Answer each line with the seconds and the processor time."""
    for line in sys.stdin:
        order = json.loads(line)
        # A new connection, because the server closes connections that are idle between two lines.
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.connect()
        path, body = order["path"], json.dumps(order["body"]).encode()
        before = time.process_time()
        if order["at_once"]:
            seconds = at_once(port, path, [json.dumps(one).encode() for one in order["body"]])
        else:
            seconds = [ask(connection, path, body) for _ in range(order["count"])]
        print(json.dumps({"seconds": seconds, "cpu": time.process_time() - before}), flush=True)
        connection.close()


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> float:
    """Return the seconds from the first byte of a request to the last byte of its answer."""

    def once() -> None:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer

    return timed(once, 1)[0]


def at_once(port: int, path: str, bodies: list[bytes]) -> list[float]:
    """Return [seconds of all requests together]."""
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in bodies]
    for connection in connections:
        connection.connect()
    with ThreadPoolExecutor(len(bodies)) as pool:
        seconds = timed(lambda: list(pool.map(ask, connections, [path] * len(bodies), bodies)), 1)
    for connection in connections:
        connection.close()
    return seconds


class Client:
    """The client's process."""

    def __init__(self, port: int):
        command = [sys.executable, __file__, "--client", str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, path: str, body: Any, *, count: int = 1, at_once: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"path": path, "body": body, "count": count, "at_once": at_once}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# ------------------------------------------------------------------------------------------------------- the cases


def overhead(llm: Any, server: Any, arguments: SimpleNamespace) -> dict[str, Any]:
    """Compare requests by HTTP with calls in this process."""
    ask_client, rows = Client(server.bound_at[1]), []
    for kind, (path, body) in KINDS.items():
        seconds: dict[str, list[float]] = {"http": [], "call": []}
        cpu = {"http": 0.0, "call": 0.0, "client": 0.0}
        count = arguments.each
        ask_client(path, body, count=3), call(llm, kind)
        for _ in range(arguments.repeats):
            before = time.process_time()
            found = ask_client(path, body, count=count)
            cpu["http"] += time.process_time() - before
            cpu["client"] += found["cpu"]
            seconds["http"] += found["seconds"]
            before = time.process_time()
            seconds["call"] += timed(partial(call, llm, kind), count)
            cpu["call"] += time.process_time() - before
        total = count * arguments.repeats
        p50 = {name: median(values) * 1e3 for name, values in seconds.items()}
        ms = {name: value / total * 1e3 for name, value in cpu.items()}
        rows.append({"kind": kind, "p50_ms": p50, "cpu_ms": ms})
    print(table(
        ["request", "P50 HTTP, ms", "P50 call, ms", "more", "CPU HTTP, ms", "CPU call, ms", "CPU client, ms"],
        [[row["kind"], f"{row['p50_ms']['http']:.2f}", f"{row['p50_ms']['call']:.2f}",
          f"{row['p50_ms']['http'] - row['p50_ms']['call']:.2f}", f"{row['cpu_ms']['http']:.2f}",
          f"{row['cpu_ms']['call']:.2f}", f"{row['cpu_ms']['client']:.2f}"] for row in rows],
    ))  # fmt: skip
    return {"latency": rows, "saturated": saturated(llm, ask_client, arguments)}


def saturated(llm: Any, ask_client: Client, arguments: SimpleNamespace) -> dict[str, Any]:
    """Compare many concurrent requests with one call with as many prompts."""
    prompts = [f"{PROMPT} number {i} jumps" for i in range(arguments.at_once)]
    bodies = [{"prompt": prompt, "max_tokens": 32} | GREEDY for prompt in prompts]
    seconds: dict[str, list[float]] = {"http": [], "call": []}
    for _ in range(max(3, arguments.repeats // 2)):
        llm.cache.clear()
        seconds["http"] += ask_client("/v1/completions", bodies, at_once=True)["seconds"]
        llm.cache.clear()
        seconds["call"] += timed(lambda: llm.generate(prompts, max_tokens=32, ignore_eos=True), 1)
    ratios = [call / http for http, call in zip(seconds["http"], seconds["call"], strict=True)]
    found = {name: median(values) for name, values in seconds.items()}
    print(f"\n{len(prompts)} prompts, 32 tokens each: {found['http']:.2f} s by HTTP at once,"
          f" {found['call']:.2f} s as one call;"
          f" throughput ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    return found | {"ratios": ratios}


def lines_of(kind: str, count: int) -> list[str]:
    """Return the lines of a batch: completions of 32 tokens, or embeddings, of prompts that share 60 tokens."""
    common = "All of these prompts begin with the same words, " * 6
    path, more = KINDS["completion, 16 tokens" if kind == "completions" else "embedding of a text"]
    name = "prompt" if kind == "completions" else "input"
    bodies = [more | {name: f"{common} and part at number {i}"} for i in range(count)]
    if kind == "completions":
        bodies = [body | {"max_tokens": 32} for body in bodies]
    return [json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": b}) for i, b in enumerate(bodies)]


def as_job(llm: Any, lines: list[str], folder: Path) -> float:
    """Return the seconds of the lines as a job in this process."""
    from prefold.jobs import Job, OutputOptions, open_output, run_job
    from prefold.jobs.batch import OpenAIBatch
    from prefold.jobs.report.progress import Progress
    from prefold.jobs.source import open_source

    (folder / "in.jsonl").write_text("\n".join(lines))
    tasks = {name: llm.task(name) for name in ("generate", "embed")}
    output = open_output(OutputOptions(folder / "out.jsonl", overwrite=True), {})
    job = Job(open_source(str(folder / "in.jsonl")), OpenAIBatch("model"), tasks, lambda: Kept(llm), output)
    seconds, summary = clocked(lambda: run_job(job, Progress()))
    assert summary.records == len(lines) and not summary.errors
    return seconds


class Kept:
    """An LLM that stays open at the end of a job."""

    def __init__(self, llm: Any):
        self.engine, self.dtype = llm.engine, llm.dtype


def batches(llm: Any, server: Any, arguments: SimpleNamespace) -> dict[str, Any]:
    """Compare batches with jobs, and live requests during a batch with live requests alone."""
    import openai

    from prefold.engine.pace import LATELY_SECONDS

    openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask_client, folder, found = Client(server.bound_at[1]), Path(server.state.options.data_dir), {}
    path, body = KINDS["completion, 1 token"]

    def begin(lines: list[str]) -> str:
        file = openai_client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        url = json.loads(lines[0])["url"]
        return openai_client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id

    # Read in this process, because polling over HTTP needs a tenth of a core.
    def is_open(batch: str) -> bool:
        return batch in server.state.batches.open

    def has_begun(batch: str) -> bool:
        output = server.state.batches.open[batch].output
        return output is not None and output.count > 0

    def as_batch(lines: list[str]) -> float:
        time.sleep(LATELY_SECONDS)  # a batch's steps are short after a live request

        def whole() -> str:
            batch = begin(lines)
            while is_open(batch):
                time.sleep(0.005)
            return batch

        seconds, batch = clocked(whole)
        counts = openai_client.batches.retrieve(batch).request_counts
        assert counts is not None and counts.completed == len(lines), counts
        return seconds

    for kind in ("completions", "embeddings"):
        seconds: dict[str, list[float]] = {"job": [], "batch": [], "alone": [], "beside": []}
        lines = lines_of(
            kind, arguments.lines * (8 if kind == "embeddings" else 1)
        )  # embeddings are about 8 times shorter
        many = lines_of(kind, 20_000 if kind == "embeddings" else 5_000)
        for number in range(arguments.repeats):
            for name in ("job", "batch") if number % 2 else ("batch", "job"):
                llm.cache.clear()
                seconds[name].append(as_batch(lines) if name == "batch" else as_job(llm, lines, folder))
            ask_client(path, body, count=5)
            seconds["alone"] += ask_client(path, body, count=arguments.each * 5)["seconds"]
            batch = begin(many)
            while not has_begun(batch):
                time.sleep(0.02)
            seconds["beside"] += ask_client(path, body, count=arguments.each * 5)["seconds"]
            assert is_open(batch), "the batch has ended"
            openai_client.batches.cancel(batch)
            while is_open(batch):
                time.sleep(0.1)
        found[kind] = seconds
    cut = {kind: {name: statistics.quantiles(s[name], n=100) for name in ("alone", "beside")}
           for kind, s in found.items()}  # fmt: skip
    print(table(
        ["lines", "job, s", "batch, s", "ratio", "P50 alone, ms", "beside", "P99 alone, ms", "beside"],
        [[kind, f"{median(s['job']):.2f}", f"{median(s['batch']):.2f}",
          f"{median(a / b for a, b in zip(s['job'], s['batch'], strict=True)):.2f}",
          *(f"{cut[kind][name][place] * 1e3:.1f}" for place in (49, 98) for name in ("alone", "beside"))]
         for kind, s in found.items()],
    ))  # fmt: skip
    return found


def both(stack: ExitStack, arguments: SimpleNamespace, modes: dict[str, list[str]], *vllm: str) -> list[ServedModel]:
    """Return the paused servers of a case: `prefold serve` in each mode, and vLLM's server with --vllm."""
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


def msmarco(arguments: SimpleNamespace) -> dict[str, Any]:
    """Rerank with all pairs of a query in one request, at several concurrencies. All systems take turns."""
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
    modes = {mode: ["--sharing", mode, "--cache", "off"] for mode in arguments.modes}
    rows, at_once = [], [1] if arguments.smoke else arguments.concurrency
    with ExitStack() as stack:
        servers = both(stack, arguments, modes, "--runner", "pooling")
        for path in arguments.paths:
            for number in at_once:
                for server in servers:
                    if path == "/rerank" and server.name == "vLLM":
                        continue  # vLLM cannot rerank with this model
                    server.go_on()
                    with Clients(server.port, number) as clients:
                        clients.ask_all(path, bodies[path][:1])
                        if server.name == "vLLM":  # the other servers have no cache
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
    """Return the seconds that a server spent in planning and in the model, or zeros if it does not report them."""
    found = server.counted("prefold:engine_seconds_total")
    return found.get('{part="plan"}', 0.0), found.get('{part="model"}', 0.0)


# --------------------------------------------------------------------------------------------------------- live


def live(arguments: SimpleNamespace) -> dict[str, Any]:
    """Run `vllm bench serve` against both servers, with all requests at once, then at shares of vLLM's rate."""
    if not arguments.vllm:
        raise SystemExit("--case live needs --vllm, because vllm bench serve is the client of both servers")
    found = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        modes = {"prefold": ["--served-model-name", "model", "--kv-memory", f"{KV_GIB}GiB"]}
        servers = both(stack, arguments, modes, "--block-size", str(arguments.block), "--enable-prefix-caching")
        for workload in arguments.workload:
            found[workload] = live_workload(arguments, folder, servers, workload)
    return found | {"tables": {workload: of.pop("table") for workload, of in found.items()}}


def live_workload(
    arguments: SimpleNamespace, folder: Path, servers: list[ServedModel], workload: str
) -> dict[str, Any]:
    """Run one workload against both servers, with empty caches each time."""
    title, options = workload_of(arguments, folder, workload)
    rows, saturation = [], 0.0
    for share in [None, *(arguments.shares[:1] if arguments.smoke else arguments.shares)]:
        rate = "inf" if share is None else f"{share * saturation:.3f}"
        for server in servers[::-1]:  # vLLM first: its rate is the unit
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
    """Send a few warm-up prompts to a server, and empty its cache."""
    bodies = [{"model": "model", "prompt": [11 + i] * 200, "max_tokens": 8, "ignore_eos": True} for i in range(4)]
    with Clients(server.port, 4) as clients:
        clients.ask_all("/v1/completions", [json.dumps(body).encode() for body in bodies])
    server.forget()


def workload_of(arguments: SimpleNamespace, folder: Path, workload: str) -> tuple[str, list[str]]:
    """Return a workload's name, and its options for `vllm bench serve`."""
    count = 4 if arguments.smoke else arguments.requests
    llm = LLM(arguments.model, dtype=arguments.dtype)
    same = ["--num-prompts", str(count), "--ignore-eos", "--temperature", "0", "--seed", "0"]
    if workload == "prefix_repetition":
        prefix = ["--prefix-repetition-prefix-len", "512", "--prefix-repetition-suffix-len", "128"]
        prefix += ["--prefix-repetition-num-prefixes", "4", "--prefix-repetition-output-len", str(arguments.output)]
        name = f"prefix_repetition, {count} requests, 4 prefixes of 512, 128 own, {arguments.output} out"
        return name, ["--dataset-name", "prefix_repetition", *prefix, *same]
    file = folder / "prompts.jsonl"
    if workload == "mooncake":  # blocks of 512 tokens become blocks of 16
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
    else:  # the lengths of a trace, with random text
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


def bench(arguments: SimpleNamespace, folder: Path, server: ServedModel, options: list[str]) -> dict[str, Any]:
    """Return the results of `vllm bench serve` for a server, and the client's processor time."""
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
    """Return the processor seconds of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def tokenizer_folder(arguments: SimpleNamespace, folder: Path) -> str:
    """Return a folder with the tokenizer's files, for the client."""
    made = folder / "tokenizer"
    if not made.exists():
        llm = LLM(arguments.model, dtype=arguments.dtype)
        export_folder(llm.checkpoint, made, llm.dtype)
        (made / "model.safetensors").unlink(missing_ok=True)
    return str(made)


IN_PROCESS = {"overhead": overhead, "batches": batches}
SERVERS = {"msmarco": msmarco, "live": live}
CASES = [*IN_PROCESS, *SERVERS]


def in_process(arguments: SimpleNamespace) -> dict[str, Any]:
    """Run a case whose server is in this process."""
    from serving import serving

    sys.setswitchinterval(1e-3)  # as `prefold serve`, which also freezes the garbage collector
    if arguments.smoke:
        arguments.repeats, arguments.each, arguments.lines, arguments.at_once = 2, 2, 10, 8
    llm = LLM(arguments.model, dtype=arguments.dtype)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder, serving(llm, data_dir=folder) as server:
        return IN_PROCESS[arguments.case](llm, server, arguments)


@benchmark("data", "model", "dtype", "repeats", "smoke", "vllm", data="data", repeats=10)
@click.option("--case", type=click.Choice(CASES), default="overhead", show_default=True, help="Case; see above.")
@click.option("--each", type=int, default=10, show_default=True, help="overhead: requests per kind and round.")
@click.option("--at-once", type=int, default=256, show_default=True, help="overhead: concurrent requests.")
@click.option("--lines", type=int, default=200, show_default=True, help="batches: lines of a batch.")
@click.option("--vllm-length", type=int, default=8192, show_default=True, help="vLLM's --max-model-len.")
@click.option("--block", type=int, default=32, show_default=True, help="live: vLLM's block size.")
@click.option("--queries", type=int, default=120, show_default=True, help="msmarco: number of queries.")
@click.option(
    "--concurrency", type=NUMBERS, default="1,4,16", show_default=True, help="msmarco: numbers of concurrent requests."
)
@click.option("--paths", type=Listed(), default="/v1/embeddings,/rerank", show_default=True, help="msmarco: paths.")
@click.option("--modes", type=Listed(among=MODES), default="full,mlp,off", show_default=True, help="msmarco: modes.")
@click.option("--workload", type=Listed(), default="prefix_repetition", show_default=True, help="live: workloads.")
@click.option("--requests", type=int, default=100, show_default=True, help="live: number of requests.")
@click.option("--output", type=int, default=32, show_default=True, help="live: tokens of an answer.")
@click.option("--shares", type=Listed(float), default="0.5,0.8", show_default=True, help="live: shares of vLLM's rate.")
@click.option("--client", type=int, hidden=True)
def main(arguments: SimpleNamespace) -> dict[str, Any] | None:
    if arguments.client:
        return client(arguments.client)
    found = SERVERS.get(arguments.case, in_process)(arguments)
    return {"case": arguments.case} | found


if __name__ == "__main__":
    main()
