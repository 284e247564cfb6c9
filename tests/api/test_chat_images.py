"""Images in Python, in jobs and on the command line, against transformers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import warnings
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from click.testing import CliRunner
from tiny_vision import PLACEHOLDER, drawing, tiny_vision, vision_reference

from prefold import LLM
from prefold.cli import main
from prefold.errors import InputError
from prefold.text.media import TextWithImages

PICTURES = [PIL.Image.fromarray(drawing(seed, *size)) for seed, size in enumerate([(26, 26), (60, 20), (9, 44)])]


def file_of(picture, kind="PNG", **options) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, kind, **options)
    return sink.getvalue()


def url_of(picture) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(picture)).decode()


@pytest.fixture(scope="module", params=["gemma3", "smolvlm", "gemma4"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family):
    more = {}
    if family == "gemma4":  # transformers allows no fewer rows
        more = {"vision_soft_tokens_per_image": 70, "settings": {"max_soft_tokens": 70}}
        more["vision"] = {"position_embedding_size": 140}
    return tiny_vision(tmp_path_factory.mktemp("folder"), family, **more)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder, family):
    """oracle(messages, pictures, count) -> the ids that transformers generates, greedily."""
    import transformers

    model = vision_reference(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if family == "gemma3":
        settings = transformers.Gemma3ImageProcessorPil.from_pretrained(folder)
        processor = transformers.Gemma3Processor(settings, tokenizer, image_seq_length=9)
    elif family == "gemma4":
        processor = gemma4_processor(folder, tokenizer)
    else:
        settings = transformers.Idefics3ImageProcessorPil.from_pretrained(folder)
        processor = transformers.Idefics3Processor(settings, tokenizer, image_seq_len=9)

    def answer(messages, pictures, count=6):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pictures = pictures or None
        images = [pictures] if family == "smolvlm" and pictures else pictures
        inputs = processor(text=[text], images=images, return_tensors="pt")
        with torch.no_grad():
            found = model.generate(
                **inputs,
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                repetition_penalty=1.0,
            )
        return found[0, inputs["input_ids"].shape[1] :].tolist()

    return answer


def gemma4_processor(folder, tokenizer):
    """That of transformers, without its parts for sound and videos."""
    import transformers

    class Alone(transformers.Gemma4Processor):
        def check_argument_for_proper_class(self, name, value):
            return type(value)

    tokenizer.audio_token = tokenizer.boa_token = tokenizer.eoa_token = "<none>"
    return Alone(None, transformers.Gemma4ImageProcessorPil.from_pretrained(folder), tokenizer, None)


def conversation(count: int, values=None):
    parts = [{"type": "text", "text": "what is "}]
    for i in range(count):
        image = {"type": "image"} if values is None else {"type": "image", "image": values[i]}
        parts += [image, {"type": "text", "text": f" and {i}"}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("count", range(4))
def test_answers_are_those_of_transformers(llm, oracle, count):
    expected = oracle(conversation(count), PICTURES[:count])
    options = {"max_tokens": 6, "ignore_eos": True}
    for pictures in (PICTURES, [np.array(picture) for picture in PICTURES], [file_of(p) for p in PICTURES]):
        found = llm.chat(conversation(count, pictures), **options)
        assert list(found.tokens) == expected
    # Among others, in any order.
    several = [conversation(n, PICTURES) for n in (2, count, 1, count)]
    answers = llm.chat(several, **options)
    assert list(answers[1].tokens) == list(answers[3].tokens) == expected


def test_each_image_is_encoded_once(folder):
    with LLM(str(folder), dtype="float32") as llm:
        for _ in range(2):
            llm.chat([conversation(2, PICTURES), conversation(1, PICTURES)], max_tokens=2)
        assert llm.stats.tower_runs == 2
        llm.chat(conversation(3, PICTURES), max_tokens=2)
        assert llm.stats.tower_runs == 3


def test_prompts_and_numbers(llm, family):
    placeholder = PLACEHOLDER[family]
    prompt = {"prompt": f"see {placeholder} now", "images": [PICTURES[0]]}
    prompts = [prompt, {**prompt, "images": [PICTURES[1]]}, TextWithImages(prompt["prompt"], [PICTURES[0]])]
    first = [answer.logprobs[0].logprob for answer in llm.generate(prompts, max_tokens=1, logprobs=0)]
    assert abs(first[0] - first[1]) > 1e-4 and abs(first[0] - first[2]) < 1e-5
    texts = [TextWithImages("see", [picture]) for picture in PICTURES]
    vectors = llm.embed(texts)
    assert np.isfinite(vectors).all() and np.abs(vectors[0] - vectors[1]).max() > 1e-3
    np.testing.assert_allclose(llm.embed(texts[1]), vectors[1], atol=1e-4)
    found = llm.classify(texts, ["yes", "no"])
    assert len(found) == 3


def test_an_animation_warns(llm):
    data = file_of(PICTURES[0], "GIF", save_all=True, append_images=PICTURES[1:])
    with pytest.warns(UserWarning, match=r"messages\[0\]\.content\[1\] is an animation"):
        llm.chat(conversation(1, [data]), max_tokens=2)
    told, prompt = r"images\[0\] is an animation", TextWithImages("what?", [data])

    async def answer():
        await llm.agenerate(prompt, max_tokens=2)

    async def pieces():
        return [piece async for piece in llm.astream(prompt, max_tokens=2)]

    for ask in (
        lambda: llm.generate(prompt, max_tokens=2),
        lambda: list(llm.stream(prompt, max_tokens=2)),
        lambda: asyncio.run(answer()),
        lambda: asyncio.run(pieces()),
        lambda: llm.embed(prompt),
        lambda: llm.classify(prompt, ["yes", "no"]),
        lambda: llm.score(prompt, " yes"),
        lambda: llm.rerank("what?", [prompt, "a"], words=("a", "b")),
    ):
        with pytest.warns(UserWarning, match=told) as found:
            ask()
        assert [one.filename for one in found if issubclass(one.category, UserWarning)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(conversation(1, PICTURES), max_tokens=2)


def test_errors_name_the_conversation(llm):
    with pytest.raises(InputError, match=r"item 1 of messages: .*messages\[0\]\.content\[1\].*never read"):
        llm.chat([conversation(1, PICTURES), conversation(1, ["file:///etc/passwd"])], max_tokens=2)


def test_a_picture_that_cannot_be_read_is_the_error_of_its_conversation(llm):
    cut = PIL.Image.open(io.BytesIO(file_of(PICTURES[0])[:-100]))  # whose pixels nobody has asked for
    found = llm.chat([conversation(1, PICTURES), conversation(1, [cut])], max_tokens=2, errors="return")
    assert len(found[0].tokens) == 2 and isinstance(found[1], InputError)
    assert (found[1].code, found[1].field) == ("image_damaged", "messages[0].content[1]")


def test_jobs_with_a_column_of_images(folder, llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for i, picture in enumerate(PICTURES):
        picture.save(tmp_path / "pictures" / f"{i}.png")
    PICTURES[0].save(tmp_path / "outside.png")
    rows = [
        {"q": "what?", "picture": "0.png"},
        {"q": "what?", "picture": url_of(PICTURES[1])},
        {"q": "what?", "picture": ["0.png", base64.b64encode(file_of(PICTURES[2])).decode()]},
        {"q": "what?", "picture": "../outside.png"},
        {"q": "what?", "picture": None},
        {"q": "what?", "picture": "none.png"},
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "in.jsonl", "-o", "out.jsonl", "-m", str(folder), "--task", "generate", "--prompt", "q",
               "--image", "picture", "--media-folder", "pictures", "--max-tokens", "4", "--dtype", "float32",
               "--ignore-eos", "--keep-order"]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 3, result.output  # two records failed
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    for line, given in ((lines[0], [0]), (lines[1], [1]), (lines[2], [0, 2]), (lines[4], [])):
        parts = [{"type": "image", "image": PICTURES[i]} for i in given] + [{"type": "text", "text": "what?"}]
        content = parts if given else "what?"
        expected = llm.chat([{"role": "user", "content": content}], max_tokens=4, ignore_eos=True)
        assert line["text"] == expected.text
    assert "which is not in" in lines[3]["error"]["message"] and lines[3]["error"]["field"] == "picture[0]"
    assert "no such file" in lines[5]["error"]["message"]
    assert "3 images encoded" in result.output


def test_batch_lines_with_images(folder, llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PICTURES[0].save("a.png")
    contents = [
        [{"type": "image_url", "image_url": {"url": url_of(PICTURES[0])}}, {"type": "text", "text": "what?"}],
        [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "what?"}],
        [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
    ]
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        for content in contents
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(main, ["run", "in.jsonl", "-o", "out.jsonl", "-m", str(folder), "--dtype", "float32"])
    found = {line["custom_id"]: line for line in map(json.loads, Path("out.jsonl").read_text().splitlines())}
    expected = llm.chat([{"role": "user", "content": contents[0]}], max_tokens=4)
    assert found["0"]["response"]["body"]["choices"][0]["message"]["content"] == expected.text, result.output
    assert "--media-folder" in json.dumps(found["1"])
    assert "--allow-media-host" in json.dumps(found["2"])


def test_the_command_line(folder, llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PICTURES[0].save("a.png")
    options = ["-m", str(folder), "--image", "a.png", "--dtype", "float32"]
    result = CliRunner().invoke(main, ["generate", "what?", "--max-tokens", "4", "--json", *options])
    assert result.exit_code == 0, result.output
    content = [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "what?"}]
    expected = llm.chat([{"role": "user", "content": content}], max_tokens=4)
    assert json.loads(result.output.splitlines()[0])["text"] == expected.text
    result = CliRunner().invoke(main, ["classify", "what?", "--labels", "yes,no", "--json", *options])
    assert result.exit_code == 0, result.output


def test_texts_alone_need_no_tower(folder, tmp_path, monkeypatch):
    def load(*args, **options):
        raise AssertionError("the tower is loaded")

    monkeypatch.setattr("prefold.features.images.native.load_tower", load)
    monkeypatch.chdir(tmp_path)
    with LLM(str(folder), dtype="float32", images=False) as llm:
        text = llm.generate("what?", max_tokens=4, ignore_eos=True).text
        with pytest.raises(InputError, match="accepts only text") as error:
            llm.chat(conversation(1, PICTURES), max_tokens=2)
        assert error.value.code == "no_tower"
    Path("in.jsonl").write_text('{"q": "what?"}\n')
    command = ["run", "in.jsonl", "-o", "out.jsonl", "-m", str(folder), "--task", "generate", "--prompt", "q", "--raw",
               "--max-tokens", "4", "--dtype", "float32", "--ignore-eos"]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert json.loads(Path("out.jsonl").read_text())["text"] == text
    with pytest.raises(AssertionError, match="the tower is loaded"):
        LLM(str(folder), dtype="float32")
