"""Time reranking of MS MARCO pairs in three modes, and in transformers: the section `rerank` of gpu.py."""

from __future__ import annotations

import re
import zlib

import numpy as np
import torch
from gpu_common import TINY, Bench, trie_of
from harness import median, read_jsonl, run_engine

from prefold.checkpoint import GEOMETRIES
from prefold.engine import EngineOptions, ModelEngine
from prefold.spec.requests import Readout, Request
from prefold.worker.torch.worker import TorchWorker

MODES = ("full", "mlp", "off")
PAIRS = 4000
# About the tokens before and after query and passage in the reranker's prompt.
HEAD, TAIL = 66, 9
WORD = re.compile(r"\w{1,6}|[^\w\s]")
# Rows of a step. With `off`, the tokens of the prompts that run together.
BATCH_ROWS = 65_536


def run(bench: Bench) -> None:
    names = bench.models if bench.smoke else [m for m in bench.models if m in ("qwen3-0.6b", "qwen3-8b")]
    for name in names:
        bench.attempt(f"rerank {name}", lambda name=name: measure(bench, name))
        bench.attempt(f"rerank transformers {name}", lambda name=name: measure_transformers(bench, name))


def measure(bench: Bench, name: str) -> None:
    model = bench.model(name)
    prompts = pairs(bench, model.config.vocab_size)
    trie = trie_of(prompts)
    sharing = trie.num_tokens / trie.num_rows
    print(f"{name}: {len(prompts)} pairs, {trie.num_tokens} tokens, {trie.num_rows} unique ({sharing:.2f})", flush=True)
    weights = sum(p.nbytes for p in model.parameters())
    readout = Readout("logits", ids=(9, 21))
    pool = trie.num_rows * 2 * model.config.kv_size * len(model.config.planes) * bench.dtype.itemsize
    rows, rates = [], {}
    for mode in MODES:
        options = EngineOptions(sharing=mode, max_batch_rows=256 if bench.smoke else BATCH_ROWS)
        engine = ModelEngine(TorchWorker(model), options)

        def once(engine=engine) -> None:
            run_engine(engine, [Request(p) for p in prompts], readout)

        once()
        bench.free()
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
        found = bench.seconds(once, warm=0)
        peak = torch.cuda.max_memory_allocated(bench.device) if bench.on_gpu else 0
        rates[mode] = len(prompts) / median(found)
        shares = bench.attempt(f"rerank profile {mode}", lambda once=once: time_shares(bench, once)) or {}
        path = engine.stats.path_rows_peak * 2 * model.config.kv_size * len(model.config.planes) * bench.dtype.itemsize
        rows.append(
            [
                mode,
                f"{rates[mode]:.0f}",
                f"{min(found):.2f}-{max(found):.2f}",
                *(f"{shares.get(kind, 0):.0%}" for kind in ("attention", "linears", "other", "busy")),
                f"{peak / 1e9:.2f}",
                f"{weights / 1e9:.2f}",
                f"{path / 1e6:.1f}",
                f"{pool / 1e9:.2f}",
            ]
        )
        print("  ", *rows[-1], flush=True)
    headers = ["mode", "pairs/s", "s", "attention", "linears", "other", "GPU busy", "peak GB", "weights GB", "path MB"]
    bench.show("rerank", [*headers, "pool of all rows GB"], rows, model=name, pairs=len(prompts), sharing=sharing)
    gain = rates["full"] / rates["off"]
    print(f"  full over off {gain:.2f}; wanted: 0.9 x tokens / unique tokens = {0.9 * sharing:.2f}")


def time_shares(bench: Bench, run) -> dict[str, float]:
    """Return the shares of attention, linears and the rest in the GPU's busy time, and the busy share of all time."""
    if not bench.on_gpu:
        return {}
    from torch.profiler import ProfilerActivity, profile

    sums = {"attention": 0.0, "linears": 0.0, "other": 0.0}
    wall = min(bench.seconds(run, 1, warm=0))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        bench.sync()
    for event in found.key_averages():
        name = event.key.lower()
        kind = "other"
        if name in ("_forward", "_attend", "_join") or "flash" in name or "fmha" in name:
            kind = "attention"
        elif any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk")):
            kind = "linears"
        sums[kind] += event.self_device_time_total / 1e6
    busy = sum(sums.values())
    return {kind: value / busy for kind, value in sums.items()} | {"busy": busy / wall} if busy else {}


def measure_transformers(bench: Bench, name: str) -> None:
    """Time the same geometry in transformers: SDPA, batches of prompts with similar lengths, left padding."""
    import transformers

    config = GEOMETRIES[name] if name != "tiny" else TINY
    prompts = pairs(bench, config["vocab_size"])
    prompts = prompts[: len(prompts) // 4]  # transformers shares nothing, so a part of the prompts is enough
    settings = transformers.AutoConfig.for_model(**config)
    settings._attn_implementation = "sdpa"
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=bench.dtype).eval()
    size = 4 if bench.smoke else 64
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))

    @torch.inference_mode()
    def once() -> None:
        for first in range(0, len(order), size):
            chosen = [prompts[i] for i in order[first : first + size]]
            width = max(map(len, chosen))
            tokens, mask = (np.zeros((len(chosen), width), np.int64) for _ in range(2))
            for row, prompt in enumerate(chosen):
                tokens[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
            tokens, mask = (torch.from_numpy(x).to(bench.device) for x in (tokens, mask))
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False
            ).logits
            logits[:, -1, [9, 21]].float().cpu()

    found = bench.seconds(once, 1)
    row = [f"transformers {transformers.__version__}", f"{len(prompts) / median(found):.0f}", f"{median(found):.2f}"]
    bench.show("rerank", ["system", "pairs/s", "s"], [row], model=name, pairs=len(prompts), batch=size)


def pairs(bench: Bench, vocab: int) -> list[np.ndarray]:
    """Return prompts of query and passage as token ids.

    Texts of --data are cut into words of at most six letters, with one id per word. Without --data, lengths are sampled
    like MS MARCO v1.1's: queries of about 6 words, with 8 passages of about 100 words each.
    """
    rng = np.random.default_rng(0)
    head, tail = (rng.integers(0, vocab, n) for n in (HEAD, TAIL))
    count = 24 if bench.smoke else PAIRS
    prompts: list[np.ndarray] = []
    if bench.data:
        for line in read_jsonl(bench.data):
            for passage in line["passages"]:
                parts = (head, ids(line["query"], vocab), [7], ids(passage["text"], vocab), tail)
                prompts.append(np.concatenate(parts).astype(np.int32))
            if len(prompts) >= count:
                break
    while len(prompts) < count:
        query = rng.integers(0, vocab, 3 + rng.poisson(4))
        for _ in range(max(1, min(10, rng.poisson(8)))):
            passage = rng.integers(0, vocab, int(np.clip(rng.lognormal(4.55, 0.45), 15, 250)))
            prompts.append(np.concatenate((head, query, [7], passage, tail)).astype(np.int32))
    return prompts[:count]


def ids(text: str, vocab: int) -> list[int]:
    return [zlib.crc32(word.encode()) % vocab for word in WORD.findall(text.lower())]
