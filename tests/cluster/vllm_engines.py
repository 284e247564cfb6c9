"""An engine that stands for vLLM's, and modules in place of vLLM."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest


class FakeEngine:
    """Continues a prompt by its length and its last token. Knows how much is under way, and in what order it came."""

    def __init__(self, arguments):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=64, dtype="torch.float32"),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
            cache_config=SimpleNamespace(num_gpu_blocks=8, block_size=16),
        )
        self.arguments, self.errored = arguments, False
        self.prompts, self.now, self.most = [], 0, 0
        self.release = threading.Event()
        self.release.set()

    async def generate(self, prompt, params, request_id, *, priority):
        tokens = prompt["prompt_token_ids"]
        self.prompts.append(tokens)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.001)
            while not self.release.is_set():
                await asyncio.sleep(0.01)
            if tokens[0] == 98:
                raise ValueError("this prompt is not allowed")
            if tokens[0] == 99:
                self.errored = True
                raise RuntimeError("the engine core is gone")
            found = SimpleNamespace(token_ids=[len(tokens), tokens[-1], 2], text="x", finish_reason="stop",
                                    stop_reason=None, logprobs=None)  # fmt: skip
            yield SimpleNamespace(num_cached_tokens=3, outputs=[found] * params.n)
        finally:
            self.now -= 1

    def shutdown(self):
        self.errored = True
        self.open_at_the_end = self.now


@pytest.fixture
def engines(monkeypatch):
    """Puts modules in vLLM's place; returns the engines that are made."""
    made = []

    def from_engine_args(arguments):
        made.append(FakeEngine(arguments))
        return made[-1]

    class AsyncEngineArgs(SimpleNamespace):
        __dataclass_fields__ = dict.fromkeys(("model", "enable_prefix_caching", "max_num_seqs", "disable_log_stats"))

    for name in ("vllm", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vllm, parameters = sys.modules["vllm"], sys.modules["vllm.sampling_params"]
    vllm.__version__, vllm.AsyncEngineArgs, vllm.SamplingParams = "0", AsyncEngineArgs, SimpleNamespace
    vllm.sampling_params = parameters
    parameters.StructuredOutputsParams = SimpleNamespace
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    sys.modules["vllm.v1.engine.async_llm"].AsyncLLM = SimpleNamespace(from_engine_args=from_engine_args)
    return made
