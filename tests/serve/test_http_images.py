"""Images over HTTP: the same answers as in Python, and no file of the server's."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import PIL.Image
import pytest
from generating import image_scheduler
from serving import serving, until
from tiny_vision import drawing, tiny_vision

from prefold import LLM
from prefold.errors import InputError
from prefold.features.images.items import image_cache
from prefold.jobs.models import image_reading
from prefold.spec.job import JobSpec
from prefold.text.media import TextWithImages
from prefold.text.tokenizer import EscapingEncoder
from prefold.wire.body import TaskOrder

PICTURES = [PIL.Image.fromarray(drawing(seed, *size)) for seed, size in enumerate([(26, 26), (60, 20)])]


def url_of(picture) -> str:
    sink = io.BytesIO()
    picture.save(sink, "PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


@pytest.fixture(scope="module", params=["gemma3", "smolvlm"])
def llm(request, tmp_path_factory):
    folder = tiny_vision(tmp_path_factory.mktemp("folder"), request.param)
    with LLM(str(folder), dtype="float32") as llm:
        yield llm


def test_over_http(llm):
    import anthropic
    import openai

    with serving(llm, served_names=("m",)) as server:
        host, port = server.bound_at
        openai_client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0)
        content = [
            {"type": "text", "text": "what is "},
            {"type": "image_url", "image_url": {"url": url_of(PICTURES[0])}},
        ]
        expected = llm.chat([{"role": "user", "content": content}], max_tokens=4).text
        chat = openai_client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
        )
        assert chat.choices[0].message.content == expected
        parts = [{"type": "input_text", "text": "what is "}, {"type": "input_image", "image_url": url_of(PICTURES[0])}]
        response = openai_client.responses.create(
            model="m", input=[{"role": "user", "content": parts}], max_output_tokens=16, temperature=0
        )
        assert response.output_text.startswith(expected)
        blocks = [
            {"type": "text", "text": "what is "},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": url_of(PICTURES[0]).partition(",")[2]}},
        ]  # fmt: skip
        client = anthropic.Anthropic(base_url=f"http://{host}:{port}", api_key="x", max_retries=0)
        message = client.messages.create(
            model="m",
            max_tokens=4,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )
        assert message.content[0].text == expected
        for url in ("/etc/passwd", "file:///etc/passwd", "https://example.org/a.png", "http://127.0.0.1/a.png"):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            with pytest.raises(openai.BadRequestError) as error:
                openai_client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
            assert "messages[0].content[0]" in str(error.value)


def test_decisions_over_http(llm):
    question = {"type": "score", "instructions": "How?", "criteria": ["low", "high"]}
    levels = [{"label": "low"}, {"label": "high"}]
    expected = llm.decide("see a b", {"q": question}, images={" a": PICTURES[0]})["q"].value
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url_of(PICTURES[0])},
             {"type": "input_text", "text": " b"}]  # fmt: skip
    asked = [{"type": "score", "instructions": "How?", "levels": levels}]
    asset = {"type": "image", "format": "png", "data_base64": url_of(PICTURES[0]).partition(",")[2]}
    with serving(llm, served_names=("m",)) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def decisions(parts):
            return client.post(
                "/v1/decisions", json={"input": [{"role": "user", "content": parts}], "questions": asked}
            )

        def system_one(state, **fields):
            return client.post("/v1/systemone", json={"state": state, "questions": {"q": question}, **fields})

        assert decisions(parts).json()["answers"][0]["score"] == pytest.approx(expected, abs=1e-4)
        found = system_one("see a b", assets={" a": asset}).json()["answers"]["q"]["score"]
        assert found == pytest.approx(expected, abs=1e-4)
        (before,) = llm.decide([TextWithImages("x", PICTURES)], {"q": question})
        found = system_one("x", images=[url_of(picture) for picture in PICTURES]).json()["answers"]["q"]["score"]
        assert found == pytest.approx(before["q"].value, abs=1e-4)
        said = system_one("x", instructions="Be strict.").json()["answers"]["q"]["score"]
        (item,) = llm.run(
            llm.task("decide"), [{"state": "x", "questions": {"q": question}, "instructions": "Be strict."}]
        )
        assert said == pytest.approx(item["answers"]["q"]["value"], abs=1e-4)
        parts[1]["image_url"] = "/etc/passwd"
        wrong = [
            (decisions(parts), "input[0].content[1]"), (system_one("x", images=["/etc/passwd"]), "images[0]"),
            (system_one("x", assets={"img-9": asset}), "images"), (system_one("x", thinking=True), "thinking"),
            (system_one("x", chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs"),
        ]  # fmt: skip
        for response, field in wrong:
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_the_tokenizer_is_copied_for_the_first_image_only(llm, monkeypatch):
    """A copy of a large vocabulary takes longer than all else that is done before a second question about an image."""
    copies, make = [], EscapingEncoder.__init__
    monkeypatch.setattr(EscapingEncoder, "__init__", lambda self, *given: (copies.append(given), make(self, *given))[1])
    content = [{"type": "image_url", "image_url": {"url": url_of(PICTURES[0])}}]
    with serving(llm, served_names=("m",)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for question in "abc":
            messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
            asked = {"model": "m", "messages": messages, "max_tokens": 2}
            assert client.post("/v1/chat/completions", json=asked).status_code == 200
    assert len(copies) <= 1


def test_text_does_not_wait_for_images_that_are_decoded(llm, monkeypatch):
    """More requests than a pool has threads wait for a decoder that is held."""
    decoder, allowances = llm.images.reader.decoder, []
    decode, held = decoder.decode, threading.Event()

    def slow(data, field, allowance):
        allowances.append(allowance)
        assert held.wait(60)
        return decode(data, field, allowance)

    monkeypatch.setattr(decoder, "decode", slow)

    def asked(number: int) -> dict:
        drawn = [PIL.Image.fromarray(drawing(40 + 2 * number + i, 20, 20)) for i in range(2)]
        content = [{"type": "image_url", "image_url": {"url": url_of(one)}} for one in drawn]
        return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2}

    with (
        serving(llm, served_names=("m",)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        try:
            waiting = [threads.submit(client.post, "/v1/chat/completions", json=asked(i)) for i in range(6)]
            until(lambda: len(allowances) > 1)
            text = asked(0) | {"messages": [{"role": "user", "content": "1"}]}
            assert client.post("/v1/chat/completions", json=text, timeout=60).status_code == 200
            assert not any(one.done() for one in waiting)
        finally:
            held.set()
        assert [one.result().status_code for one in waiting] == [200] * 6
    assert len(allowances) == 12 and len(set(map(id, filter(None, allowances)))) == 6


def test_tenants_share_no_images(llm, tmp_path):
    import openai

    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[key]]\nkey = "k-{name}"\ntenant = "{name}"\n' for name in ("a", "b")))
    content = [{"type": "image_url", "image_url": {"url": url_of(PICTURES[1])}}, {"type": "text", "text": "tenants?"}]
    with serving(llm, served_names=("m",), api_keys=str(keys)) as server:
        host, port = server.bound_at
        runs, answers = [llm.stats.tower_runs], set()
        for name in ("a", "a", "b"):
            client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key=f"k-{name}", max_retries=0)
            chat = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
            )
            answers.add(chat.choices[0].message.content)
            runs.append(llm.stats.tower_runs)
    assert len(answers) == 1
    assert [b - a for a, b in itertools.pairwise(runs)] == [1, 0, 1]


@pytest.fixture
def read_by(llm, monkeypatch):
    """Lets the LLM, and the tasks that it makes from now on, read images with these settings."""

    def put(images):
        monkeypatch.setattr(llm, "images", images)
        monkeypatch.setattr(llm, "_tasks", {})  # they have the reader of their time

    return put


def test_one_tenants_image_is_not_read_from_anothers_file(llm, tmp_path, read_by):
    """Though both have the same pixels at the same time. What is kept for each is counted as that tenant's."""
    read_by(replace(llm.images, recent=image_cache(0)))
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[key]]\nkey = "k-{name}"\ntenant = "{name}"\n' for name in ("a", "b")))
    data = base64.b64decode(url_of(PICTURES[0]).partition(",")[2])
    with serving(llm, served_names=("m",), api_keys=str(keys), data_dir=str(tmp_path / "data")) as server:
        handler, media, files = server.state.handler, [], []
        for name in ("a", "b"):
            with httpx.Client(base_url=server.url, headers={"x-api-key": f"k-{name}"}, timeout=60) as client:
                form = {"files": {"file": ("a.png", data)}, "data": {"purpose": "vision"}}
                files.append((name, client.post("/v1/files", **form).json()["id"]))
            item = {"messages": [{"role": "user", "content": [{"type": "input_image", "file_id": files[-1][1]}]}]}
            tenant = server.state.keys.tenant({"x-api-key": f"k-{name}"})
            salt_prefix = f"{server.state.keys.salt_prefix(tenant)}/mine"
            _, works = handler._prepare(TaskOrder("generate", [item], salt_prefix=salt_prefix, owner=tenant.owner))
            (request,) = works[0].requests
            assert request.media[0].salt == request.namespace.salt == f"{salt_prefix}/"
            media.append(request.media[0])
            assert image_scheduler(llm.engine)._tenant_of(request.namespace) == name
        handler._store.drop_content(files[0][1])
        assert media[1].load().shape[1] == 3
        with pytest.raises(InputError, match=files[0][1]):
            media[0].load()


