"""One shuffled job on vLLM in our order and in the job's own, in this process and over HTTP; see fleet.py.

The KV store holds a tenth of the unique tokens, so that a prefix is gone when the next prompt with it comes late. Plain
vLLM is given the whole job at once, as `LLM.generate` does it; over HTTP 256 requests at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from common import median, spread

from prefold.stream import Spool
from prefold.types import Readout, Request, Sampling

BLOCK = 32  # the least that vLLM's CPU build has
PREFIX, TAIL, EACH = 448, 32, 7  # seven prompts for a prefix are asked for five times what is unique
AT_ONCE = 256


def job(groups: int, shared: bool) -> list[np.ndarray]:
    """Prompts in random order, which share five tokens for one that is unique, or nothing."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(10, 40_000, (groups, PREFIX))
    found = [
        np.concatenate((prefixes[k] if shared else rng.integers(10, 40_000, PREFIX), rng.integers(10, 40_000, TAIL)))
        for k in rng.permutation(np.repeat(np.arange(groups), EACH if shared else 2))
    ]
    return [one.astype(np.int32) for one in found]


def options(prompts: list[np.ndarray], output: int) -> dict[str, Any]:
    """Fields of vLLM's arguments."""
    with spooled(prompts, output) as spool:
        unique = spool.unique_tokens()
    longest = PREFIX + TAIL + output
    blocks = max(unique // 10 // BLOCK, -(-longest // BLOCK) + 1) + 1  # one is never used
    return {
        "dtype": "bfloat16", "block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_model_len": 512,
        "max_num_seqs": 64, "max_num_batched_tokens": 1024,
    }  # fmt: skip


def spooled(prompts: list[np.ndarray], output: int) -> Spool:
    spool = Spool()
    for number, tokens in enumerate(prompts):
        spool.add(Request(tokens, sampling=Sampling(max_tokens=output, ignore_eos=True)), str(number).encode())
    return spool


def through_fleet(fleet: Any, prompts: list[np.ndarray], output: int) -> dict[str, float]:
    """Seconds, and the share of the prompts' tokens that was not computed."""
    fleet.reset_stats()
    with spooled(prompts, output) as spool:
        started = time.perf_counter()
        found = dict(fleet.run(spool.windows(max_tokens=1 << 20), Readout("tokens")))
        seconds = time.perf_counter() - started
    assert len(found) == len(prompts) and all(len(one[0].tokens) == output for one in found.values())
    return {"seconds": seconds, "cached": fleet.stats.generation.first_admission_hits / sum(map(len, prompts))}


def in_process(prompts: list[np.ndarray], output: int, model: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from prefold.cluster.fleet import Fleet
    from prefold.cluster.replicas import Replicas
    from prefold.cluster.vllm_host import VllmHost

    given = options(prompts, output)
    hosts: list[VllmHost] = []

    def make() -> VllmHost:
        hosts.append(VllmHost(model, given))
        return hosts[-1]

    loop = asyncio.new_event_loop()

    async def opened() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, disable_log_stats=True, **given))

    async def all_at_once(some: list[np.ndarray]) -> dict[str, float]:
        params = SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        cached = 0

        async def one(number: int, tokens: np.ndarray) -> None:
            nonlocal cached
            async for said in plain.generate({"prompt_token_ids": tokens.tolist()}, params, f"{started}-{number}"):
                cached += said.num_cached_tokens or 0

        await plain.reset_prefix_cache()
        started = time.perf_counter()
        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(some)))
        return {"seconds": time.perf_counter() - started, "cached": cached / sum(map(len, some))}

    plain = loop.run_until_complete(opened())
    runs: dict[str, list[dict[str, float]]] = {"plain vLLM": [], "vLLM in our order": []}
    with closing(Fleet(Replicas({"this machine": make}))) as fleet:
        through_fleet(fleet, prompts[:8], output)
        loop.run_until_complete(all_at_once(prompts[:8]))
        for _ in range(repeats):
            runs["plain vLLM"].append(loop.run_until_complete(all_at_once(prompts)))
            asyncio.run_coroutine_threadsafe(hosts[0]._engine.reset_prefix_cache(), hosts[0]._loop).result()
            runs["vLLM in our order"].append(through_fleet(fleet, prompts, output))
    plain.shutdown()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.1))
    return runs


