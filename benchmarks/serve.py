"""Measures the server: what HTTP adds to a call in this process, and how soon rows are free when a client leaves.

    python benchmarks/serve.py --case overhead [--rounds 10] [--json FILE]
    python benchmarks/serve.py --case streamed [--rounds 10] [--pass-ms 10] [--json FILE]
    python benchmarks/serve.py --case cancel [--count 1000]
    python benchmarks/serve.py --case batches [--rounds 3] [--lines 200]
    python benchmarks/serve.py --case inflight [--rounds 3]
    python benchmarks/serve.py --case channel [--model tiny] [--guesses 400]
    python benchmarks/serve.py --case overload [--model tiny] [--seconds 300]
    python benchmarks/serve.py --case msmarco --data FOLDER [--vllm VENV] [--queries 24] [--concurrency 1 4 16]
    python benchmarks/serve.py --case live --data FOLDER --vllm VENV [--workload tau_airline] [--requests 40]
    python benchmarks/serve.py --case turns --data FOLDER [--conversations 12]
    python benchmarks/serve.py --case nothing-shared [--requests 100]
    python benchmarks/serve.py --case tenants [--nodes 100000] [--requests 100]

`--smoke` tries a case with a few requests. In the first seven cases the server runs in this process, beside the calls
that it is compared with, on one LLM; the client is a process of its own, which speaks HTTP over sockets with the
standard library only. Calls and requests take turns, so that a drift of the machine's speed hits both.

overhead    P50 of requests of several kinds, one after the other, by HTTP and by a call in the process; the processor
            time a request takes here and in the client; and the rate of many at once against one call of as many
streamed    the time between two tokens of a streamed chat: at the client, in a loop over `LLM.stream` here, and of
            `LLM.generate`; and the processor time of a token. With --pass-ms a forward pass of one row only waits so
            long: a server adds less than passes differ by on a shared machine
cancel      clients that close their connection at a random moment, beside others that stay: milliseconds and steps
            until the engine has nothing of them any more
batches     a batch alone against the same lines as a job of `prefold run` in this process; and requests of one token,
            one after the other, with a batch beside them and without
inflight    64 requests that share 2,000 tokens, and come while the first of them is being computed: rows that are
            computed, also where the first one leaves
channel     whether the time to the first token tells what others have asked, within a tenant and across two; and what a
            tenant that floods the cache costs another
overload    four times as many requests as can be answered: refusals, answers, memory; and 100 clients that read a byte
            a second

In the others servers are processes of their own, on free ports, and are stopped while another has its turn
(`serve_systems.py`); the client is this process, or `vllm bench serve`.

msmarco     requests of all pairs of one query of MS MARCO in the reranker's prompt, as embeddings and as /rerank, at
            several concurrencies: prefold's three modes, and vLLM's pooling; peak memory
live        `vllm bench serve` as the client of both, all at once and at shares of vLLM's rate: prefix_repetition,
            tau_airline (steps of agents), mooncake (conversations of a trace), or the lengths of trace_azure2023_conv
turns       conversations of agents side by side: tokens from the cache against an unlimited trie's, with less and less
            memory
nothing-shared   prompts that share nothing, with a cache and without; the time in a cache of 100,000 nodes
tenants     requests of many tenants, each with its key, while nothing is kept and with all they keep: the time in the
            cache, and that of planning
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import machine, table, write_json
from serve_cases import MODES, live, msmarco, nothing_shared, turns
from serve_load import channel, check_books, inflight, overload
from serve_tenants import tenants

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "serve"))

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
    """Does in this process what a request of that kind asks for."""
    path, body = KINDS[kind]
    if path == "/v1/completions":
        return llm.generate(body["prompt"], max_tokens=body["max_tokens"], ignore_eos=True)
    return llm.embed(body["input"]) if path == "/v1/embeddings" else llm.rerank(QUERY, DOCUMENTS)


# ------------------------------------------------------------------------------------------------------ the client


def client(port: int) -> None:
    """Does what lines on standard input say, and answers each with a line: seconds of requests, processor time."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for line in sys.stdin:
        order = json.loads(line)
        path, body = order["path"], json.dumps(order["body"]).encode()
        before = time.process_time()
        if order["at_once"]:
            seconds = at_once(port, path, [json.dumps(one).encode() for one in order["body"]])
        elif order["gaps"]:
            seconds = gaps(connection, path, body)
        else:
            seconds = [ask(connection, path, body) for _ in range(order["count"])]
        print(json.dumps({"seconds": seconds, "cpu": time.process_time() - before}), flush=True)


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> float:
    """Returns the seconds that a request took, from its first byte to the last of its answer."""
    started = time.perf_counter()
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer
    return time.perf_counter() - started


