"""One job through every way that prefold has to run it: each gives the same answers, and fails at the same records.

Records have no optional field (but a temperature of 0, where texts are compared that different seeds would change), so
that whoever runs them must have the same defaults.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import openai
import pytest
import torch
import vllm_engines
from click.testing import CliRunner
from fake_servers import Server, serving
from serving import serving as serving_prefold
from serving import until
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.cli import main

CONTEXT = 320
# What a server such as vLLM takes for that which a request leaves out, where generation_config.json says so.
UNLIKE = {"temperature": 1.5, "top_p": 0.3, "top_k": 2, "min_p": 0.4, "repetition_penalty": 3.0}
TEXTS = ["yes no the", "   ", "\n", " a", "", None, "no the " * 200]
ENDPOINTS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings"}
NEAR = "x" * (CONTEXT - 20)  # nearly as many tokens as the context has


class Vllm(Server):
    """Answers as vLLM does, with the model of an LLM: 16 tokens, and UNLIKE, where a request does not say."""

    def __init__(self, llm):
        super().__init__(context=CONTEXT)
        self.llm, self.oracle = llm, reference(llm.folder)

    def answer(self, path, body):
        if path == "/v1/embeddings":
            data = [{"index": i, "embedding": one.tolist()} for i, one in enumerate(self.llm.embed(body["input"]))]
            return 200, {}, {"data": data}
        prompt = body.get("prompt")
        if path == "/v1/chat/completions":
            prompt = self.llm.tokenizer.render_chat(body["messages"], add_generation_prompt=True)
        ids = self.llm.tokenizer.encode(prompt, special=False).tolist() if isinstance(prompt, str) else prompt
        limit = body.get("max_tokens", None if path == "/v1/chat/completions" else 16)
        if len(ids) + (limit or 1) > CONTEXT:
            return 400, {}, {"error": {"message": f"the context is {CONTEXT}"}}
        if "prompt_logprobs" in body:
            return 200, {}, {"choices": [{"index": 0, "text": "", "prompt_logprobs": self._read(ids)}]}
        values = {name: body.get(name, value) for name, value in UNLIKE.items()}
        values["top_k"] = max(0, values["top_k"])
        made = self.llm.generate([ids], max_tokens=limit, seed=body.get("seed"), **values)[0]
        said = {"message": {"content": made.text}} if "messages" in body else {"text": made.text}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made.tokens)}
        return 200, {}, {"choices": [{"index": 0, "finish_reason": made.finish_reason, **said}], "usage": usage}

    def _read(self, ids):
        with torch.inference_mode():
            logprobs = self.oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [None]
        for row, token in zip(logprobs, ids[1:], strict=False):
            rank = 1 + int((row > row[token]).sum())
            entries.append({str(token): {"logprob": float(row[token]), "rank": rank}})
        return entries


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("ways"), "llama", max_position_embeddings=CONTEXT)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": 2, **UNLIKE}))
    made = LLM(str(folder), dtype="float32", kv_memory=1 << 22)
    made.folder = folder
    return made


@pytest.fixture(scope="module")
def server(llm, tmp_path_factory):
    with serving_prefold(llm, served_names=("m",), data_dir=str(tmp_path_factory.mktemp("data") / "new")) as made:
        yield made


@pytest.fixture(scope="module")
def vllm(llm):
    with serving(kind=Vllm, llm=llm) as made:
        yield made


@pytest.fixture
def tiny_vllm(llm, engines, monkeypatch):
    """Puts an engine in vLLM's place that continues prompts as the LLM does."""

    class Engine(vllm_engines.FakeEngine):
        def __init__(self, arguments):
            super().__init__(arguments)
            self.vllm_config.model_config.max_model_len = CONTEXT

        async def generate(self, prompt, params, request_id, *, priority):
            names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
            values = {name: getattr(params, name) for name in names}
            (made,) = await asyncio.to_thread(llm.generate, [prompt["prompt_token_ids"]], **values)
            ends = [2] if made.finish_reason == "stop" else []
            one = SimpleNamespace(token_ids=[*made.tokens, *ends], text=made.text, finish_reason=made.finish_reason,
                                  stop_reason=None, logprobs=None)  # fmt: skip
            yield SimpleNamespace(num_cached_tokens=0, outputs=[one])

    monkeypatch.setattr(vllm_engines, "FakeEngine", Engine)
    sys.modules["vllm"].AsyncEngineArgs.__dataclass_fields__ |= {"dtype": None, "tensor_parallel_size": None}


