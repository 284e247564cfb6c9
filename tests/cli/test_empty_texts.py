"""One rule for texts that say nothing, in every way of asking: the command line, Python, HTTP, batches of Ray Data."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
from serving import serving

from prefold import LLM
from prefold.errors import InputError
from prefold.integrations.ray_data import PrefoldBatches

BLANK = ["", "  \n", "\u00a0\t"]
LABELS = ["yes", "no"]


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, threads=1, dtype="float32")


@pytest.mark.parametrize("bad", [*BLANK, []])
def test_in_python(llm, bad):
    for call in (
        lambda: llm.embed(["yes", bad]),
        lambda: llm.classify(["yes", bad], LABELS),
        lambda: llm.rerank("yes", ["no", bad]),
        lambda: llm.rerank(bad or "", ["no"]),  # a query is a text
    ):
        with pytest.raises(InputError) as error:
            call()
        assert error.value.code == "empty"
    if bad:  # what goes on after white space depends on it
        assert len(llm.generate([bad], max_tokens=1)) == len(llm.score(["yes"], [bad])) == 1
    else:
        with pytest.raises(InputError) as error:
            llm.generate([bad], max_tokens=1)
        assert error.value.code == "empty"
        assert llm.score([bad], [" yes"])[0].logprob < 0  # an empty prompt is the beginning of a text
    assert llm.classify("yes", LABELS, calibrate=True).label in LABELS  # by a text without content


def test_in_a_job(prefold, lines):
    texts = ["yes", *BLANK]
    with open("in.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    for task, options, wrong in (
        ("embed", [], {2, 3, 4}),
        ("classify", ["--labels", "yes,no"], {2, 3, 4}),
        ("classify", ["--labels", "yes,no", "--empty", "keep"], {2, 3, 4}),
        ("generate", ["--prompt", "text", "--max-tokens", 1], {2}),
        ("embed", ["--prompt", "a {text}", "--empty", "keep"], set()),
    ):
        done = prefold(task, "in.jsonl", "-o", "out.jsonl", "--overwrite", *options)
        assert done.exit_code == (3 if wrong else 0), done.output
        errors = {line["record"]: line["error"] for line in lines("out.jsonl") if "error" in line}
        assert errors.keys() == wrong and {error["code"] for error in errors.values()} <= {"empty"}


def test_over_http(llm):
    with serving(llm, served_names=("m",)) as server:

        def status(path, **body):
            return httpx.post(server.url + path, json=body, timeout=60).status_code

        for bad in BLANK:
            assert status("/v1/embeddings", model="m", input=["yes", bad]) == 400
            assert status("/v1/rerank", model="m", query="yes", documents=["no", bad]) == 400
            assert status("/v1/completions", model="m", prompt=bad, max_tokens=1) == (200 if bad else 400)


def test_in_batches_of_ray_data(model):
    def errors(task, **options):
        made = PrefoldBatches(task, "text", model=model, threads=1, dtype="float32", **options)

        async def run():
            return [out async for out in made({"text": np.array(["yes", None, *BLANK], object)})]

        (out,) = asyncio.run(run())
        return [error is not None for error in out["error"].to_pylist()]

    assert errors("embed") == errors("classify", labels=LABELS) == [False, True, True, True, True]
    for chat in (True, False):
        assert errors("generate", chat=chat, max_tokens=1) == [False, True, True, False, False]
