"""A checkpoint that is not tied and has no lm_head.weight gives no text and no scores, whichever way it is asked."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from machines import kernels_in_use
from safetensors.torch import load_file, save_file
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM, kernels
from prefold.cli import main
from prefold.errors import InputError, UnsupportedModelError
from prefold.tasks import make_task


@pytest.fixture(scope="module", params=[False, None])
def folder(request, tmp_path_factory):
    """tie_word_embeddings is false, or missing, which says the same for Qwen 3. Its sizes have a compiled program."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("headless"), "qwen3", **sizes)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = request.param
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["compiled", "without kernels"])
def llm(request, folder):
    """The model in each executor."""
    if kernels.load() is None and request.param == "compiled":
        pytest.skip("there is no compiler")
    in_use = kernels_in_use(kernels.load() if request.param == "compiled" else None)
    with in_use, LLM(str(folder), dtype="float32") as llm:
        assert ("one compiled call" in llm.passes) == (request.param == "compiled")
        yield llm


CALLS = {
    "generate": lambda llm: llm.generate("the yes", max_tokens=2),
    "sampled": lambda llm: llm.generate("the yes", max_tokens=2, temperature=1.0),
    "with a bias": lambda llm: llm.generate("the yes", max_tokens=2, logit_bias=[(5, 1.0)]),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "yes"}], max_tokens=2),
    "stream": lambda llm: list(llm.stream("the yes", max_tokens=2)),
    "score": lambda llm: llm.score("the", " yes"),
    "classify": lambda llm: llm.classify("the", ["yes", "no"]),
    "rerank": lambda llm: llm.rerank("the", ["yes"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_methods(llm, call):
    with pytest.raises(UnsupportedModelError, match=r"needs a language model's logits; .* no lm_head\.weight"):
        CALLS[call](llm)
    assert np.isfinite(llm.embed("the yes")).all()


TASKS = {
    "generate": ({"max_tokens": 2}, "the yes"),
    "score": ({}, ("the", " yes")),
    "classify": ({"labels": ["yes", "no"]}, "the"),
    "rerank": ({}, ("the", "yes")),
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_that_were_made_before_the_model_was_loaded(llm, name):
    """Jobs make their tasks so."""
    options, item = TASKS[name]
    task = make_task(name, llm.checkpoint, llm.tokenizer, options)
    with pytest.raises(InputError, match="no LM head") as caught:
        llm.run(task, [item])
    assert caught.value.code == "no_lm_head"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the yes", "max_tokens": 2, "temperature": 0}),
        ("/v1/completions", {"prompt": "the yes", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 2}),
        ("/v1/rerank", {"query": "the", "documents": ["yes"]}),
    ],
)
def test_a_server(llm, path, body):
    with serving(llm) as server:
        response = httpx.post(server.url + path, json=body, timeout=60)
        assert response.status_code == 400 and "logits" in response.text
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "yes"}, timeout=60).status_code == 200


BODIES = {
    "/v1/completions": {"prompt": "the", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "yes"},
}


def lines_of_a_batch(path, *options):
    """Return {path of HTTP: the answer to its line in a batch that runs with the options}."""
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in BODIES.items()]
    (path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(main, ["run", str(path / "in.jsonl"), "-o", str(path / "out.jsonl"), *map(str, options)])
    assert done.exit_code == 3, done.output
    found = [json.loads(line) for line in (path / "out.jsonl").read_text().splitlines()]
    return {line["custom_id"]: line["response"] for line in found}


def test_lines_of_a_batch(folder, tmp_path):
    found = lines_of_a_batch(tmp_path, "-m", folder)
    assert {url: answer["status_code"] for url, answer in found.items()} == dict(
        zip(BODIES, (400, 400, 200), strict=True)
    )
    assert "no LM head" in found["/v1/completions"]["body"]["error"]["message"]


def test_a_fleet_of_servers(llm, tmp_path):
    with serving(llm, served_names=("m",)) as server:
        found = lines_of_a_batch(tmp_path, "-m", "m", "--url", server.url)
    assert "logits" in json.dumps(found["/v1/completions"]) and "logits" in json.dumps(found["/v1/chat/completions"])
    assert found["/v1/embeddings"]["status_code"] == 200


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_a_job(folder, tmp_path, task):
    (tmp_path / "in.jsonl").write_text('{"text": "the"}\n{"text": "yes"}\n')
    command = ["run", str(tmp_path / "in.jsonl"), "-m", str(folder), "--task", task, "-o", str(tmp_path / "out.jsonl")]
    command += ["--labels", "yes,no"] if task == "classify" else ["--max-tokens", "2"]
    result = CliRunner().invoke(main, command)
    said = result.output + ((tmp_path / "out.jsonl").read_text() if (tmp_path / "out.jsonl").exists() else "")
    assert result.exit_code != 0 and "no LM head" in said and "saved" not in said
