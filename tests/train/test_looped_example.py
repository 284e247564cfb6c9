"""examples/looped.py: its graphs, a run that is interrupted and goes on, and what it saves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prefold import LLM

PATH = Path(__file__).parents[2] / "examples" / "looped.py"
SMALL = ["--nodes=9", "--chains=3", "--hops=1", "--hidden=16", "--steps=7", "--graphs=2"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("looped_example", PATH)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
    monkeypatch.setattr(example, "SAVE_EVERY", 2)
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
    monkeypatch.setattr(example, "visit_logprobs", read)
    with pytest.raises(SystemExit, match="other options"):
        example.main([*SMALL, "--seed=3", f"--out={out}"])
    assert example.main([*SMALL, f"--out={out}"]) == whole
    assert "going on after step 4" in capsys.readouterr().out
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(SystemExit):
        example.main([*SMALL, f"--out={out}"])  # what is there is not overwritten
    assert "holds a trained model" in capsys.readouterr().err
    llm = LLM(str(out), dtype="float32", device="cpu")
    queries = example.Queries.make(example.Task(9, 3), 2, 2, 8, np.random.default_rng(0))
    assert len(llm.generate(queries.prompts, max_tokens=1, exit_threshold=0.5)) == len(queries.prompts)


def test_a_loss_that_is_no_number_ends_the_run(example, tmp_path, monkeypatch):
    read = example.visit_logprobs
    monkeypatch.setattr(example, "visit_logprobs", lambda *given: tuple(part * float("nan") for part in read(*given)))
    with pytest.raises(SystemExit, match="the loss is nan at step 0 of seed 5"):
        example.main([*SMALL, "--seed=5", f"--out={tmp_path / 'out'}"])