def gaps(connection: http.client.HTTPConnection, path: str, body: bytes) -> list[float]:
    """Returns the seconds between the events of a streamed answer."""
    connection.request("POST", path, body, {"content-type": "application/json"})
    at = [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]
    return [after - before for before, after in pairwise(at)]


def at_once(port: int, path: str, bodies: list[bytes]) -> list[float]:
    """Returns the seconds that all of these requests took together, as a list of one."""
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in bodies]
    for connection in connections:
        connection.connect()
    started = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(ask, connections, [path] * len(bodies), bodies))
    seconds = [time.perf_counter() - started]
    for connection in connections:
        connection.close()
    return seconds


class Client:
    """The client's process."""

    def __init__(self, port: int):
        command = [sys.executable, __file__, "--client", str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(
        self, path: str, body: Any, *, count: int = 1, at_once: bool = False, gaps: bool = False
    ) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"path": path, "body": body, "count": count, "at_once": at_once, "gaps": gaps}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# ------------------------------------------------------------------------------------------------------- the cases


def overhead(llm: Any, server: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares requests by HTTP with calls in this process."""
    ask_client, rows = Client(server.bound_at[1]), []
    for kind, (path, body) in KINDS.items():
        seconds: dict[str, list[float]] = {"http": [], "call": []}
        cpu = {"http": 0.0, "call": 0.0, "client": 0.0}
        count = arguments.each
        ask_client(path, body, count=3), call(llm, kind)
        for _ in range(arguments.rounds):
            before = time.process_time()
            found = ask_client(path, body, count=count)
            cpu["http"] += time.process_time() - before
            cpu["client"] += found["cpu"]
            seconds["http"] += found["seconds"]
            before = time.process_time()
            for _ in range(count):
                started = time.perf_counter()
                call(llm, kind)
                seconds["call"].append(time.perf_counter() - started)
            cpu["call"] += time.process_time() - before
        total = count * arguments.rounds
        p50 = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
        ms = {name: value / total * 1e3 for name, value in cpu.items()}
        rows.append({"kind": kind, "p50_ms": p50, "cpu_ms": ms})
    print(table(
        ["request", "P50 HTTP, ms", "P50 call, ms", "more", "CPU HTTP, ms", "CPU call, ms", "CPU client, ms"],
        [[row["kind"], f"{row['p50_ms']['http']:.2f}", f"{row['p50_ms']['call']:.2f}",
          f"{row['p50_ms']['http'] - row['p50_ms']['call']:.2f}", f"{row['cpu_ms']['http']:.2f}",
          f"{row['cpu_ms']['call']:.2f}", f"{row['cpu_ms']['client']:.2f}"] for row in rows],
    ))  # fmt: skip
    return {"latency": rows, "saturated": saturated(llm, ask_client, arguments)}


def streamed(llm: Any, server: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares the time between two tokens at a client of the server with that in this process."""
    from prefold import kernels

    prompt, length = {"messages": [{"role": "user", "content": QUERY}]}, 64
    body = prompt | {"max_tokens": length, "stream": True} | GREEDY
    ask_client, options = Client(server.bound_at[1]), {"temperature": 0, "ignore_eos": True}
    if arguments.pass_ms:
        calls = kernels.load()._calls
        run, wait = calls["run_program"], lambda: time.sleep(arguments.pass_ms / 1e3)
        calls["run_program"] = lambda call: wait() if call._obj.rows == 1 and call._obj.ids else run(call)

    def http() -> list[float]:
        found = ask_client("/v1/chat/completions", body, gaps=True)
        cpu["client"].append(found["cpu"] / length)
        return found["seconds"]

    def stream() -> list[float]:
        at = [time.perf_counter() for _ in llm.stream(prompt, max_tokens=length, **options)]
        return [after - before for before, after in pairwise(at)]

    def generate() -> list[float]:
        started = time.perf_counter()
        llm.generate(prompt, max_tokens=length, **options)
        return [(time.perf_counter() - started) / length]

    ways = {"HTTP": http, "LLM.stream": stream, "LLM.generate": generate}
    seconds, cpu = {way: list[float]() for way in ways}, {way: list[float]() for way in (*ways, "client")}
    for _ in range(arguments.rounds):
        for way, run_once in ways.items():
            before = time.process_time()
            seconds[way].append(statistics.median(run_once()))
            cpu[way].append((time.process_time() - before) / length)
    added = [with_server - here for with_server, here in zip(seconds["HTTP"], seconds["LLM.stream"], strict=True)]
    columns = seconds | {"HTTP adds": added} | {f"{way}: processor": values for way, values in cpu.items()}
    print(table(["ms a token", *columns], [["", *(f"{statistics.median(s) * 1e3:.3f}" for s in columns.values())]]))
    return {"seconds": seconds, "processor": cpu}


def saturated(llm: Any, ask_client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares many requests at once with one call of as many prompts."""
    prompts = [f"{PROMPT} number {i} jumps" for i in range(arguments.at_once)]
    bodies = [{"prompt": prompt, "max_tokens": 32} | GREEDY for prompt in prompts]
    seconds: dict[str, list[float]] = {"http": [], "call": []}
    for _ in range(max(3, arguments.rounds // 2)):
        llm.cache.clear()
        seconds["http"] += ask_client("/v1/completions", bodies, at_once=True)["seconds"]
        llm.cache.clear()
        started = time.perf_counter()
        llm.generate(prompts, max_tokens=32, ignore_eos=True)
        seconds["call"].append(time.perf_counter() - started)
    ratios = [call / http for http, call in zip(seconds["http"], seconds["call"], strict=True)]
    found = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{len(prompts)} prompts, 32 tokens each: {found['http']:.2f} s by HTTP at once,"
          f" {found['call']:.2f} s as one call;"
          f" throughput ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    return found | {"ratios": ratios}


def cancel(llm: Any, server: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures how soon nothing is left of clients that leave, and that others get what they get alone."""
    from serving import Raw

    generator, draw = llm.engine.generator, random.Random(0)
    stays = {"prompt": "One that stays", "max_tokens": 200} | GREEDY
    expected = llm.generate(stays["prompt"], max_tokens=200, ignore_eos=True).text
    texts, is_over = [], threading.Event()

    def stay() -> None:
        connection = http.client.HTTPConnection(*server.bound_at)
        while not is_over.is_set():
            connection.request("POST", "/v1/completions", json.dumps(stays))
            texts.append(json.loads(connection.getresponse().read())["choices"][0]["text"])

    staying = threading.Thread(target=stay)
    staying.start()
    milliseconds, steps = [], []
    for number in range(arguments.count):
        prompt = f"{number} " + "words and " * draw.randint(1, 200)
        body = {"prompt": prompt, "max_tokens": 500, "stream": draw.random() < 0.5} | GREEDY
        raw = Raw(server).send("/v1/completions", body, whole=draw.random() > 0.05)
        time.sleep(draw.random() * arguments.wait)
        before, started = llm.stats.steps, time.perf_counter()
        raw.close()
        while len(server.state.handler.backpressure.replies) > 1 or len(generator._open) > 1 or server.state.open > 1:
            time.sleep(2e-4)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        steps.append(llm.stats.steps - before)
    is_over.set()
    staying.join()
    check_books(llm)
    llm.cache.clear()
    cut = [statistics.quantiles(values, n=100) for values in (milliseconds, steps)]
    print(table(
        ["clients that left", "P50", "P99", "largest"],
        [["milliseconds until nothing is left", f"{cut[0][49]:.1f}", f"{cut[0][98]:.1f}", f"{max(milliseconds):.1f}"],
         ["steps that ended meanwhile", f"{cut[1][49]:.0f}", f"{cut[1][98]:.0f}", max(steps)]],
    ))  # fmt: skip
    same = sum(text == expected for text in texts)
    slots = generator.scheduler.pool.used_slots
    print(f"{same} of {len(texts)} texts of others are those of a call alone; slots in use: {slots}")
    return {"milliseconds": milliseconds, "steps": steps, "others": len(texts), "same": same}


def lines_of(kind: str, count: int) -> list[str]:
    """Returns the lines of a batch: completions of 32 tokens, or embeddings, of prompts with 60 tokens in common."""
    common = "All of these prompts begin with the same words, " * 6
    path, more = KINDS["completion, 16 tokens" if kind == "completions" else "embedding of a text"]
    name = "prompt" if kind == "completions" else "input"
    bodies = [more | {name: f"{common} and part at number {i}"} for i in range(count)]
    if kind == "completions":
        bodies = [body | {"max_tokens": 32} for body in bodies]
    return [json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": b}) for i, b in enumerate(bodies)]


def as_job(llm: Any, lines: list[str], folder: Path) -> float:
    """Returns the seconds that lines take as a job in this process."""
    from prefold.job import Job, OutputOptions, open_output, run_job
    from prefold.records.batch import OpenAIBatch
    from prefold.records.source import open_source
    from prefold.report.progress import Progress

    (folder / "in.jsonl").write_text("\n".join(lines))
    tasks = {name: llm.task(name) for name in ("generate", "embed")}
    output = open_output(OutputOptions(folder / "out.jsonl", overwrite=True), {})
    job = Job(open_source(str(folder / "in.jsonl")), OpenAIBatch("model"), tasks, lambda: Kept(llm), output)
    started = time.perf_counter()
    summary = run_job(job, Progress())
    assert summary.records == len(lines) and not summary.errors
    return time.perf_counter() - started


class Kept:
    """An LLM that is not closed at the end of a job."""

    def __init__(self, llm: Any):
        self.engine, self.dtype = llm.engine, llm.dtype


def batches(llm: Any, server: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares batches with jobs, and live requests beside a batch with the same alone."""
    import openai

    from prefold.engine.step_policy import LATELY_SECONDS

    openai_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask_client, folder, found = Client(server.bound_at[1]), Path(server.state.options.data_dir), {}
    path, body = KINDS["completion, 1 token"]

    def begin(lines: list[str]) -> str:
        file = openai_client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        url = json.loads(lines[0])["url"]
        return openai_client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id

    # They are looked at in this process: asking for them over HTTP takes a tenth of a core.
    def is_open(batch: str) -> bool:
        return batch in server.state.batches._open

    def has_begun(batch: str) -> bool:
        output = server.state.batches._open[batch].output
        return output is not None and output.count > 0

    def as_batch(lines: list[str]) -> float:
        time.sleep(LATELY_SECONDS)  # for so long after a live request a batch's steps are short
        started = time.perf_counter()
        batch = begin(lines)
        while is_open(batch):
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        counts = openai_client.batches.retrieve(batch).request_counts
        assert counts is not None and counts.completed == len(lines), counts
        return seconds

    for kind in ("completions", "embeddings"):
        seconds: dict[str, list[float]] = {"job": [], "batch": [], "alone": [], "beside": []}
        lines = lines_of(kind, arguments.lines * (8 if kind == "embeddings" else 1))  # which are so much shorter
        many = lines_of(kind, 20_000 if kind == "embeddings" else 5_000)
        for number in range(arguments.rounds):
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
        [[kind, f"{statistics.median(s['job']):.2f}", f"{statistics.median(s['batch']):.2f}",
          f"{statistics.median(a / b for a, b in zip(s['job'], s['batch'], strict=True)):.2f}",
          *(f"{cut[kind][name][place] * 1e3:.1f}" for place in (49, 98) for name in ("alone", "beside"))]
         for kind, s in found.items()],
    ))  # fmt: skip
    return found


HERE = {"overhead": overhead, "streamed": streamed, "cancel": cancel, "batches": batches}
SERVERS = {"msmarco": msmarco, "live": live, "turns": turns, "nothing-shared": nothing_shared, "tenants": tenants}
# Those whose server is in this process too, with options of its own.
OWN = {"inflight": inflight, "channel": channel, "overload": overload}


def in_process(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a case whose server is in this process."""
    from serving import serving

    from prefold import LLM

    sys.setswitchinterval(1e-3)  # as `prefold serve` does, and so is the garbage collector frozen
    if arguments.smoke:
        arguments.rounds, arguments.each, arguments.count, arguments.lines, arguments.at_once = 2, 2, 10, 10, 8
    llm = LLM(arguments.model, dtype=arguments.dtype)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder, serving(llm, data_dir=folder) as server:
        return HERE[arguments.case](llm, server, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=(*HERE, *SERVERS, *OWN), default="overhead")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--each", type=int, default=10, help="overhead: requests of a kind and round")
    parser.add_argument("--pass-ms", type=float, default=0, help="streamed: what a forward pass of one row takes")
    parser.add_argument("--at-once", type=int, default=256, help="overhead: requests of the last part")
    parser.add_argument("--count", type=int, default=1000, help="cancel: clients that leave")
    parser.add_argument("--wait", type=float, default=0.2, help="cancel: they leave within so many seconds")
    parser.add_argument("--lines", type=int, default=200, help="batches: of a batch")
    parser.add_argument("--smoke", action="store_true", help="try a case with a few requests")
    parser.add_argument("--data", default="data", help="the folder of the data sets")
    parser.add_argument("--vllm", help="a virtual environment with vLLM in it")
    parser.add_argument("--vllm-length", type=int, default=8192, help="vLLM's --max-model-len")
    parser.add_argument("--block", type=int, default=32, help="live: vLLM's block size; on a CPU a multiple of 32")
    parser.add_argument("--queries", type=int, default=120, help="msmarco")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="msmarco")
    parser.add_argument("--paths", nargs="+", default=["/v1/embeddings", "/rerank"], help="msmarco")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["full", "mlp", "off"], help="msmarco: of prefold")
    parser.add_argument("--workload", nargs="+", default=["prefix_repetition"], help="live: see above")
    parser.add_argument("--requests", type=int, default=100, help="live, nothing-shared, tenants")
    parser.add_argument("--output", type=int, default=32, help="live, nothing-shared: tokens of an answer")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.8], help="live: of vLLM's rate")
    parser.add_argument("--conversations", type=int, default=12, help="turns")
    parser.add_argument("--most-turns", type=int, help="turns: of all conversations together")
    parser.add_argument("--memory-shares", type=float, nargs="+", default=[1, 0.5, 0.25, 0.1], help="turns")
    parser.add_argument("--nodes", type=int, default=100_000, help="nothing-shared, tenants: kept")
    parser.add_argument("--small", help="nothing-shared: a model with few bytes a row, for the many nodes")
    parser.add_argument(
        "--row-bytes", type=int, default=1 << 12, help="nothing-shared: more than a row of --small takes"
    )
    parts = ["within", "across", "flood"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="channel: a tenant, two, or the flood")
    parser.add_argument("--guesses", type=int, default=400, help="channel: of each kind")
    parser.add_argument("--seconds", type=float, default=300, help="overload: for how long")
    parser.add_argument("--kv-memory", type=int, help="inflight, channel, overload: bytes of K/V")
    parser.add_argument("--json")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client)
        return
    # Servers and clients of a case end with it, also where it is told to end.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    about = machine()
    print(about)
    found = (SERVERS | OWN).get(arguments.case, in_process)(arguments)
    write_json(arguments.json, benchmark="serve", case=arguments.case, machine=about, **found)


if __name__ == "__main__":
    main()
