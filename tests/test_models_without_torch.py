"""What runs without PyTorch: a model of each kind, in a process that cannot import it, beside the same with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from adapters import write_adapter
from looped_dense import looped_checkpoint
from tiny import tiny_checkpoint
from tiny_vision import PLACEHOLDER, drawing, tiny_vision

from prefold import LLM, TextWithImages
from prefold.cluster.native_host import facts_of

sys.path.insert(0, str(Path(__file__).parent / "features" / "hybrid"))
from hybrids import HYBRIDS, hybrid_checkpoint

# As Python imports it when it starts, in every process.
BLOCKED = """
import os, sys
from pathlib import Path
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
Path(__file__).with_name(f"{os.getpid()}.process").touch()
"""
CALLS = """
import json, sys
from prefold import LLM
folder, adapter, ranks = sys.argv[1:]
llm = LLM(folder, dtype="float32", adapters={"a": adapter} if adapter else None, tensor_parallel=int(ranks))
texts = ["the cat sat on a mat", "the cat sat", "one more"]
generated = llm.generate(texts, max_tokens=6, temperature=0.8, seed=3, top_p=0.9, logprobs=2, ignore_eos=True)
found = {
    "generate": [list(one.tokens) for one in generated],
    "embed": llm.embed(texts).tolist(),
    "mean": llm.embed(texts, pooling="mean").tolist(),
    "score": [one.logprob for one in llm.score(texts, [" and more"] * 3)],
    "classify": [one.label for one in llm.classify(texts, ["yes", "no"])],
    "adapted": llm.embed(texts, adapter="a").tolist() if adapter else [],
}
llm.close()
assert "torch" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture
def blocked(tmp_path):
    """The environment of processes that cannot import PyTorch, and the folder where each leaves a file."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}, folder


KINDS = ["qwen3", "gemma3", "gpt-oss", "qwen3_5", "granite4_h", "looped"]


def checkpoint_of(folder: Path, kind: str) -> Path:
    """A folder under `folder` with a small checkpoint."""
    if kind == "looped":
        loop = {"blocks": 2, "order": [0, 1, 1, 0], "between": "inject", "noise": 0.5, "gate": True, "threshold": 0.6}
        return looped_checkpoint(folder, kind, loop=loop | {"router": {"kind": "hard"}})
    return (hybrid_checkpoint if kind in HYBRIDS else tiny_checkpoint)(folder, kind)


@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 1) for kind in KINDS), ("qwen3", 2), ("gpt-oss", 2), ("olmo2", 3)]
)
def test_a_model_gives_what_it_gives_with_pytorch(tmp_path, blocked, kind, ranks):
    folder = tmp_path / "model"
    folder.mkdir()
    folder = checkpoint_of(folder, kind)
    adapter = str(write_adapter(tmp_path / "adapter", folder, layers=(0, 1))) if kind == "qwen3" else ""
    environment, processes = blocked
    calls = [sys.executable, "-c", CALLS, str(folder), adapter, str(ranks)]
    done = subprocess.run(calls, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len([*processes.glob("*.process")]) == ranks
    found = json.loads(done.stdout)
    llm = LLM(str(folder), dtype="float32", executor="torch", adapters={"a": adapter} if adapter else None)
    texts = ["the cat sat on a mat", "the cat sat", "one more"]
    options = {"max_tokens": 6, "temperature": 0.8, "seed": 3, "top_p": 0.9, "ignore_eos": True}
    assert found["generate"] == [list(one.tokens) for one in llm.generate(texts, **options)]
    assert found["classify"] == [one.label for one in llm.classify(texts, ["yes", "no"])]
    np.testing.assert_allclose(found["embed"], llm.embed(texts), atol=1e-5)
    np.testing.assert_allclose(found["mean"], llm.embed(texts, pooling="mean"), atol=1e-5)
    scores = [one.logprob for one in llm.score(texts, [" and more"] * 3)]
    np.testing.assert_allclose(found["score"], scores, atol=1e-4)
    if adapter:
        np.testing.assert_allclose(found["adapted"], llm.embed(texts, adapter="a"), atol=1e-5)
        assert np.abs(np.array(found["adapted"]) - found["embed"]).max() > 1e-3


WITH_IMAGES = """
import json, sys
from prefold import LLM, TextWithImages
folder, text, *pictures = sys.argv[1:]
llm = LLM(folder, dtype="float32")
items = [TextWithImages(text, [picture]) for picture in pictures]
found = {
    "generate": [list(one.tokens) for one in llm.generate(items, max_tokens=6, ignore_eos=True)],
    "embed": llm.embed(items).tolist(),
    "runs": llm.stats.tower_runs,
}
assert "torch" not in sys.modules
print(json.dumps(found))
"""


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_images_are_seen_as_with_pytorch(tmp_path, blocked, family):
    folder, pictures = tiny_vision(tmp_path, family), []
    for number, size in enumerate([(26, 26), (60, 20)]):
        pictures.append(str(tmp_path / f"{number}.png"))
        PIL.Image.fromarray(drawing(number, *size)).save(pictures[-1])
    text = f"see {PLACEHOLDER[family]} and say"
    calls = [sys.executable, "-c", WITH_IMAGES, str(folder), text, *pictures]
    done = subprocess.run(calls, capture_output=True, text=True, env=blocked[0])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    llm = LLM(str(folder), dtype="float32", executor="torch")
    items = [TextWithImages(text, [picture]) for picture in pictures]
    generated = llm.generate(items, max_tokens=6, ignore_eos=True)
    assert found["generate"] == [list(one.tokens) for one in generated]
    np.testing.assert_allclose(found["embed"], llm.embed(items), atol=1e-5)
    assert np.abs(np.subtract(*found["embed"])).max() > 1e-2, "what the images show makes no difference"
    assert found["runs"] == 2


def test_a_job_of_the_command_line_and_what_needs_pytorch(tmp_path, blocked):
    folder = tiny_checkpoint(tmp_path, "llama")
    table = tmp_path / "rows.csv"
    table.write_text("id,body\n1,the cat\n2,\n3,one more\n", encoding="utf-8")
    command = "import sys; from prefold.cli import main; sys.argv[0] = 'prefold'; main()"
    job = ["embed", str(table), "--prompt", "body", "--id", "id", "--model", str(folder), "-o"]
    run = [sys.executable, "-c", command, *job]
    for ranks in (1, 2):
        out, options = tmp_path / f"{ranks}.jsonl", ["--tensor-parallel", str(ranks)]
        ended = subprocess.run([*run, str(out), *options], capture_output=True, text=True, env=blocked[0])
        assert ended.returncode == 3  # a record has an error
        assert "each forward pass is one compiled call" in ended.stderr
        assert ("; the model is split over 2 ranks" in ended.stderr) == (ranks == 2)
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert sorted((line["id"], "error" in line) for line in lines) == [("1", False), ("2", True), ("3", False)]
    ended = subprocess.run(
        [*run, str(tmp_path / "no.jsonl"), "--dtype=float16"], capture_output=True, text=True, env=blocked[0]
    )
    assert ended.returncode and "the dtype float16" in ended.stderr
    assert "pip install 'prefold[torch]'" in ended.stderr


EVALUATED = """
import json, sys
from lm_eval.api.instance import Instance
from prefold.integrations.lm_eval import PrefoldLM
model = PrefoldLM(sys.argv[1], device="cuda", dtype="float32")
found = model.loglikelihood([Instance("loglikelihood", {}, ("the cat", " sat"), 0)])
assert "torch" not in sys.modules
print(json.dumps([found, str(model.device)]))
"""


def test_the_evaluation_harness_scores_without_pytorch(tmp_path, blocked):
    pytest.importorskip("lm_eval")
    folder = tiny_checkpoint(tmp_path, "llama")
    done = subprocess.run(
        [sys.executable, "-c", EVALUATED, str(folder)], capture_output=True, text=True, env=blocked[0]
    )
    assert done.returncode == 0, done.stderr
    [[logprob, greedy]], device = json.loads(done.stdout.splitlines()[-1])
    with LLM(str(folder), dtype="float32", executor="torch") as llm:
        expected = llm.score("the cat", " sat")
    assert (logprob, greedy, device) == (pytest.approx(expected.logprob, abs=1e-4), expected.greedy, "cpu")
    assert "there is no device cuda here" in done.stderr and "; using cpu" in done.stderr
    assert "pip install 'prefold[torch]'" in done.stderr


def test_replicas_of_two_executors_are_told_apart(tmp_path):
    folder, identities = tiny_checkpoint(tmp_path, "llama"), {}
    for executor in ("native", "torch"):
        with LLM(str(folder), dtype="float32", executor=executor) as llm:
            identities[executor] = facts_of(llm).identity
    assert identities["native"] | {"executor": f"torch {torch.__version__}"} == identities["torch"]
    assert identities["native"]["executor"] == "native", "replicas with another PyTorch, or none, give the same"