def over_http(prompts: list[np.ndarray], output: int, model: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    import httpx

    from prefold.cluster.fleet import Fleet
    from prefold.cluster.http_host import HttpReplicas

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    arguments += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "m",
        "--disable-log-stats",
        "--enable-prompt-tokens-details",
    ]
    for name, value in options(prompts, output).items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]

    async def all_at_once(some: list[np.ndarray]) -> dict[str, float]:
        room, cached = asyncio.Semaphore(AT_ONCE), 0
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

            async def one(tokens: np.ndarray) -> None:
                nonlocal cached
                body = {
                    "model": "m",
                    "prompt": tokens.tolist(),
                    "max_tokens": output,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                async with room:
                    said = await client.post("/v1/completions", json=body)
                said.raise_for_status()
                cached += (said.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0

            started = time.perf_counter()
            await asyncio.gather(*(one(tokens) for tokens in some))
            return {"seconds": time.perf_counter() - started, "cached": cached / sum(map(len, some))}

    def forget() -> None:
        urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST"), timeout=30).read()

    runs: dict[str, list[dict[str, float]]] = {"plain vLLM over HTTP": [], "our order over HTTP": []}
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            # The texts of answers are not read; ids go in, so no tokenizer is needed here.
            with closing(Fleet(HttpReplicas([url], "m", None, patience=300))) as fleet:
                with spooled(prompts[:8], output) as spool:
                    list(fleet.run(spool.windows(max_tokens=1 << 20), Readout("tokens"), object()))  # type: ignore[arg-type]
                asyncio.run(all_at_once(prompts[:8]))
                for _ in range(repeats):
                    forget()
                    runs["plain vLLM over HTTP"].append(asyncio.run(all_at_once(prompts)))
                    forget()
                    runs["our order over HTTP"].append(through_http(fleet, prompts, output))
        finally:
            server.terminate()
    return runs


def through_http(fleet: Any, prompts: list[np.ndarray], output: int) -> dict[str, float]:
    fleet.reset_stats()
    with spooled(prompts, output) as spool:
        started = time.perf_counter()
        found = dict(fleet.run(spool.windows(max_tokens=1 << 20), Readout("tokens"), object()))
        seconds = time.perf_counter() - started
    assert len(found) == len(prompts) and all(isinstance(one, list) for one in found.values())
    return {"seconds": seconds, "cached": fleet.stats.generation.first_admission_hits / sum(map(len, prompts))}


def vllm(
    model: str, groups: int, repeats: int, output: int = 8, ways: str = "process,http", jobs: str = "shared,single"
) -> list[dict[str, Any]]:
    """The table of the case. model: a folder that vLLM can open."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    table = []
    for shared in (True, False):
        if ("shared" if shared else "single") not in jobs.split(","):
            continue
        prompts = job(groups, shared)
        for way in ways.split(","):
            runs = (in_process if way == "process" else over_http)(prompts, output, model, repeats)
            base = median([one["seconds"] for one in next(iter(runs.values()))])
            for name, some in runs.items():
                seconds = [one["seconds"] for one in some]
                table.append(
                    {
                        "job": "5 tokens asked for each unique one" if shared else "nothing shared", "system": name,
                        "prompts": len(prompts), "seconds": median(seconds), "rounds": seconds,
                        "spread": spread(seconds),
                        "found in the cache": some[0]["cached"], "times as fast": base / median(seconds),
                    }
                )  # fmt: skip
                print(json.dumps(table[-1]), flush=True)
    return table


__all__ = ["vllm"]
if __name__ == "__main__":
    sys.exit(f"python {Path(__file__).with_name('fleet.py')} vllm --model FOLDER")
