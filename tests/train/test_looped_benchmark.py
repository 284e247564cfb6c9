"""benchmarks/looped.py: cells that fail or are late, what is there already, its stopping rules, and its report."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """The module benchmarks/looped.py; it and what it imports are removed again."""
    before, path = dict(sys.modules), list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("looped")
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("looped") or name == "common"]:
            del sys.modules[name]
        sys.modules.update({name: one for name, one in before.items() if name.startswith("looped") or name == "common"})


KV = {"ratio": 7, "seconds": {"with": [1.0], "without": [7.0]}, "kv bytes": 3e6, "equal tokens": True}


def given(out, *more):
    return [f"--out={out}", "--smoke", *more]


def test_cells_that_fail_or_are_late_are_written_down(bench, tmp_path):
    arguments = given(tmp_path)
    options = bench.parse(arguments)
    once, (name, kv) = bench.once_cells(options)["once"], *bench.kv_cells(options).items()
    assert bench.compute("no-cell", once, options, arguments)["failed"] == "its process ended with 1"
    options = bench.parse(given(tmp_path, "--limit=0.05"))
    assert "longer than 0.05 s" in bench.compute("once", once, options, given(tmp_path))["failed"]
    (tmp_path / f"{name}.json").write_text(json.dumps(KV | {"options": kv.options}))
    assert bench.compute(name, kv, options, arguments)["ratio"] == 7  # it is there, and not computed
    (tmp_path / "half.json").write_text('{"ratio": ')
    cells = bench.looped_report.read(tmp_path)
    assert sorted(cells) == ["kv-4-2-16-4", "no-cell", "once"]
    assert not list(tmp_path.glob("*.part"))
    text = bench.looped_report.write(tmp_path, list(bench.SECTIONS))
    assert "longer than 0.05 s" in text
    page = (tmp_path / "report.html").read_text()
    assert "<table>" in page and "No GPU cell" in page and "<td>7.00</td>" in page


@pytest.mark.parametrize("kind", ["random", "trained"])
def test_cells_of_other_options_are_refused(bench, tmp_path, kind):
    """What was measured with another option is no figure of this run, and figures that do not say are of none."""
    arguments = given(tmp_path, f"--kinds={kind}")
    options = bench.parse(arguments)
    ((name, cell),) = bench.decode_cells(options).items()
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(KV | {"options": cell.options}))
    assert bench.compute(name, cell, options, arguments)["ratio"] == 7
    others = {"device": "cuda", "repeats": 3, "paths": ["fixed"]}
    others |= {"dtype": "bfloat16"} if kind == "random" else {"steps": 4, "seeds": [1]}
    for option, value in others.items():
        other = bench.decode_cells(bench.argparse.Namespace(**{**vars(options), option: value}))[name]
        with pytest.raises(SystemExit, match=f"{name}.json was computed with"):
            bench.compute(name, other, options, arguments)
    path.write_text(json.dumps(KV))
    with pytest.raises(SystemExit, match="does not say its options"):
        bench.compute(name, cell, options, arguments)


def test_models_of_other_options_are_refused(bench, tmp_path):
    """A model of three steps, as --smoke trains it, is not that of 1,500."""
    from looped_tasks import trained_model

    folder = tmp_path / "model-16-0"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    had = {"nodes": 16, "chains": 3, "hops": 3, "seed": 0, "steps": 3}
    (folder / "found.json").write_text(json.dumps({"options": had}))
    assert trained_model(tmp_path, 16, 0, 3)[0] == folder
    with pytest.raises(RuntimeError, match="was trained with steps 3; asked for is 1500"):
        trained_model(tmp_path, 16, 0, 1500)
    (folder / "found.json").unlink()
    with pytest.raises(RuntimeError, match="does not say its nodes"):
        trained_model(tmp_path, 16, 0, 3)


def test_what_a_gpu_shows_may_be_claimed(bench):
    cell = {"fixed": {"tokens/s": 10}, "+ exits": {"tokens/s": 12}}
    for device, claim in (("cuda", "are faster than all visits on a GPU"), ("cpu", "No GPU cell")):
        assert claim in bench.looped_report.headline({"decode-random-1": cell | {"options": {"device": device}}})


def test_stopping_rules(bench):
    def accuracy(*pairs):
        return {
            f"accuracy-16-{seed}": {"result": {"fixed": {"all": fixed}, "read at 0.50": {"all": exits}}}
            for seed, (fixed, exits) in enumerate(pairs)
        }

    fast = {"replay-8-16-128": {"seconds": {}, "gain of templates": 1.3}}
    slow = {"replay-8-16-128": {"seconds": {}, "gain of templates": 1.1}}
    assert bench.stops(fast | accuracy((0.9, 0.9), (0.98, 0.92))) == []
    assert "1.10 times" in bench.stops(slow)[0]
    assert bench.stops({"kv-8-16-64-16": {"ratio": 0.9}, "kv-8-16-128-16": {"ratio": 1.1}}) == []
    assert "no cache in kv-8-16-128-16" in bench.stops({"kv-8-16-128-16": {"ratio": 0.9}})[0]
    assert "0.800" in bench.stops(accuracy((0.9, 0.8), (0.92, 0.8)))[0]
    assert bench.stops({"replay-8-16-128": {"failed": "late"}, "kv-8-16-128-16": {"failed": "late"}}) == []


def test_every_path_of_a_routed_model(bench, tmp_path):
    """Routes that are given are those that the router takes, however rows are put together; and the report of them."""
    torch_threads = torch.get_num_threads()
    try:
        cell = bench.looped_paths.random(6, 12, 5, 8, 1, "cpu")
    finally:
        torch.set_num_threads(torch_threads)
    paths = cell["paths"]
    assert cell["routes"] > 1 and sorted(paths) == sorted(bench.looped_report.ROWS)
    assert paths["template"]["as hard"] == paths["no cache"]["as fixed"] == 1
    assert max(one["drift"] for one in paths.values() if "drift" in one) < 1e-4
    calls = {name: one["block calls"] for name, one in paths.items()}
    assert calls["soft"] == 16 and {calls[name] for name in ("fixed", "no cache", "template", "hard")} == {8}
    assert calls["exits"] < 8 and calls["template exits"] < 8
    assert [name for name, one in paths.items() if not one["kv bytes"]] == ["soft", "no cache"]
    (tmp_path / "paths-random-8-6-12-5.json").write_text(json.dumps(cell))
    for one in paths.values():
        one |= {"right": 0.5, "seen": 1.0, "one more": 0.25, "right tokens": 0.75}
    for seed in (0, 1):
        (tmp_path / f"paths-trained-16-{seed}-6-5.json").write_text(json.dumps(cell))
    text = bench.looped_report.write(tmp_path, ["paths"])
    assert "| batch 6" in text and "| random-8-6-12-5" in text
    table = (tmp_path / "report.md").read_text().split("## One table")[1].split("##")[0]
    assert table.count("0.500 ± 0.000") == 7 and "6 queries at once" in table


def test_cells_of_an_even_grid(bench, tmp_path):
    options = bench.parse([f"--out={tmp_path}", "--section=paths", "--even", "--kinds=random"])
    sizes = [tuple(map(int, name.split("-")[2:])) for name in bench.paths_cells(options)]
    assert len(sizes) == 32 == len({size[:3] for size in sizes}) and sizes == sorted(sizes, key=np.prod)
    assert {sum(size[3] == out for size in sizes) for out in options.outs} <= {10, 11}


@torch.inference_mode()
def test_ways_through_a_routed_model_give_the_same(bench):
    """However requests are put together, their logits are those that they have alone; and softly those of `routed`."""
    replay = bench.looped_replay
    model = replay.random_model(16, 2, 2, 4, "cpu")
    model.router.step.copy_(3 * torch.randn(model.router.step.shape))
    prompts = replay.Prompts.draw(model, 5, 6)
    plans = [(0, 1, 0, 1), (1, 1), (0,), (1, 0, 1), (0, 1, 0, 1)]
    alone = torch.cat([replay.template_replay(prompts.of([n]), [plan]) for n, plan in enumerate(plans)])
    for way in (replay.plan_replay, replay.template_replay):
        torch.testing.assert_close(way(prompts, plans), alone, rtol=1e-4, atol=1e-4)
    hard, routes = replay.generic_hard(prompts)
    assert all(len(route) == 4 for route in routes)
    assert torch.equal(replay.plan_replay(prompts, routes), hard)
    from prefold.looped.config import Routing
    from prefold.looped.train import routed, whole_sequences
    from prefold.train import TrainBatch

    batch = TrainBatch.build(model.config, [[*one, 1] for one in prompts.tokens.tolist()], sharing="off")
    visits = list(routed(model, *whole_sequences(model, batch), routing=Routing("soft")))
    expected = model.logits(visits[-1].state[np.arange(5) * 6 + 5])
    torch.testing.assert_close(replay.soft(prompts), expected, rtol=1e-4, atol=1e-4)
    visits = list(routed(model, *whole_sequences(model, batch), routing=Routing(threshold=1.0)))
    picked = [tuple(int(visit.weights[n].argmax()) for visit in visits) for n in range(5)]
    assert picked == routes
