"""Requests of every kind, and what they give with steps planned ahead or one at a time."""

from __future__ import annotations

import numpy as np
from books import check_books
from running import prompts

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.schedule.scheduler import Scheduler
from prefold.spec.requests import Request, Sampling
from prefold.worker.torch.worker import TorchWorker

# The last ones need the tokens before, and are chosen on the host.
ASKED = [
    Sampling(max_tokens=6, ignore_eos=True),
    Sampling(max_tokens=7, temperature=1.0, seed=1),
    Sampling(max_tokens=5, temperature=1.3, top_k=9, top_p=0.9, seed=2, n=3),
    Sampling(max_tokens=9, stop_ids=tuple(range(0, 300, 4))),
    Sampling(max_tokens=9, stop_ids=tuple(range(0, 300, 3)), min_tokens=3, temperature=0.7, min_p=0.01, seed=3),
    Sampling(max_tokens=1),
    Sampling(max_tokens=3, repetition_penalty=1.3),
    Sampling(max_tokens=2, logprobs=2),
]


def generated(llm: LLM, some: list[Sampling], *, ahead: bool, **options) -> tuple[list, ModelEngine]:
    """(tokens, finish_reason, stop) of each sample of each request; and the engine that made them."""
    generation = GenerateOptions(**{"kv_memory": 1 << 20} | options)
    worker = TorchWorker(llm.model, depth=2 if ahead else 1)
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=24, generation=generation))
    found: dict[int, list] = {}
    for number, sampling in enumerate(some):
        prompt = prompts(4, count=10)[number]
        request = Request(np.array(prompt, np.int32), sampling=sampling)
        engine.generator.add(request, None, lambda answer, number=number: found.update({number: answer}))
    while engine.generator.step():
        check_books(engine.generator.scheduler)
    assert not engine.generator.has_work
    said = [[(one.tokens, one.finish_reason, one.stop) for one in found[number]] for number in range(len(some))]
    return said, engine


def watch_steps(monkeypatch) -> list[bool]:
    """Of each step that is begun from here on, whether the one before was still under way."""
    begun: list[bool] = []
    begin = Scheduler.begin
    monkeypatch.setattr(Scheduler, "begin", lambda self, step: begun.append(bool(self._in_flight)) or begin(self, step))
    return begun
