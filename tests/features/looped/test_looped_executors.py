"""Looped models on the native executor beside the same on PyTorch's: what is read, made, copied, projected, adapted."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import PROGRAMS, checkpoint_of
from generating import generate, tokens_of
from invariance import check_invariant
from looped_dense import LOOPED, looped_adapter, looped_checkpoint
from running import as_request, prompts, run
from visit_checks import GATED, engine_of, request_of

from prefold import LLM, InputError, kernels
from prefold.errors import UnsupportedModelError
from prefold.spec.requests import Exits, Namespace, Readout
from prefold.worker.native.worker import NativeWorker
from prefold.worker.torch.worker import TorchWorker

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")

PARTS = {"blocks": 2, "order": [1, 0, 1], "prelude": 1, "coda": 1, "between": "inject", "noise": 0.5, "seed": 2}
FEATURES = GATED | {"between": "norm", "gate_reads": "features", "threshold": 0.95}
MODELS = {
    "ouro": ("ouro", {"total_ut_steps": 4, "early_exit_threshold": 0.6}),
    "windowed": ("ouro", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "looped": ("looped", {"loop": GATED}),
    "features": ("looped", {"loop": FEATURES}),
    "parts": ("looped", {"num_hidden_layers": 6, "loop": PARTS}),
    "fed": ("looped", {"loop": GATED | {"between": "inject", "noise": 0.5}}),
    "added": ("looped", {"loop": GATED | {"between": "add"}}),
    "dory": ("dory", PROGRAMS["dory"]),
    "huginn": ("huginn", {"mean_recurrence": 3}),
    "hard": ("looped", {"loop": GATED | {"router": {"kind": "hard", "threshold": 0.35}}, "seed": 3}),
    "planned": (
        "looped",
        {"loop": GATED | {"router": {"kind": "planned", "planner": True, "threshold": 0.35}}, "seed": 3},
    ),
}
# Rounding grows from visit to visit: in float64 the definition differs from either by half of this.
NEAR = {"rtol": 1e-4, "atol": 1e-4}
EXITS = [Exits(), Exits(max_visits=2), Exits(change=0.9, prompts=True), Exits(route=(0,)), Exits(max_visits=1)]


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    family, overrides = MODELS[request.param]
    place = tmp_path_factory.mktemp("executors")
    if family in PROGRAMS:
        folder = checkpoint_of(place / "model", family, overrides)
    else:
        folder = looped_checkpoint(place, family, **overrides)
    adapter = folder.parent / "adapter"
    looped_adapter(folder, adapter)
    options = {"dtype": "float32", "device": "cpu", "adapters": {"one": str(adapter)}}
    native, torch = LLM(str(folder), **options), LLM(str(folder), executor="torch", **options)
    assert isinstance(native.engine.worker, NativeWorker) and isinstance(torch.engine.worker, TorchWorker)
    return native, torch


def is_routed(llm: LLM) -> bool:
    return llm.config.loop.router is not None


def as_made(llm: LLM, exits: Exits) -> Exits:
    """The exits, without what a router's prompts cannot have."""
    return replace(exits, prompts=False) if is_routed(llm) else exits


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize("adapter", ["", "one"])
def test_numbers(pair, sharing, rows, adapter):
    sharing = "full" if is_routed(pair[0]) and sharing == "mlp" else sharing
    asked = [replace(as_request(tokens), namespace=Namespace(adapter)) for tokens in prompts(3, count=6)]
    for readout in (Readout("last"), Readout("mean")):
        found, wanted = (run(llm, asked, readout, sharing=sharing, rows=rows) for llm in pair)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.values, other.values, **NEAR)


@pytest.mark.parametrize("keys", ["save", "project"])
@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("adapter", ["", "one"])
def test_rows_that_leave(pair, keys, rows, adapter):
    exits = [as_made(pair[0], one) for one in EXITS]
    asked = [
        replace(request_of(tokens, one), namespace=Namespace(adapter))
        for tokens in prompts(3, count=4)
        for one in exits
    ]
    made, stats = [], []
    for llm in pair:
        engine = engine_of(llm, rows=rows, exits=keys)
        made.append(tokens_of(generate(engine, asked)))
        stats.append(engine.stats.generation)
    assert made[0] == made[1]
    assert stats[0].block_calls == stats[1].block_calls and stats[0].block_calls_saved == stats[1].block_calls_saved > 0


@pytest.mark.parametrize("keys", ["save", "project"])
def test_numbers_of_rows_that_leave(pair, keys):
    """Rows of prompts leave, and later rows see K/V of deeper visits that were copied or made of them."""
    requests = [as_request(tokens) for tokens in prompts(3, count=4)]
    for exits in (Exits(max_visits=2, prompts=True), Exits(change=0.95, prompts=True), Exits(route=(0, 0))):
        readout, found = Readout("last", exits=as_made(pair[0], exits)), []
        for llm in pair:
            engine = SimpleNamespace(engine=engine_of(llm, rows=7, exits=keys))
            results = run(engine, requests, readout, sharing=None, rows=None)
            found.append(np.stack([result.values for result in results]))
        np.testing.assert_allclose(*found, **NEAR)


def test_a_route_through_a_block_that_the_order_leaves_out(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", loop={"blocks": 2, "order": [0, 0]})
    made = []
    for executor in ("native", "torch"):
        llm = LLM(str(folder), dtype="float32", device="cpu", executor=executor)
        made.append([llm.embed([[5, 6, 7], [5, 6]], normalize=False, route=route) for route in ((1,), (0, 1), (0, 0))])
    np.testing.assert_allclose(*made, **NEAR)
    assert np.abs(np.subtract(*made[0][:2])).max() > 0.1


def test_gates_and_routers_are_not_invariant(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", loop=GATED | {"router": {"kind": "hard"}})
    with pytest.raises(InputError, match="gates and routers of looped models"):
        LLM(str(folder), device="cpu", invariant=True)


def test_company_changes_no_bit(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", num_hidden_layers=6, loop=PARTS)
    check_invariant(folder, dtype="float32", device="cpu")


def test_bfloat16_is_near(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", num_hidden_layers=6, loop=PARTS | {"between": "nothing"})
    native, torch = (LLM(str(folder), dtype="bfloat16", device="cpu", executor=one) for one in ("native", "torch"))
    found, wanted = (llm.embed(prompts(3, count=4)) for llm in (native, torch))
    assert (found * wanted).sum(1).min() > 0.995


def test_a_router_that_steps_cannot_follow(tmp_path):
    folder = looped_checkpoint(tmp_path, "looped", loop=LOOPED["loop"] | {"router": {"kind": "soft"}})
    for executor in ("native", "torch"):
        with pytest.raises(UnsupportedModelError, match=r"loop\.router\.kind is 'soft'"):
            LLM(str(folder), dtype="float32", device="cpu", executor=executor)


def test_memory_goes_back_with_the_last_reference(tmp_path):
    """Without the garbage collector's help, as of other models."""
    llm = LLM(str(looped_checkpoint(tmp_path, "huginn")), dtype="float32", device="cpu")
    llm.embed([[5, 6, 7]])
    llm.generate([[5, 6]], max_tokens=2)
    model = weakref.ref(llm.model)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert model() is None
    finally:
        gc.enable()
