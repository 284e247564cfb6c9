"""The commands in an environment that has prefold's dependencies alone: no PyTorch, and no extras but those a test asks
for. What they print is what an LLM of this process gives, which PyTorch runs if the model is tiny."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import PIL.Image
import pytest
import yaml
from adapters import write_adapter
from tiny import tiny_checkpoint
from tiny_vision import PLACEHOLDER, drawing, tiny_vision

from prefold import LLM, TextWithImages, __version__, kernels
from prefold.checkpoint.builtin import BUILT_IN, fetch

pytestmark = pytest.mark.bare
ROOT = Path(__file__).parents[1]
BARE = ROOT / ".venv" / "bare"
EXTRAS = BARE / "extras"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "RAY_DISABLE_IMPORT_WARNING": "1"}
TEXTS = ["the cat sat on a mat", "the cat sat", "one more"]
QUESTIONS = {
    "good": {"type": "noul", "instructions": "Is it good?"},
    "tone": {"type": "choice", "criteria": {"calm": "polite", "angry": None}},
}


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Skip the tests if the environment is not there, or if its models would lack kernels."""
    if not any(BARE.glob(".prefold-*")):
        pytest.skip("there is no environment without PyTorch: run scripts/setup bare")
    if kernels.load() is None:
        pytest.skip("there is no compiler, without which PyTorch runs all models")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, the same as one that transformers alone has, the questions of decisions, and a table with an empty
    cell."""
    folder = tmp_path_factory.mktemp("bare")
    tiny_checkpoint(folder, "llama", max_position_embeddings=2048).rename(folder / "model")
    (folder / "model" / "decision.json").write_text('{"labels": {"noul": ["yes", "no"]}}')
    shutil.copytree(folder / "model", folder / "foreign")
    config = json.loads((folder / "model" / "config.json").read_text())
    of_transformers = {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"}
    (folder / "foreign" / "config.json").write_text(json.dumps(config | of_transformers))
    (folder / "questions.yaml").write_text(yaml.safe_dump(QUESTIONS, sort_keys=False))
    (folder / "rows.csv").write_text("id,body\n" + "".join(f"{i},{text}\n" for i, text in enumerate([*TEXTS, ""])))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder / "model"), dtype="float32", executor="torch") as made:
        yield made


@pytest.fixture
def prefold(folder):
    """prefold("rerank", ...) -> the process, which has ended with this status; the tiny model where none is named."""

    def call(*words, at=BARE, input=None, status=0):
        model = () if words[0].startswith("-") or "-m" in words else ("-m", "model")
        command = [at / "bin" / "python", "-m", "prefold", *map(str, words), *model]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, input=input)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


@pytest.fixture
def lines(prefold):
    """lines("embed", ...) -> the lines of JSON that the command prints."""
    return lambda *words, **more: [json.loads(line) for line in prefold(*words, "--json", **more).stdout.splitlines()]


def test_what_the_environments_have():
    packages = ("numpy", "starlette", "PIL", "ray", "pyarrow", "pip", "torch", "transformers", "prefold")
    look = f"from importlib.util import find_spec as f; print(*(n for n in {packages} if f(n)))"
    for at, found in ((BARE, "numpy prefold"), (EXTRAS, "numpy starlette PIL ray prefold")):
        done = subprocess.run([at / "bin" / "python", "-c", look], capture_output=True, text=True, env=ENVIRONMENT)
        assert done.stdout == f"{found}\n", done.stderr


def test_the_version_says_what_runs_models(prefold):
    version, kernels_line, executor = prefold("--version").stdout.splitlines()
    assert version == f"prefold {__version__}" and kernels_line.startswith("CPU kernels: ")
    assert executor == "Executor: native (PyTorch, for GPUs and training: pip install 'prefold[torch]')"


def test_the_demo(prefold):
    shown = prefold("demo").stdout
    tokens, rows = re.search(
        r"([\d,]+) tokens in prompts, ([\d,]+) rows computed, one per unique token", shown
    ).groups()
    assert 0 < int(rows.replace(",", "")) < int(tokens.replace(",", ""))
    difference = float(re.search(r"No score differs by more than (\S+)\.\n", shown)[1])
    assert difference < 1e-4


def test_numbers(lines, llm):
    (ranked,), ranking = lines("rerank", "a cat", *TEXTS), llm.rerank("a cat", TEXTS)
    assert ranked["order"] == ranking.order
    np.testing.assert_allclose(ranked["scores"], ranking.scores, atol=1e-4)
    classes = llm.classify(TEXTS, ["yes", "no"])
    for line, label in zip(lines("classify", *TEXTS, "--labels", "yes,no"), classes, strict=True):
        assert line["label"] == label.label
        assert line["probabilities"] == pytest.approx(label.probabilities, abs=1e-4)
    np.testing.assert_allclose([line["embedding"] for line in lines("embed", *TEXTS)], llm.embed(TEXTS), atol=1e-5)
    scores = [llm.score("the cat", text).logprob for text in TEXTS]
    assert [line["logprob"] for line in lines("score", "the cat", *TEXTS)] == pytest.approx(scores, abs=1e-3)


def test_decisions(lines, llm):
    decided = lines("decide", *TEXTS, "--questions", "questions.yaml")
    for line, decision in zip(decided, llm.decide(TEXTS, QUESTIONS), strict=True):
        for name, answer in decision.items():
            assert line["answers"][name]["value"] == answer.value
            assert line["answers"][name]["probabilities"] == pytest.approx(answer.to_dict()["probabilities"], abs=1e-4)


def test_texts_and_an_answer_to_a_message_from_a_pipe(lines, llm):
    drawn = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "top_p": 0.9}
    options = [word for name, value in drawn.items() for word in (f"--{name.replace('_', '-')}", value)]
    made = llm.generate(TEXTS, **drawn)
    assert [line["text"] for line in lines("generate", "--raw", *TEXTS, *options)] == [one.text for one in made]
    (line,) = lines("generate", "-", "--max-tokens", 8, input=f"{TEXTS[0]}\n")
    answer = llm.chat([{"role": "user", "content": TEXTS[0]}], max_tokens=8)
    assert (line["text"], line["finish_reason"]) == (answer.text, answer.finish_reason)


def test_a_table_and_its_report(prefold, folder, llm):
    tokens, computed = llm.stats.tokens, llm.stats.rows_computed
    expected = llm.classify(TEXTS, ["yes", "no"])
    job = ("run", "rows.csv", "--task", "classify", "--labels", "yes,no", "--prompt", "body", "--id", "id")
    said = prefold(*job, "-o", "out.csv", "--report", "page.html", status=3).stderr  # the empty cell is an error
    assert "each forward pass is one compiled call" in said
    with open(folder / "out.csv", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert "'body' is empty" in rows.pop("3")["error"]
    assert {number: row["label"] for number, row in rows.items()} == {str(i): x.label for i, x in enumerate(expected)}
    tokens, computed = llm.stats.tokens - tokens, llm.stats.rows_computed - computed
    assert f'"totals":{{"tokens":{tokens},"rows":{computed}}}' in (folder / "page.html").read_text()


def test_what_a_job_would_take_and_what_sharing_changes(prefold):
    job = ("rows.csv", "--task", "embed", "--prompt", "body")
    measured = re.search(r"measured: (\d+) rows of this job, (.*); counted in", prefold("plan", *job).stdout)
    assert int(measured[1]) > 0
    assert measured[2] == "random weights in float32 on cpu; each forward pass is one compiled call"
    verified = prefold("verify", *job).stdout
    assert float(re.search(r"largest difference +(\S+) in", verified)[1]) < 1e-4


def test_a_gguf_file(lines):
    path = str(fetch(BUILT_IN["smollm2-135m"]))
    query, documents = "why are there tides", ["The moon pulls on the sea.", "A loaf keeps best in a cloth bag."]
    (line,) = lines("rerank", query, *documents, "-m", path)
    with LLM(path) as llm:
        ranking = llm.rerank(query, documents)
    assert line["order"] == ranking.order
    np.testing.assert_allclose(line["scores"], ranking.scores, atol=1e-4)


def test_an_adapter_and_two_ranks(lines, folder, llm):
    plain = llm.embed(TEXTS)
    adapter = write_adapter(folder / "adapter", folder / "model", layers=(0, 1))
    with LLM(str(folder / "model"), dtype="float32", executor="torch", adapters={"a": str(adapter)}) as adapted:
        expected = adapted.embed(TEXTS, adapter="a")
    assert np.abs(expected - plain).max() > 1e-2
    found = lines("embed", *TEXTS, "--adapter", f"a={adapter}", "--tensor-parallel", 2)
    np.testing.assert_allclose([line["embedding"] for line in found], expected, atol=1e-5)


def test_images(prefold, lines, folder):
    model = tiny_vision(folder, "gemma3")
    picture, text = folder / "picture.png", f"see {PLACEHOLDER['gemma3']} and say"
    PIL.Image.fromarray(drawing(1, 60, 20)).save(picture)
    words = ("embed", text, "--image", picture, "-m", model)
    assert "pip install 'prefold[vision]'" in prefold(*words, status=1).stderr
    (line,) = lines(*words, at=EXTRAS)
    with LLM(str(model), dtype="float32", executor="torch") as llm:
        expected = llm.embed(TextWithImages(text, [str(picture)]))
    np.testing.assert_allclose(line["embedding"], expected, atol=1e-5)


def test_a_server(folder, llm):
    command = [EXTRAS / "bin" / "python", "-m", "prefold", "serve", "-m", "model", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    with process, process.stderr:
        try:
            url = re.search(r"http://\S+:\d+", process.stderr.readline())[0]
            wait_for(f"{url}/health", process)
            body = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            vectors = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()["data"]
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
            assert process.wait(60) == 0 and "all requests have been answered" in said and "Traceback" not in said
        finally:
            process.kill()
    expected = llm.chat(body["messages"], max_tokens=8, temperature=0)
    assert answer["choices"][0]["message"]["content"] == expected.text
    np.testing.assert_allclose([one["embedding"] for one in vectors], llm.embed(TEXTS), atol=1e-5)


def wait_for(url, process):
    """Ask until the server is ready."""
    while httpx.get(url).status_code != 200:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def test_two_replicas_on_ray(prefold, folder, llm):
    texts = [f"the instruction {i % 5} is shared by many {i}" for i in range(40)]
    (folder / "many.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = ("run", "many.jsonl", "--task", "embed", "--prompt", "text", "-o", "ray.jsonl", "--threads", 1)
    said = prefold(*job, "--ray", "--replicas", 2, at=EXTRAS).stderr
    assert "of 2 at the end" in said and "is lost" not in said
    found = sorted(map(json.loads, (folder / "ray.jsonl").read_text().splitlines()), key=lambda line: line["record"])
    np.testing.assert_allclose([line["embedding"] for line in found], llm.embed(texts), atol=1e-5)


JOB = ("run", "rows.csv", "--task", "embed", "--prompt", "body", "-o")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("embed", "x", "--device", "cuda"), "torch"),
        (("embed", "x", "--executor", "torch"), "torch"),
        (("embed", "x", "--dtype", "float16"), "torch"),
        (("embed", "x", "-m", "foreign"), "transformers"),
        (("generate", "x", "--json-schema", "{}"), "grammar"),
        ((*JOB, "out.parquet"), "parquet"),
        ((*JOB, "out.jsonl", "--ray"), "ray"),
        ((*JOB, "out.jsonl", "--url", "http://localhost:1"), "http"),
        (("serve",), "serve"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_the_error_of_what_is_missing_names_the_extra(prefold, folder, words, extra):
    assert f"pip install 'prefold[{extra}]'" in prefold(*words, status=1).stderr


@pytest.mark.parametrize("module", ["prefold.train", "prefold.train.hf", "prefold.integrations.lm_eval"])
def test_a_module_that_cannot_be_imported_names_the_extra(module):
    code = f"try:\n    import {module}\nexcept ImportError as error:\n    print(type(error).__name__, error.extra)"
    done = subprocess.run([BARE / "bin" / "python", "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    extra = "lm-eval" if "lm_eval" in module else "train"
    assert done.stdout == f"MissingExtraError {extra}\n", done.stderr
