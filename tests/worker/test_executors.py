"""The two executors give the same of random programs, however their streams are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from configs import configs
from hypothesis import given, settings
from hypothesis import strategies as st
from running import prompts
from safetensors.torch import save_file

from prefold import kernels
from prefold.checkpoint import Checkpoint
from prefold.checkpoint.settings import Settings
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.spec.requests import Readout, Request, Sampling
from prefold.trie import Spool
from prefold.worker.native.load import load_native
from prefold.worker.native.worker import NativeWorker
from prefold.worker.torch.load import load_model
from prefold.worker.torch.model import CausalLM
from prefold.worker.torch.worker import TorchWorker

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("random")


def write_checkpoint(folder, config, seed: int) -> Checkpoint:
    """A checkpoint of a config, with normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = CausalLM(config, dtype=torch.float32, device=torch.device("meta")).held
    parts = {name: (rows, *one.parameter.shape[1:]) for one in shapes for name, rows in one.parts}
    tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint("random", folder, "folder", Settings.of({}))


def workers(checkpoint: Checkpoint, config) -> Iterator[NativeWorker | TorchWorker]:
    """The worker of each executor."""
    yield NativeWorker(load_native(checkpoint, config, dtype="float32"))
    yield TorchWorker(load_model(checkpoint, dtype=torch.float32, device="cpu", config=config, pack=False))


def results(worker, requests: list[Request], readout: Readout, sharing: str, rows: int) -> list:
    options = EngineOptions(
        sharing=sharing,
        max_batch_rows=rows,
        generation=GenerateOptions(kv_memory=200 * worker.facts.slot_bytes),
        eos_ids=(),
    )
    found: list = [None] * len(requests)
    engine = ModelEngine(worker, options)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, str(number).encode())
        for tag, result in engine.run(spool.windows(max_tokens=60, share=sharing == "full"), readout):
            found[int(tag)] = result
    engine.close()
    return found


@settings(max_examples=40)
@given(
    config=configs(),
    sharing=st.sampled_from(["full", "full", "mlp", "off"]),
    rows=st.integers(17, 40),
    caps=st.sampled_from([{}, {}, {"attention_cap": 2.0}, {"logit_cap": 3.0, "logit_scale": 0.5}]),
    seed=st.integers(0, 9),
)
def test_random_programs(folder, config, sharing, rows, caps, seed):
    config = replace(config, **caps)
    checkpoint = write_checkpoint(folder, config, seed)
    asked = [np.array(prompt[:16], np.int32) for prompt in prompts(seed, 8, 30)]
    sampling = Sampling(max_tokens=3, logprobs=2, ignore_eos=True)
    read, made = [], []
    for worker in workers(checkpoint, config):
        for kind in ("last", "mean"):
            found = results(worker, [Request(one) for one in asked], Readout(kind), sharing, rows)
            read.append(np.array([one.values for one in found]))
        generated = results(worker, [Request(one, sampling=sampling) for one in asked], Readout("tokens"), "full", rows)
        made.append([[token.logprob for token in sample.logprobs] for (sample,) in generated])
    for number in range(2):
        native, torch_own = read[number], read[number + 2]
        np.testing.assert_allclose(native, torch_own, rtol=1e-4, atol=1e-4 * np.abs(torch_own).max())
    np.testing.assert_allclose(made[0], made[1], rtol=1e-4, atol=1e-4)
