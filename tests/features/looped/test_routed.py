"""Routers, planners and gates against their definitions in `looped_dense`: what they pick, and what comes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from looped_dense import LOOPED, Dense, looped_checkpoint
from running import as_request, prompts, run
from safetensors.torch import load_file, save_file

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.features.looped.config import Routing
from prefold.features.looped.gates import choose
from prefold.features.looped.model import LoopedLM
from prefold.features.looped.train import mixture, routed, routed_logprobs, whole_sequences
from prefold.model import config_from
from prefold.spec.requests import Readout
from prefold.train import TrainBatch, save_model
from prefold.worker.torch.load import load_model

BASE = {"blocks": 3, "order": [0, 1, 2, 0, 1]}
SHAPES = {"num_hidden_layers": 6, "num_key_value_heads": 6}
ROUTERS = [
    {"kind": "soft"},
    {"kind": "hard", "threshold": 0.35},
    {"kind": "top", "top": 2, "threshold": 0.4},
    {"kind": "planned", "planner": True, "threshold": 0.4},
    {"kind": "hard", "reads": "row", "threshold": 0.4},
    {"kind": "soft", "reads": "row"},
    {"kind": "top", "top": 2, "reads": "row", "threshold": 0.4},
]
TOKENS = [list(range(5, 30)), [7, 3, 200, 11, 90, 90, 4], [9], list(range(100, 160))]


def load(folder, **options):
    model = load_model(resolve(str(folder)), **({"dtype": torch.float32, "device": "cpu"} | options))
    assert isinstance(model, LoopedLM)
    return model


def checkpoint(tmp_path, router, *, seed=0, **loop):
    return looped_checkpoint(tmp_path, "looped", seed=seed, **SHAPES, loop=BASE | {"router": router} | loop)


def visits_of(model, token_lists, **options):
    """Each visit of the sequences, one after the other."""
    batch = TrainBatch.build(model.config, [[*tokens, 1] for tokens in token_lists], sharing="off")
    return list(routed(model, *whole_sequences(model, batch), **options))


@pytest.mark.parametrize("between", ["nothing", "norm", "inject", "add"])
@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: "-".join(map(str, r.values())))
def test_states_and_weights(tmp_path, router, between):
    folder = checkpoint(tmp_path, router, between=between, **({"noise": 0.5} if between == "inject" else {}))
    dense, model = Dense(folder), load(folder)
    with torch.inference_mode():
        visits = visits_of(model, TOKENS)
    at, picked = 0, set()
    for number, tokens in enumerate(TOKENS):
        states, weights = dense.routed(tokens)
        for visit, state, weight in zip(visits, states, weights, strict=True):
            found = visit.weights[at : at + len(tokens)] if router.get("reads") == "row" else visit.weights[number]
            torch.testing.assert_close(found.expand(len(tokens), -1), weight, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(visit.state[at : at + len(tokens)], state, rtol=1e-4, atol=1e-4)
            picked |= set(map(tuple, weight.gt(0.5).tolist()))
        at += len(tokens)
    if router["kind"] != "soft":
        assert (False,) * 3 + (True,) in picked and len(picked) > 2


def test_routes_that_are_given(tmp_path):
    """A route's rows are what they are where the router has chosen it, and those of the fixed order a plain call's."""
    folder = checkpoint(tmp_path, {"kind": "hard", "threshold": 0.35})
    model = load(folder)
    with torch.inference_mode():
        asked = visits_of(model, TOKENS)
        picks = [[int(visit.weights[number].argmax()) for visit in asked] for number in range(len(TOKENS))]
        routes = [list(itertools.takewhile(lambda block: block < 3, one)) for one in picks]
        assert len(set(map(len, routes))) > 1
        given = visits_of(model, TOKENS, routes=routes)
        torch.testing.assert_close(given[-1].state, asked[-1].state, rtol=1e-5, atol=1e-5)
        fixed = visits_of(model, TOKENS, routing=replace(model.loop.router, kind="fixed"))
    llm = LLM(str(checkpoint(tmp_path, {"kind": "fixed"})), dtype="float32", device="cpu")
    at = 0
    for tokens in TOKENS:
        at += len(tokens)
        found = run(llm, [as_request(tokens)], Readout("last"), sharing="full", rows=100)
        torch.testing.assert_close(torch.from_numpy(found[0].values), fixed[-1].state[at - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("route", [[], [0] * 6, [3], [-1], [True]])
def test_routes_that_cannot_be(tmp_path, route):
    model = load(checkpoint(tmp_path, {"kind": "hard"}))
    with pytest.raises(InputError, match="the route of sequence 1"):
        visits_of(model, TOKENS[:2], routes=[[0], route])
    with pytest.raises(InputError, match="1 routes for 2"):
        visits_of(model, TOKENS[:2], routes=[[0]])


def test_ties_go_to_the_first_and_the_threshold_counts():
    logits = np.array([[1, 1, 0], [0, 2, 2], [0, 0, 0]], np.float32)
    assert choose(logits, 0.5).tolist() == [0, 1, 0]
    assert choose(logits, 0.4).tolist() == [0, 2, 0]
    assert choose(logits, np.array([0.1, 0.9, 0.3])).tolist() == [2, 1, 2]
    shares = mixture(torch.from_numpy(logits), Routing("top", top=2, threshold=0.45))
    assert shares[0].tolist() == [0.5, 0.5, 0]
    assert shares[1].tolist() == [0, 0, 1]


def test_training_a_router(tmp_path):
    """Gradients through a soft route are those of the definition, and what is learned is saved and loaded."""
    folder = checkpoint(tmp_path, {"kind": "soft", "planner": True}, gate=True, gate_reads="features")
    model, sequences = load(folder, pack=False), [[5, 7, 11, 7, 30], [5, 7, 20], [9, 9]]
    batch = TrainBatch.build(model.config, sequences, sharing="off")
    found = routed_logprobs(model, batch)
    assert found.logprobs.shape == (5, 7) and found.choices.shape == (5, 3, 4)
    dense = Dense(folder)
    dense.t = {name: t.requires_grad_() for name, t in dense.t.items()}
    loss = 0.0
    for some in sequences:
        for state in dense.routed(some[:-1])[0]:
            scores = dense.logits(state).log_softmax(-1)
            loss = loss - scores.gather(1, torch.tensor(some[1:])[:, None]).sum()
    torch.testing.assert_close(-found.logprobs.sum().detach(), loss.detach(), rtol=1e-4, atol=1e-3)
    (-found.logprobs.sum()).backward()
    loss.backward()
    for name in ("inner", "outer"):
        mine, theirs = getattr(model.router, name).weight.grad, dense.t[f"model.router.{name}.weight"].grad
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    with torch.no_grad():
        for parameter in model.router.parameters():
            parameter -= 0.1 * parameter.grad
    saved = save_model(model, resolve(str(folder)), tmp_path / "saved")
    tensors = load_file(saved / "model.safetensors")
    assert set(tensors) == set(load_file(folder / "model.safetensors"))
    again = load(saved, pack=False)
    assert torch.equal(again.router.step, model.router.step)
    assert again.config.num_parameters == sum(p.numel() for p in again.parameters())


@pytest.mark.parametrize("threshold", [0.95, 0.98])
def test_a_gate_that_reads_features(tmp_path, threshold):
    loop = LOOPED["loop"] | {"gate": True, "gate_reads": "features", "threshold": threshold}
    folder = looped_checkpoint(tmp_path, "looped", loop=loop)
    dense, llm, token_lists, visits = Dense(folder), LLM(str(folder), dtype="float32", device="cpu"), prompts(3), set()
    found = run(llm, [as_request(t) for t in token_lists], Readout("last"), sharing="full", rows=8)
    for tokens, result in zip(token_lists, found, strict=True):
        states = dense.visits(tokens)
        left = dense.leaving(states)[:, -1].cumsum(0)
        visit = int((left >= threshold).float().argmax()) if bool((left >= threshold).any()) else len(states) - 1
        visits.add(visit)
        torch.testing.assert_close(torch.from_numpy(result.values), states[visit][-1], rtol=1e-4, atol=1e-4)
    assert len(visits) > 1


def loop(**changes):
    return LOOPED | {"loop": LOOPED["loop"] | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "oracle"}, r"loop\.router\.kind is 'oracle'"),
        ({"router": {"kind": "hard", "reads": "all"}}, r"loop\.router\.reads is 'all'"),
        ({"router": {"threshold": 0}}, r"loop\.router\.threshold is 0"),
        ({"router": {"threshold": 1.2}}, r"loop\.router\.threshold is 1\.2"),
        ({"router": {"kind": "top", "top": 3}}, r"loop\.router\.top is 3"),
        ({"router": {"kind": "top", "top": 0}}, r"loop\.router\.top is 0"),
        ({"router": {"kind": "planned"}}, r"loop\.router\.kind is \"planned\", but planner is false"),
        ({"router": {"reads": "row", "planner": True}}, r"loop\.router\.planner is true"),
        ({"router": {"treshold": 0.5}}, r"loop\.router\.treshold is unknown"),
        ({"router": "hard", "order": [1, 1]}, r"loop\.order lacks the block 0"),
        ({"gate": True, "gate_reads": "tokens"}, r"loop\.gate_reads is 'tokens'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from(loop(**changes))


@pytest.mark.parametrize("lost", ["router.step", "router.inner.weight", "planner.outer.bias", "gate.weight"])
def test_missing_tensors_are_named(tmp_path, lost):
    folder = checkpoint(tmp_path, {"kind": "hard", "planner": True}, gate=True, gate_reads="features")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model." + lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing: {lost}"):
        load(folder)


@pytest.mark.parametrize(
    "router", [{"kind": "soft"}, {"kind": "top", "top": 2}, {"kind": "hard", "reads": "row"}], ids=lambda one: str(one)
)
def test_routers_that_steps_cannot_follow_are_refused_by_the_engine(tmp_path, router):
    key = "reads" if "reads" in router else "kind"
    with pytest.raises(UnsupportedModelError, match=rf"loop\.router\.{key} is .{router[key]}"):
        LLM(str(checkpoint(tmp_path, router)), dtype="float32", device="cpu")
