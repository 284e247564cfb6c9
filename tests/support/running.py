"""Running requests through an engine, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from prefold import LLM
from prefold.spec.requests import Readout, Request
from prefold.trie import Spool


def prompts(seed: int, count: int = 12, vocab: int = 300) -> list[list[int]]:
    """Random prompts, many of which begin alike; duplicates, prefixes of others and one-token prompts among them."""
    rng = np.random.default_rng(seed)
    found: list[list[int]] = []
    for _ in range(count):
        stem = found[rng.integers(len(found))] if found and rng.random() < 0.8 else []
        keep = int(rng.integers(len(stem) + 1))
        found.append([*stem[:keep], *rng.integers(0, vocab, int(rng.integers(1, 9))).tolist()])
    return [*found, found[0], found[1][:1], found[2][: max(1, len(found[2]) // 2)]]


def run(
    llm: LLM,
    requests: list[Request],
    readout: Readout,
    *,
    sharing: str | None,
    rows: int | None,
    window: int = 1 << 20,
    on_step=None,
) -> list:
    results = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, str(number).encode())
        windows = spool.windows(max_tokens=window, share=(sharing or llm.engine.facts.sharing) == "full")
        for tag, result in llm.engine.run(windows, readout, sharing=sharing, max_batch_rows=rows, on_step=on_step):
            assert results[int(tag)] is None
            results[int(tag)] = result
    return results


def as_request(tokens: list[int], targets: list[int] | None = None) -> Request:
    return Request(np.array(tokens, np.int32), None if targets is None else np.array(targets, np.int32))


def as_transformers(llm: LLM, attention: str) -> torch.nn.Module:
    """The same float32 weights in transformers' own model."""
    import transformers

    from prefold.model.sources import open_source
    from prefold.worker.torch.tensors import array_of

    config = transformers.AutoConfig.for_model(**llm.checkpoint.config)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    source = open_source(llm.checkpoint, llm.config, {}, 0)
    names = dict(model.named_parameters())
    assert {name.removeprefix("model.") for name in names} == set(source.shapes)
    with torch.no_grad():
        for name, parameter in names.items():
            source.read_into(name.removeprefix("model."), array_of(parameter))
    return model


@contextmanager
def no_steps(engine) -> Iterator[None]:
    """A context in which the engine makes no step."""
    entered, left = threading.Event(), threading.Event()
    held = threading.Thread(target=engine.call, args=(lambda: (entered.set(), left.wait()),))
    held.start()
    entered.wait()
    try:
        yield
    finally:
        left.set()
        held.join()