@pytest.mark.parametrize("paths", [True, False])  # as in Python, and as `prefold serve` makes its reader
def test_uploaded_files(llm, tmp_path, read_by, paths):
    import anthropic
    import openai

    read_by(llm.images if paths else llm.images.with_reader(**image_reading(JobSpec())))
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[key]]\nkey = "k-{name}"\ntenant = "{name}"\n' for name in ("a", "b")))
    data, question = base64.b64decode(url_of(PICTURES[0]).partition(",")[2]), {"type": "text", "text": "what?"}
    options = {"model": "m", "max_tokens": 4}
    with serving(llm, served_names=("m",), api_keys=str(keys), data_dir=str(tmp_path / "data")) as server:
        owner, stranger = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"k-{name}", max_retries=0) for name in ("a", "b")
        )
        file = owner.files.create(file=("a.png", data), purpose="vision")
        assert file.purpose == "vision"

        def ask(client, id):
            content = [{"type": "image_url", "image_url": {"url": id}}, question]
            messages = [{"role": "user", "content": content}]
            return (
                client.chat.completions.create(messages=messages, temperature=0, **options).choices[0].message.content
            )

        expected = ask(owner, url_of(PICTURES[0]))
        assert ask(owner, file.id) == expected
        parts = [{"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "what?"}]
        response = owner.responses.create(
            model="m", input=[{"role": "user", "content": parts}], max_output_tokens=16, temperature=0
        )
        assert response.output_text.startswith(expected)
        client = anthropic.Anthropic(base_url=server.url, api_key="k-a", max_retries=0)
        blocks = [{"type": "image", "source": {"type": "file", "file_id": file.id}}, question]
        message = client.messages.create(
            messages=[{"role": "user", "content": blocks}], extra_body={"temperature": 0}, **options
        )
        assert message.content[0].text == expected
        line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions"}
        content = [{"type": "image_url", "image_url": {"url": file.id}}, question]
        line["body"] = {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}
        lines = owner.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = owner.batches.create(input_file_id=lines.id, endpoint="/v1/chat/completions", completion_window="24h")
        until(lambda: owner.batches.retrieve(batch.id).status == "completed")
        found = json.loads(owner.files.content(owner.batches.retrieve(batch.id).output_file_id).text)
        assert found["response"]["body"]["choices"][0]["message"]["content"] == expected
        for client, id in ((stranger, file.id), (owner, "file-none"), (owner, "file-../../keys.toml")):
            with pytest.raises(openai.BadRequestError) as error:
                ask(client, id)
            assert "messages[0].content[0]" in str(error.value) and "k-a" not in str(error.value)
        assert owner.files.delete(file.id).deleted
        with pytest.raises(openai.BadRequestError, match="no uploaded file has this id"):
            ask(owner, file.id)
