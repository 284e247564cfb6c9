"""examples/looped_model.py: its graphs, a run that is interrupted and goes on, and what it saves."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prefold import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--nodes=9", "--chains=3", "--hops=1", "--hidden=16", "--steps=7", "--graphs=2"]


@pytest.fixture(scope="module")
def example():
    """The example, whose runs save after every second step."""
    made = module("looped_model")
    made.SAVE_EVERY = 2
    return made


@pytest.fixture(scope="module")
def router_example(example):
    return module("looped_router")


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up, and one example the other
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("nodes", "chains"), [(9, 3), (16, 3), (24, 4)])
def test_the_answer_is_the_end_of_the_chain(example, nodes, chains):
    task, rng = example.Task(nodes, chains), np.random.default_rng(nodes)
    queries = example.Queries.make(task, 5, task.longest, 8, rng)
    for prompt, wanted, hops, settled in zip(
        queries.prompts, queries.wanted.T, queries.hops, queries.settled.T, strict=True
    ):
        points = {edge // nodes: edge % nodes for edge in prompt[:-1]}
        assert len(points) == nodes and sum(a == b for a, b in points.items()) == chains
        node, made = prompt[-1] - nodes * nodes, 0
        for visit in range(8):
            made += points[node] != node
            assert settled[visit] == (points[node] == node)
            node = points[node]
            assert wanted[visit] == task.query(node)
        assert made == hops >= 1


def test_an_interrupted_run_goes_on(example, tmp_path, monkeypatch, capsys):
    whole = example.main([*SMALL, f"--out={tmp_path / 'whole'}"])
    read, calls = example.visit_logprobs, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(example, "visit_logprobs", stops)
    out = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        example.main([*SMALL, f"--out={out}"])
    with pytest.raises(SystemExit, match="other options"):
        example.main([*SMALL, "--seed=3", f"--out={out}"])
    assert example.main([*SMALL, f"--out={out}"]) == whole
    assert "continuing after step 4" in capsys.readouterr().out
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(SystemExit):
        example.main([*SMALL, f"--out={out}"])  # what is there is not overwritten
    assert "already has a trained model" in capsys.readouterr().err
    llm = LLM(str(out), dtype="float32", device="cpu")
    queries = example.Queries.make(example.Task(9, 3), 2, 2, 8, np.random.default_rng(0))
    assert len(llm.generate(queries.prompts, max_tokens=1, exit_threshold=0.5)) == len(queries.prompts)


@pytest.mark.parametrize("name", ["looped_model", "looped_router"])
def test_a_run_that_is_interrupted_at_its_end_goes_on(name, router_example, trained, tmp_path, monkeypatch, capsys):
    """Weights are there when all else is: until then the same command may be given again."""
    made, out = sys.modules[name], tmp_path / "out"
    given = [*SMALL, f"--out={out}"] if name == "looped_model" else [*ROUTER, f"--model={trained}", f"--out={out}"]
    for place, broken in ((made, "evaluate"), (sys.modules["looped_model"].os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, broken, interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.main(given)
        assert not (out / "model.safetensors").exists()
    found = made.main(given)
    assert json.loads((out / "found.json").read_text())["options"]["seed"] in (0, "0")
    assert found and sorted(path.name for path in out.iterdir()) == ["config.json", "found.json", "model.safetensors"]


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_loss_that_is_no_number_ends_the_run(example, tmp_path, monkeypatch):
    read = example.visit_logprobs
    monkeypatch.setattr(example, "visit_logprobs", lambda *given: tuple(part * float("nan") for part in read(*given)))
    with pytest.raises(SystemExit, match="the loss is nan at step 0 of seed 5"):
        example.main([*SMALL, "--seed=5", f"--out={tmp_path / 'out'}"])


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "model"
    example.main([*SMALL, f"--out={out}"])
    return out


ROUTER = ["--chains=3", "--hops=2", "--steps=6", "--sequences=6", "--planner-prompts=64", "--planner-steps=5"]


def test_marks_say_how_many_hops_are_asked_for(router_example, example):
    task = example.Task(16, 3, 3)
    queries = example.Queries.make(task, 2, 3, 8, np.random.default_rng(0))
    assert [prompt[-2] - 16 * 17 + 1 for prompt in queries.prompts] == queries.hops.tolist()
    packs = router_example.Packs.make(task, [range(2, 3), range(3, 4)], 2, np.random.default_rng(1))
    assert [prompt[16] - 16 * 17 + 1 for prompt in packs.prompts] == [2, 3]
    assert task.vocab_size == 16 * 17 + 3 > max(max(prompt) for prompt in queries.prompts)
    model = example.make_model(example.hf_config(task, 16, 2, 4))
    example.initialise(model, task, 0)
    assert model.embedding[-3:].abs().mean() > 0.2  # those of marks too


def test_packs_ask_what_they_say(router_example, example):
    task, hops = example.Task(16, 3), [range(2, 3), range(1, 4), range(3, 4)]
    packs = router_example.Packs.make(task, hops, 3, np.random.default_rng(1))
    at = 0
    for prompt, asked, among in zip(packs.prompts, packs.asked, hops, strict=True):
        points = {edge // 16: edge % 16 for edge in prompt[:-asked]}
        assert len(points) == 16 and 1 <= asked <= 3
        for token in prompt[-asked:]:
            node, made = token - 256, 0
            while points[node] != node:
                node, made = points[node], made + 1
            assert (packs.wanted[at], packs.hops[at]) == (task.query(node), made) and made in among
            at += 1
    assert at == len(packs.wanted) > 5


@pytest.mark.parametrize(
    "more", [["--reads=request"], pytest.param(["--reads=row"], marks=pytest.mark.slow), ["--sure=0.5"]]
)
def test_a_router_is_trained_on(router_example, trained, tmp_path, monkeypatch, capsys, more):
    given = [*ROUTER, f"--model={trained}", *more]
    whole = router_example.main([*given, f"--out={tmp_path / 'whole'}"])
    assert whole["fixed"]["visits"] == {1: 8.0, 2: 8.0}
    assert all(len(one["by hops"]) == 2 for name, one in whole.items() if name != "planner")
    ask, calls = router_example.routed_logprobs, []

    def stops(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return ask(*arguments, **options)

    monkeypatch.setattr(router_example, "routed_logprobs", stops)
    out = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        router_example.main([*given, f"--out={out}"])
    assert router_example.main([*given, f"--out={out}"]) == whole
    assert "continuing after step 4" in capsys.readouterr().out
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    base = load_file(trained / "model.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in base.items())
    assert not torch.equal(first["model.router.step"], torch.zeros_like(first["model.router.step"]))
    with pytest.raises(SystemExit):
        router_example.main([*given, f"--out={out}"])


def test_by_how_much_a_router_is_decided(router_example):
    """A choice is another only where so much probability goes from what is chosen to something else."""
    shares = torch.tensor([[0.6, 0.1, 0.3], [0.4, 0.35, 0.25], [0.1, 0.2, 0.7], [0.5, 0.05, 0.45]])
    found = router_example.margin(shares.log(), 0.5)
    torch.testing.assert_close(found, torch.tensor([0.2, 0.05, 0.2, 0.05]))


def test_choices_that_say_nothing_of_who_chose_cost_nothing(router_example):
    alike, apart = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    alike[..., 0] = 50
    apart[:, :2, 0], apart[:, 2:, 1] = 50, 50
    assert float(router_example.information(alike)) == pytest.approx(0, abs=1e-5)
    assert float(router_example.information(apart)) == pytest.approx(np.log(2), abs=1e-4)


def test_being_undecided_costs(router_example):
    """Two visits of two sequences, of which one has left before the second."""
    shares = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], [[0.25, 0.25, 0.5], [0.3, 0.3, 0.4]]])
    weights = torch.tensor([[[1.0, 0, 0], [0, 0, 1.0]], [[0, 1.0, 0], [0, 0, 1.0]]])
    choices = shares.log().requires_grad_()
    found = router_example.indecision(choices, weights)
    assert found.item() == pytest.approx((0 + np.log(2) + 1.5 * np.log(2)) / 3, rel=1e-5)
    found.backward()
    assert torch.isfinite(choices.grad[:, :, :2]).all() and not choices.grad[1, 1].any()
