"""Compare padding, compute-then-mask and flat varlen batches, and count the bytes that tensor parallelism exchanges.

    python benchmarks/batching.py --data FOLDER --sections example,lengths,share,decode,ranks --json FILE

FOLDER has gsm8k, msmarco_v11, tau_airline and trace_azure2023_conv. All three ways run the same model with another
`attend`.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import harness
import numpy as np
import torch
from harness import Listed, benchmark, linear_rate, read_bandwidth, read_jsonl, run_engine, table, take_turns, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prefold import LLM
from prefold.checkpoint import Checkpoint, resolve
from prefold.spec.requests import Readout, Request
from prefold.worker.attention import KeyRuns, plan_rows
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.row_attention import RowAttention
from prefold.worker.torch.attention.store import KVStore
from prefold.worker.torch.device import settle_threads
from prefold.worker.torch.load import load_model

# The block of docs/batching.md: 8 layers of 512, 8 heads of 64, a feed-forward of 2,048, LayerNorm and GELU.
PAGE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_embd": 512,
    "n_layer": 8,
    "n_head": 8,
    "n_positions": 16384,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


ROUNDS: list[list[float]] = []  # the rounds behind the medians, in the order of the tables


def median(values: list[float]) -> float:
    """Return the median, and keep the values for the file."""
    if values not in ROUNDS:
        ROUNDS.append(values)
    return harness.median(values)


class Padded:
    """Rows are [requests, longest]. Short requests are padded, and the padding is computed too."""

    def __init__(self, lengths: list[int], scale: float):
        self.shape = (len(lengths), max(lengths))
        self.rows, self.entries = len(lengths) * max(lengths), len(lengths) * max(lengths) ** 2
        self.positions = torch.arange(self.shape[1]).repeat(self.shape[0])
        self.scale = scale

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor, sinks: None = None) -> Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return o.transpose(1, 2).flatten(0, 1)


class Masked:
    """Rows are flat. All scores of all rows are computed, and scores between requests are masked afterwards."""

    def __init__(self, lengths: list[int], scale: float):
        self.rows, self.entries = sum(lengths), sum(lengths) ** 2
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        request = torch.repeat_interleave(torch.tensor(lengths))
        self.mask = (request[:, None] == request) & torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
        self.scale = scale

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor, sinks: None = None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scale, enable_gqa=True)
        return o[0].transpose(0, 1)


class Varlen:
    """Rows are flat, and no score between requests is computed. `seconds` is the time in attention."""

    def __init__(self, lengths: list[int], scale: float):
        self.rows, self.entries = sum(lengths), sum(n * n for n in lengths)
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        # Requests are the branches of a trie that shares nothing.
        self.plan = plan_rows(np.repeat(np.cumsum(lengths), lengths), np.arange(self.rows))
        self.scale, self.seconds = scale, 0.0

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor, sinks: None = None) -> Tensor:
        started = time.perf_counter()
        attention = RowAttention(Heads(q.shape[1], *k.shape[1:], q.dtype), q.device)
        o = attention.attend(q, k, v, self.plan, scale=self.scale)
        self.seconds += time.perf_counter() - started
        return o


WAYS = {"padding": Padded, "compute, then mask": Masked, "flat varlen": Varlen}


def forward(model, attend) -> None:
    """Run one pass over the rows of `attend`."""
    tokens = torch.ones(attend.rows, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens, attend.positions, attend)


def measured(model, lengths: list[int], repeats: int) -> dict[str, dict]:
    """Run the ways in turn. Return the rows, the score entries of one head and layer, GFLOP and seconds of each way."""
    config = model.config
    attends = {name: way(lengths, config.scale) for name, way in WAYS.items()}
    rounds = take_turns({name: partial(forward, model, attend) for name, attend in attends.items()}, repeats)
    return {
        name: {
            "rows": attend.rows,
            "entries": attend.entries,
            "linear_gflop": attend.rows * config.linear_flops / 1e9,
            "attention_gflop": 4 * attend.entries * config.q_size * len(config.planes) / 1e9,
            "seconds": rounds.seconds[name],
        }
        for name, attend in attends.items()
    }


def example(models: dict, arguments) -> str:
    found = measured(models["page"], [10, 30], 5 * arguments.repeats)
    rows = [
        [name, f["rows"], f["entries"], f"{f['linear_gflop']:.2f}", f"{f['attention_gflop']:.3f}",
         f"{1e3 * median(f['seconds']):.2f}"]
        for name, f in found.items()
    ]  # fmt: skip
    return table(["10 + 30 tokens", "rows", "score entries", "linear GFLOP", "attention GFLOP", "ms"], rows)


def real_lengths(data: Path, tokenizer) -> dict[str, list[int]]:
    """Return the lengths of requests in input order, in tokens, about 4,000 tokens of each kind."""
    traced = [line["input_length"] for line in read_jsonl(data / "trace_azure2023_conv" / "trace.jsonl.gz")[:200]]
    questions = [line["question"] for line in read_jsonl(data / "gsm8k" / "dev.jsonl.gz")[:200]]
    passages = read_jsonl(data / "msmarco_v11" / "dev.jsonl.gz")[:50]
    texts = [text for line in passages for text in passage_texts(line)]
    talks = read_jsonl(data / "tau_airline" / "dev.jsonl.gz")[:40]
    said = [str(message.get("content") or "") for talk in talks for message in talk["messages"]]
    kinds = {
        "questions (GSM8K)": [len(t) for t in tokenizer.encode_batch(questions)],
        "passages (MS MARCO)": [len(t) for t in tokenizer.encode_batch(texts)],
        "turns of an agent (tau-bench)": [len(t) for t in tokenizer.encode_batch(said) if len(t)],
        "prompts of a chat service (Azure 2023)": traced,
    }
    return {name: first_tokens(lengths, 4000) for name, lengths in kinds.items()}


def passage_texts(line: dict) -> list[str]:
    return [p if isinstance(p, str) else p["text"] for p in line["passages"]]


def first_tokens(lengths: list[int], tokens: int) -> list[int]:
    return lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]


def lengths(models: dict, arguments) -> str:
    rows = []
    for kind, found in real_lengths(arguments.data, models["tokenizer"]).items():
        ways = measured(models["page"], found, arguments.repeats)
        best = median(ways["flat varlen"]["seconds"])
        for name, f in ways.items():
            about = f"{kind}: {len(found)} of {min(found)} to {max(found)}" if name == "padding" else ""
            seconds = median(f["seconds"])
            rows.append(
                [about, name, f["rows"], f"{f['entries']:,}", f"{f['linear_gflop']:.0f}", f"{f['attention_gflop']:.1f}",
                 f"{seconds:.3f}", f"{seconds / best:.2f}"]
            )  # fmt: skip
    headers = ["requests, tokens", "", "rows", "score entries", "linear GFLOP", "attention GFLOP", "s", "x varlen"]
    return table(headers, rows)


def ranks(models: dict, arguments) -> str:
    """Count the all-reduces of one forward pass and their bytes."""
    batches = {"1 request of 40": [40], "10 + 30": [10, 30], "100 requests of 40": [40] * 100}
    readout, rows, alone, threads = Readout("mean"), [], {}, torch.get_num_threads()
    for size in (1, 2):
        llm = LLM(Checkpoint.dummy(PAGE), dtype="float32", tensor_parallel=size, sharing="off")
        layers = len(llm.config.planes)
        for name, batch in batches.items():
            rng = np.random.default_rng(0)
            requests = [Request(rng.integers(0, 4096, n).astype(np.int32)) for n in batch]
            run_engine(llm.engine, requests, readout)
            view = llm.model.ranks.view
            before = 0 if view is None else view.met
            run_engine(llm.engine, requests, readout)
            count = 0 if view is None else view.met - before
            nbytes = count * sum(batch) * llm.config.hidden * llm.dtype.itemsize  # of all sums together
            seconds = median(timed(lambda r=requests, e=llm.engine: run_engine(e, r, readout), arguments.repeats))
            alone.setdefault(name, seconds)
            per_layer = f"{(count - 1) / layers:g} a layer + 1" if count else ""
            ratio = f"{alone[name] / seconds:.2f}"
            rows.append([size, name, sum(batch), count, per_layer, f"{nbytes:,}", f"{1e3 * seconds:.1f}", ratio])
        llm.close()
    settle_threads(threads)  # ranks have changed the number of threads
    headers = ["ranks", "batch", "rows", "sums", "", "bytes each rank adds", "ms", "x one rank"]
    return table(headers, rows)


def share(models: dict, arguments) -> str:
    rows = []
    for name in ("page", "gpt2", "smollm2-135m"):
        model = models[name]
        for lengths in ([1000], [100] * 10):
            attend = Varlen(lengths, model.config.scale)
            forward(model, attend)
            seconds, within = [], []
            for _ in range(arguments.repeats):
                attend.seconds = 0.0
                seconds += timed(partial(forward, model, attend), 1)
                within.append(attend.seconds / seconds[-1])
            linear = attend.rows * model.config.linear_flops
            # Causal attention computes half of the score entries.
            attention = 2 * attend.entries * model.config.q_size * len(model.config.planes)
            rows.append(
                [name, f"{len(lengths)} x {lengths[0]}", f"{attend.entries:,}", f"{linear / 1e9:.1f}",
                 f"{attention / 1e9:.2f}", f"{attention / (attention + linear):.1%}", f"{1e3 * median(seconds):.0f}",
                 f"{median(within):.1%}"]
            )  # fmt: skip
    headers = ["model", "requests", "score entries", "linear GFLOP", "attention GFLOP", "share", "ms", "share of time"]
    return table(headers, rows)


def decode(models: dict, arguments) -> str:
    """Count FLOPs and bytes of a decode step. Each sequence has its own context of 512 rows."""
    model, context = models["smollm2-135m"], 512
    config, rows = model.config, []
    balance = linear_rate(config, torch.float32) / read_bandwidth()
    for batch in (1, 8, 64):
        heads = Heads(config.heads, config.kv_heads, config.head_dim, torch.float32)
        store = KVStore([heads] * len(config.planes), batch * (context + 1) + 2)
        first = 2 + np.arange(batch) * (context + 1)
        queries = np.arange(batch)
        runs = KeyRuns(first, np.full(batch, context + 1), np.zeros(batch, np.int64), queries, queries + 1)
        plan = store.plan(runs, batch)
        own = torch.from_numpy(first + context)

        def attend(plane, q, k, v, sinks=None, *, store=store, plan=plan, own=own):
            store.write(plane, own, k, v)
            return store.attend(plane, q, plan, config.scale)

        tokens, positions = torch.ones(batch, dtype=torch.int64), torch.full((batch,), context)
        with torch.inference_mode():
            step = lambda: model.logits(model(tokens, positions, attend))  # noqa: B023, E731
            seconds = timed(step, 5 * arguments.repeats, warm=2)
        head = 2 * config.hidden * config.vocab_size
        attention = 4 * (context + 1) * config.q_size * len(config.planes)
        flops = batch * (config.linear_flops + head + attention)
        weights = 4 * (config.linear_flops + head) // 2
        keys = batch * (context + 1) * 2 * config.kv_size * len(config.planes) * 4
        rows.append(
            [batch, f"{flops / 1e9:.2f}", f"{weights / 1e6:.0f}", f"{keys / 1e6:.0f}",
             f"{flops / (weights + keys):.1f}", f"{1e3 * median(seconds):.1f}", f"{batch / median(seconds):.0f}"]
        )  # fmt: skip
    lines = table(["sequences", "GFLOP a step", "weights, MB", "K/V, MB", "FLOP / byte", "ms a step", "tokens/s"], rows)
    return f"{lines}\n\nThis machine computes {balance:.0f} float32 FLOP in the time it takes to read a byte."


SECTIONS = {"example": example, "lengths": lengths, "share": share, "decode": decode, "ranks": ranks}


@benchmark("data", "repeats", repeats=5)
@click.option("--sections", type=Listed(among=SECTIONS), default=",".join(SECTIONS), show_default=True, help="Tables.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    place = {"dtype": torch.float32, "device": "cpu"}
    smol = LLM("smollm2-135m", dtype="float32")
    models = {
        "page": load_model(Checkpoint.dummy(PAGE), **place),
        "gpt2": load_model(resolve("gpt2", load_format="dummy"), **place),
        "smollm2-135m": smol.model,
        "tokenizer": smol.tokenizer,
    }
    tables, rounds = {}, {}
    for name in arguments.sections:
        ROUNDS.clear()
        tables[name], rounds[name] = SECTIONS[name](models, arguments), [*ROUNDS]
        print(f"\n{name}\n\n{tables[name]}", flush=True)
    return {"tables": tables, "rounds": rounds}


if __name__ == "__main__":
    main()