def to_prefold(request, llm):
    return ("-m", "m", "--url", request.getfixturevalue("server").url)


def to_vllm(request, llm):
    return ("-m", "m", "--url", request.getfixturevalue("vllm").url)


def ids_to_prefold(request, llm):
    return (*to_prefold(request, llm), "--tokenizer", llm.folder)


def ids_to_vllm(request, llm):
    return (*to_vllm(request, llm), "--tokenizer", llm.folder)


def in_vllm(request, llm):
    request.getfixturevalue("tiny_vllm")
    return ("-m", llm.folder, "--backend", "vllm", "--sharing", "off")


def on_ray(request, llm):
    pytest.importorskip("ray")
    return ("-m", llm.folder, "--dtype", "float32", "--ray", "--replicas", "1", "--threads", "1")


RAY = pytest.param(on_ray, marks=pytest.mark.slow)


def run(records, *arguments):
    """The lines of a job by the ids of its records, each of which has one."""
    with open("in.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    given = ("run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--quiet")
    done = CliRunner().invoke(main, [*map(str, (*given, *arguments))], catch_exceptions=False)
    assert done.exit_code in (0, 3), done.stderr
    with open("out.jsonl") as file:
        found = [json.loads(line) for line in file]
    by_id = {line.get("custom_id") or line["id"]: line for line in found}
    assert len(found) == len(by_id) == len(records)
    return by_id


def line(name, url, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def lines():
    """Lines of a batch: each kind with each text; in ids "drawn" where the text is drawn at random, "near" where the
    prompt leaves less room in the context than an answer may have.

    A record's own seed is made of its number, so those that are drawn come first, whatever is left out behind them.
    """
    texts = {f"{i}": text for i, text in enumerate(TEXTS) if text is not None} | {"near": NEAR}
    chats = {name: [{"role": "user", "content": text}] for name, text in texts.items()}
    chat, completion, embedding = ENDPOINTS.values()
    drawn = [line(f"chat drawn {name}", chat, messages=chats[name]) for name in texts]
    drawn += [line(f"completion drawn {name}", completion, prompt=text) for name, text in texts.items()]
    return [
        *sorted(drawn, key=lambda one: one["custom_id"].endswith("near")),
        *[line(f"chat {name}", chat, messages=chats[name], temperature=0) for name in texts],
        *[line(f"completion {name}", completion, prompt=text, temperature=0) for name, text in texts.items()],
        *[line(f"embedding {name}", embedding, input=text) for name, text in texts.items()],
        *[line(f"rerank {i}", "/v1/rerank", query="the", documents=[text, "yes"]) for i, text in texts.items()],
    ]


@pytest.fixture(scope="module")
def in_one_process(llm):
    """Runs a job in one process, once; it returns its lines."""
    found = {}

    def answer(records, *arguments):
        key = json.dumps(arguments)
        if key not in found:
            found[key] = run(records, *arguments, "-m", llm.folder, "--dtype", "float32")
        return found[key]

    return answer


def assert_same_lines(expected, found, counts=True):
    """counts: whether the tokens of prompts are counted as the model has them."""
    assert found.keys() == expected.keys()
    for name in expected:
        one, other = answer_of(expected[name], counts), answer_of(found[name], counts)
        assert other == (one if isinstance(one, str) else pytest.approx(one, abs=1e-4)), (name, found[name])


def answer_of(line, counts):
    """What must be the same of a line in all ways."""
    if line["response"] is None or line["response"]["status_code"] != 200:
        return "error"
    body = line["response"]["body"]
    tokens = body["usage"]["prompt_tokens"] if counts else 0
    if "choices" in body:
        (choice,) = body["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return repr((text, choice["finish_reason"], body["usage"]["completion_tokens"], tokens))
    if "results" in body:
        return [one["relevance_score"] for one in body["results"]]
    return [*body["data"][0]["embedding"], tokens]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, short_pauses):
    """In a folder of its own, with short pauses between the tries of a request."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way", [ids_to_prefold, to_prefold, ids_to_vllm, to_vllm, in_vllm, RAY])
def test_lines_of_a_batch(request, llm, in_one_process, way):
    expected = in_one_process(lines(), "--seed", "5")
    lengths = [one["response"]["body"]["usage"]["total_tokens"] for name, one in expected.items()
               if name.startswith("chat") and one["response"]["status_code"] == 200]  # fmt: skip
    assert lengths.count(CONTEXT) > 3, "most are answered until the context is full"
    has_ids = way not in (to_prefold, to_vllm)
    kinds = ["chat", "completion", *["embedding"] * (way is not in_vllm)]
    kinds += ["rerank"] * (way in (ids_to_prefold, ids_to_vllm, on_ray))
    names = [name for name in expected if name.split()[0] in kinds and (has_ids or name.split()[-1] != "near")]
    found = run([one for one in lines() if one["custom_id"] in names], "--seed", "5", *way(request, llm))
    assert_same_lines({name: expected[name] for name in names}, found, has_ids)


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_batches_of_a_server(in_one_process, server, kind):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    expected = in_one_process(lines(), "--seed", "5")
    names = [name for name in expected if name.split()[0] == kind and "drawn" not in name]
    text = "".join(json.dumps(one) + "\n" for one in lines() if one["custom_id"] in names)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINTS[kind], completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    ended = client.batches.retrieve(batch.id)
    files = [client.files.content(name).text for name in (ended.output_file_id, ended.error_file_id) if name]
    found = {one["custom_id"]: one for text in files for one in map(json.loads, text.splitlines())}
    assert_same_lines({name: expected[name] for name in names}, found)


TASKS = {
    "generate": ("--prompt", "text", "--seed", "5"),
    "raw": ("--prompt", "text", "--raw", "--seed", "5"),
    "embed": ("--prompt", "text"),
    "classify": ("--prompt", "text", "--labels", "yes,no"),
    "score": ("--prompt", "text", "--continuation", "other"),
    "rerank": ("--query", "other", "--document", "text"),
}


def table():
    return [{"id": f"{i}", "text": text, "other": " yes"} for i, text in enumerate([*TEXTS, NEAR])]


WAYS = [
    *[(way, task) for way in (ids_to_prefold, ids_to_vllm) for task in TASKS],
    *[(to_prefold, task) for task in ("generate", "raw", "embed")],
]


@pytest.mark.parametrize("way, task", [*WAYS, *[pytest.param(on_ray, task, marks=pytest.mark.slow) for task in TASKS]])
def test_tables(request, llm, in_one_process, way, task):
    has_ids = way is not to_prefold
    options = ("--task", "generate" if task == "raw" else task, "--id", "id", *TASKS[task])
    expected = in_one_process(table(), *options)
    found = run(table() if has_ids else table()[:-1], *options, *way(request, llm))
    assert sum("error" not in one for one in expected.values()) > 1
    for name, other in found.items():
        one = expected[name]
        assert ("error" in one) == ("error" in other), (one, other)
        for field in one.keys() - {"cached_tokens", "error", *(() if has_ids else ("num_tokens",))}:
            is_exact = isinstance(one[field], (str, bool, int))
            assert other[field] == (one[field] if is_exact else pytest.approx(one[field], abs=1e-4)), (field, one)


@pytest.mark.slow
def test_daft(llm, in_one_process):
    daft = pytest.importorskip("daft")
    from daft.functions import classify_text, embed_text, prompt

    import prefold.integrations.daft  # noqa: F401

    common = {"provider": "prefold", "model": str(llm.folder), "dtype": "float32", "on_error": "ignore"}
    frame = daft.from_pydict({"text": [*TEXTS, NEAR]})
    asked = {
        "generate": ("text", prompt(frame["text"], **common)),
        "embed": ("embedding", embed_text(frame["text"], **common)),
        "classify": ("label", classify_text(frame["text"], ["yes", "no"], **common)),
    }
    for task, (field, column) in asked.items():
        expected = in_one_process(table(), "--task", task, "--id", "id", *TASKS[task])
        found = frame.select(column.alias("found")).to_pydict()["found"]
        for name, one in expected.items():
            other = found[int(name)]
            assert (other is None) == ("error" in one), (task, name, one, other)
            if other is not None:
                assert other == (one[field] if field != "embedding" else pytest.approx(one[field], abs=1e-4))
