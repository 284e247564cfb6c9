"""LoRA in numeric runs: requests of several adapters and of none in one call, against models merged with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import merged, write_adapter
from running import prompts, run
from tiny import reference, tiny_checkpoint

from prefold import LLM, InputError
from prefold.spec.requests import Namespace, Readout, Request

NAMES = ["", "one", "two"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_checkpoint(folder, "qwen3")
    return base, {name: str(write_adapter(folder / name, base, seed=i)) for i, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def llm(folders) -> LLM:
    return LLM(str(folders[0]), dtype="float32", device="cpu", adapters=folders[1])


@pytest.fixture(scope="module")
def oracles(folders) -> dict[str, torch.nn.Module]:
    base, adapters = folders
    return {"": reference(base), **{name: merged(base, Path(path)) for name, path in adapters.items()}}


def requests(targets: bool = False) -> list[Request]:
    """Every prompt with every adapter, so that all of them begin alike."""
    some = [np.array(prompt, np.int32) for prompt in prompts(6, count=8)]
    return [
        Request(p, np.array([3, 5], np.int32)[: len(p)] if targets else None, namespace=Namespace(name))
        for p in some
        for name in NAMES
    ]


@torch.inference_mode()
def expected(oracles, readout: Readout, request: Request) -> np.ndarray:
    model, ids = oracles[request.namespace.adapter], torch.tensor(request.tokens[None].astype(np.int64))
    hidden = model.base_model(ids).last_hidden_state[0]
    if readout.kind == "mean":
        return hidden.mean(0).numpy()
    if readout.kind == "first":
        return hidden[0].numpy()
    if readout.kind == "last":
        return hidden[-1].numpy()
    logits = model(ids).logits[0]
    if readout.kind == "logits":
        return logits[-1, list(readout.ids)].numpy()
    m = len(request.targets)
    return logits.log_softmax(-1)[-m:].gather(1, torch.tensor(request.targets[:, None].astype(np.int64)))[:, 0].numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("readout", [*map(Readout, ("last", "mean", "logprobs")), Readout("logits", (4, 9))])
def test_each_request_runs_with_its_adapter(llm, oracles, readout, sharing):
    some = requests(targets=readout.kind == "logprobs")
    for rows, window in ((4096, 1 << 20), (7, 40)):
        found = run(llm, some, readout, sharing=sharing, rows=rows, window=window)
        for request, result in zip(some, found, strict=True):
            np.testing.assert_allclose(result.values, expected(oracles, readout, request), atol=2e-4)


def test_prompts_share_only_with_those_of_their_adapter(llm):
    llm.engine.reset_stats()
    some = requests()
    run(llm, some, Readout("last"), sharing="full", rows=4096)
    unique = {(r.namespace, *r.tokens[: i + 1].tolist()) for r in some for i in range(len(r.tokens))}
    assert llm.engine.stats.rows_computed == len(unique)


def test_prompts_kept_for_later_calls_have_adapters_too(folders, oracles):
    llm = LLM(str(folders[0]), dtype="float32", device="cpu", adapters=folders[1], cache_prefill=True)
    some = requests()
    for _ in range(2):
        found = run(llm, some, Readout("last"), sharing="full", rows=4096)
        for request, result in zip(some, found, strict=True):
            np.testing.assert_allclose(result.values, expected(oracles, Readout("last"), request), atol=2e-4)


def test_an_adapter_that_is_not_there(llm):
    request = Request(np.array([5, 6], np.int32), namespace=Namespace("three"))
    with pytest.raises(InputError, match="no adapter 'three'; loaded adapters: one, two"):
        run(llm, [request], Readout("last"), sharing="full", rows=4096)
