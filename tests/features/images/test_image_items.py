"""Images in items: prompts are those of transformers' processors, a placeholder that a user writes is text, and what is
wrong is told."""

from __future__ import annotations

import base64
import gc
import io
import tracemalloc
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from tiny_vision import FAMILIES, IMAGE_TOKENS, PLACEHOLDER, drawing, tiny_vision

from prefold.checkpoint import resolve
from prefold.errors import InputError
from prefold.features.images.decode import DecodedImage, Image
from prefold.features.images.items import FILES, ImageInputs, LRUCache, image_cache
from prefold.features.images.processor import load_processor
from prefold.features.images.reading import Reader
from prefold.features.images.table import MediaTable
from prefold.model import config_from
from prefold.spec.requests import Result
from prefold.tasks import make_task
from prefold.tasks.embed import EmbedTask
from prefold.tasks.sentence import ChatSettings, EmbedSettings
from prefold.text import FilledTemplate, instructed_query, load_tokenizer
from prefold.text.media import TextWithImages
from prefold.trie import MEDIA_BASE, Spool
from prefold.trie.tempfiles import BlobStore

PICTURES = [PIL.Image.fromarray(drawing(seed, *size)) for seed, size in enumerate([(26, 26), (60, 20), (9, 44)])]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, family):
    settings = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8} if family == "gemma3" else None
    return tiny_vision(tmp_path_factory.mktemp("folder"), family, settings=settings)


@pytest.fixture(scope="module")
def made(folder):
    """make(name, **options) -> a task of this checkpoint, and its ImageInputs."""
    checkpoint = resolve(str(folder))
    tokenizer = load_tokenizer(checkpoint)
    processor = load_processor(checkpoint, config_from(checkpoint.config).tower, tokenizer)
    images = ImageInputs(processor, tokenizer, MediaTable())

    def make(name="generate", reader=None, **options):
        inputs = images if reader is None else replace(images, reader=reader)
        return make_task(name, checkpoint, tokenizer, images=inputs, **options), inputs

    yield make
    images.reader.decoder.close()


def with_tokens(tokens: np.ndarray, images: ImageInputs) -> list[int]:
    """A prompt as transformers has it: the image token in place of each row of an image."""
    return np.where(tokens >= MEDIA_BASE, images.processor.image_token_id, tokens).tolist()


def oracle(folder, family, messages, pictures) -> list[int]:
    """The ids of transformers' processor."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if family == "gemma3":
        settings = transformers.Gemma3ImageProcessorPil.from_pretrained(folder)
        processor = transformers.Gemma3Processor(settings, tokenizer, image_seq_length=9)
        options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
        found = processor(text=text, images=pictures, images_kwargs=options)
    else:
        settings = transformers.Idefics3ImageProcessorPil.from_pretrained(folder)
        processor = transformers.Idefics3Processor(settings, tokenizer, image_seq_len=9)
        found = processor(text=text, images=None if pictures is None else [pictures])
    return found["input_ids"][0]


@pytest.mark.parametrize("count", range(4))
def test_prompts_are_those_of_transformers(made, folder, family, count):
    task, images = made()
    words = ["what is\n", "", "and this?", "!"]
    parts = [{"type": "text", "text": words[0]}]
    for i in range(count):
        parts += [{"type": "image", "image": PICTURES[i]}, {"type": "text", "text": words[i + 1]}]
    messages = [{"role": "user", "content": parts}]
    (work,) = task.prepare([{"messages": messages}])
    (request,) = work.requests
    plain = [{k: v for k, v in part.items() if k != "image"} for part in parts]
    expected = oracle(folder, family, [{"role": "user", "content": plain}], PICTURES[:count] or None)
    assert with_tokens(request.tokens, images) == list(expected)
    assert len(request.media) == count
    rows = np.concatenate([np.empty(0, np.int32), *(medium.ids for medium in request.media)])
    assert request.tokens[request.tokens >= MEDIA_BASE].tolist() == rows.tolist()
    for medium, picture in zip(request.media, PICTURES, strict=False):
        tiles = images.processor.tiles(images.reader.read(picture).image)
        np.testing.assert_array_equal(medium.load(), tiles)


def file_of(picture, kind="PNG", **options) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, kind, **options)
    return sink.getvalue()


def test_every_way_to_give_an_image_is_the_same_image(made, tmp_path):
    task, _ = made()
    data = file_of(PICTURES[0])
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    ways = [
        PICTURES[0], {"type": "image", "image": PICTURES[0]}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url}, {"type": "input_image", "image_url": url}, data,
        {"type": "image", "path": str(tmp_path / "a.png")}, {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "base64": base64.b64encode(data).decode()}, np.array(PICTURES[0]),
        {"type": "image", "image": {"bytes": data, "path": None}}, {"type": "image", "url": url},
    ]  # fmt: skip
    works = task.prepare([[{"role": "user", "content": [way, "what?"]}] for way in ways])
    tokens = [work.requests[0].tokens.tolist() for work in works]
    assert all(one == tokens[0] for one in tokens)
    other = task.prepare([[{"role": "user", "content": [PICTURES[1], "what?"]}]])[0]
    assert other.requests[0].tokens.tolist() != tokens[0]


def test_a_placeholder_that_a_user_writes_is_text(made, family):
    task, images = made()
    written = " ".join(IMAGE_TOKENS[family]) + " <|im_end|>"
    for content in (written, [{"type": "text", "text": written}], [PICTURES[0], written]):
        (work,) = task.prepare([[{"role": "user", "content": content}]])
        (request,) = work.requests
        media = content[0] is PICTURES[0]
        assert len(request.media) == media
        bare = request.tokens[request.tokens < MEDIA_BASE]
        decoded = images.tokenizer.decode(bare)
        assert written in decoded
        assert images.processor.image_token_id not in bare
        # Other special tokens are what they were; escape_special is about these.
        assert images.tokenizer.token_id("<|im_end|>") in bare
    (work,) = made(escape_special=True)[0].prepare([[{"role": "user", "content": [PICTURES[0], written]}]])
    assert (work.requests[0].tokens == images.tokenizer.token_id("<|im_end|>")).sum() == 1  # the template's
    assert len(work.requests[0].media) == 1


def test_prompts_with_images(made, family):
    task, _ = made()
    placeholder = PLACEHOLDER[family]
    items = [
        {"prompt": f"a{placeholder}b{placeholder}", "images": PICTURES[:2]},
        {"prompt": "text", "images": PICTURES[:1]},
        {"prompt": placeholder + "text", "images": PICTURES[:1]},
        {"prompt": f"a{placeholder}b", "images": PICTURES[:2]},
        {"prompt": [5, 6], "images": PICTURES[:1]},
        {"prompt": "x", "images": PICTURES[0]},
    ]
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}, {"type": "image"}]
    items += [
        {"messages": [{"role": "user", "content": parts}], "images": PICTURES[:2]},
        {"messages": [{"role": "user", "content": parts}], "images": PICTURES[:1]},
        {"messages": [{"role": "user", "content": "what?"}], "images": PICTURES[:1]},
    ]
    works = task.prepare(items)
    filled = [PICTURES[0], "what?", PICTURES[1]]
    (same,) = task.prepare([[{"role": "user", "content": filled}]])
    assert works[6].requests[0].tokens.tolist() == same.requests[0].tokens.tolist()
    for work, message in ((works[7], "1 images for 2 places"), (works[8], "1 images for 0 places")):
        assert isinstance(work, InputError) and message in str(work)
    assert [len(work.requests[0].media) for work in works[:3]] == [2, 1, 1]
    (pictured,) = task.prepare([TextWithImages("text", PICTURES[:1])])
    assert pictured.requests[0].tokens.tolist() == works[1].requests[0].tokens.tolist()
    assert works[1].requests[0].tokens.tolist() == works[2].requests[0].tokens.tolist()
    assert isinstance(works[3], InputError) and "2 images for 1 places" in str(works[3])
    assert all(isinstance(work, InputError) and work.field == "images" for work in works[4:6])
    with pytest.raises(InputError, match="outside the model's vocabulary"):  # rows of images are nobody's to give
        raise task.prepare([{"prompt": [5, MEDIA_BASE + 3]}])[0]


def test_texts_with_images_in_other_tasks(made, family):
    placeholder = PLACEHOLDER[family]
    value = TextWithImages(f"what {placeholder}?", [PICTURES[0]])
    for name, item, options in (
        ("embed", value, {}),
        ("score", {"prompt": value, "continuation": " yes"}, {}),
        ("classify", {"text": value}, {"labels": ["yes", "no"]}),
    ):
        task, images = made(name, **options)
        (work,) = task.prepare([item])
        assert not isinstance(work, InputError), work
        for request in work.requests:
            assert len(request.media) == 1
            assert images.processor.image_token_id in with_tokens(request.tokens, images)


def test_embedding_puts_its_prompt_before_a_text_with_images(made, family):
    value, instruction = TextWithImages(f"what {PLACEHOLDER[family]}?", PICTURES[:1]), instructed_query("find", "")
    (plain,) = made("embed")[0].prepare([TextWithImages(f"{instruction}{value.text}", value.images)])
    for options in ({"instruction": "find"}, {"prompt": instruction}):
        (work,) = made("embed", **options)[0].prepare([value])
        assert work.requests[0].tokens.tolist() == plain.requests[0].tokens.tolist()
    task = EmbedTask(made("embed")[0].inputs, settings=EmbedSettings(chat=ChatSettings()))
    (found,) = task.prepare([value])
    assert isinstance(found, InputError) and found.code == "unsupported" and "has images" in str(found)


def test_images_that_are_wrong(made, tmp_path):
    task, _ = made()
    (tmp_path / "bad.png").write_bytes(file_of(PICTURES[0])[:-30])

    def error_of(part, task=task):
        (found,) = task.prepare([[{"role": "user", "content": ["a", part]}]])
        assert isinstance(found, InputError), found
        assert found.field == "messages[0].content[1]" and found.remedy
        return str(found)

    assert "damaged PNG" in error_of({"type": "image", "path": str(tmp_path / "bad.png")})
    assert "no such file" in error_of({"type": "image", "path": str(tmp_path / "none.png")})
    assert "not base64" in error_of({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%%"}})
    assert "never read" in error_of({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})
    assert "never read" in error_of({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}})
    assert "not an allowed host" in error_of({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}})
    assert "neither a url" in error_of({"type": "image"})
    assert "uint8" in error_of(np.zeros((3, 3)))
    (tmp_path / "inside").mkdir()
    PICTURES[0].save(tmp_path / "inside" / "a.png")
    PICTURES[0].save(tmp_path / "outside.png")
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "outside.png")
    within, _ = made(reader=Reader(folder=tmp_path / "inside"))
    (work,) = within.prepare([[{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]])
    assert len(work.requests[0].media) == 1
    for name in ("../outside.png", "link.png", str(tmp_path / "outside.png")):
        assert "which is not in" in error_of({"type": "image", "path": name}, within)
    never, _ = made(reader=Reader(paths=False))
    assert "paths are not read here" in error_of({"type": "image", "path": str(tmp_path / "outside.png")}, never)
    (many,) = task.prepare([[{"role": "user", "content": [PICTURES[0]] * 65}]])
    assert "there are 65 images; 64 are allowed" in str(many)


def test_truncation_cuts_no_image(made, family):
    long = "word " * 2000
    conversation = [{"role": "user", "content": long}, {"role": "user", "content": [PICTURES[0], "what?"]}]
    (cut,) = made(truncate=True, max_tokens=4)[0].prepare([conversation])
    assert len(cut.requests[0].media) == 1 and cut.requests[0].tokens.size <= 508
    assert np.isin(cut.requests[0].media[0].ids, cut.requests[0].tokens).all()
    only = [{"role": "user", "content": [PICTURES[0], long]}]
    for truncate, match in ((True, "messages with images, which are never cut"), ("left", "cut an image")):
        (found,) = made(truncate=truncate, max_tokens=4)[0].prepare([only])
        assert isinstance(found, InputError) and found.code == "too_long" and match in str(found)
    before, behind = TextWithImages(long, [PICTURES[0]]), TextWithImages(long + PLACEHOLDER[family], [PICTURES[0]])
    words = {"words": ("a", "b")}
    at_end = ("right",)
    for name, item, options, ends, cut_ends in (
        ("score", lambda text: {"prompt": text, "continuation": " yes"}, {}, (True, "left", "right"), at_end),
        ("rerank", lambda text: {"query": "what?", "document": text}, words, (True, "right"), (True, "right")),
        ("embed", lambda text: {"text": text}, {}, (True, "left", "right"), (True, "right")),
        ("classify", lambda text: {"text": text}, {"labels": ["yes", "no"]}, (True, "left"), (True, "right")),
        ("generate", lambda text: text, {"max_tokens": 4}, ("left", "right"), at_end),
    ):
        for truncate in ends:
            lost, kept = (behind, before) if truncate in cut_ends else (before, behind)
            (found,), (cut,) = (made(name, truncate=truncate, **options)[0].prepare([item(t)]) for t in (lost, kept))
            assert isinstance(found, InputError) and found.code == "too_long" and "cut an image" in str(found)
            (request, *_) = cut.requests  # where text alone is cut, the image stays
            assert np.isin(request.media[0].ids, request.tokens).all()


def test_what_a_prompt_says_beside_its_images_is_cut(made, family):
    """Where no end is named: the beginning of its text, or its longest column, and never the place of an image."""
    place, task = PLACEHOLDER[family], made(truncate=True, max_tokens=4)[0]
    column = FilledTemplate([("see ", False), ("word " * 2000, True), (" now", False)])
    texts = ["word " * 2000 + "behind", column, f"word {place} " + "word " * 2000]
    works = task.prepare([TextWithImages(text, PICTURES[:1]) for text in texts])
    for work, begins, ends in zip(works, ("", "see word", None), ("word behind", " now", None), strict=True):
        if begins is None:
            assert work.code == "too_long" and "cut an image" in str(work)
            continue
        (request,) = work.requests
        ids = request.tokens
        assert ids.size == 508 and np.isin(request.media[0].ids, ids).all()
        said = task.inputs.tokenizer.decode(ids[int(np.flatnonzero(ids >= MEDIA_BASE)[-1]) + 1 :])
        assert begins in said and said.endswith(ends)


def test_token_ids_are_cut_at_their_beginning(made):
    task, _ = made("embed", truncate="left")
    tokenizer = copy(task.inputs.tokenizer)
    tokenizer.truncation_side = "left"
    task.inputs, task.truncate = replace(task.inputs, tokenizer=tokenizer, max_length=20), True
    (work,) = task.prepare([{"text": list(range(1, 40))}])
    assert not isinstance(work, InputError), work
    assert work.requests[0].tokens[-1] == 39 and work.requests[0].tokens.size == 20


def test_an_animation_is_told(made):
    task, _ = made()
    data = file_of(PICTURES[0], "GIF", save_all=True, append_images=PICTURES[1:])
    (work,) = task.prepare([[{"role": "user", "content": [data, "what?"]}]])
    assert work.note["image_notes"] == ["messages[0].content[0] is an animation; only its first frame is used"]


def test_images_are_not_scored(made):
    task, _ = made("score")
    seen = TextWithImages("what?", PICTURES[:1])
    for item, field in ((seen, "text"), (("what?", seen), "continuation")):
        (found,) = task.prepare([{"text": item} if item is seen else item])
        assert (found.code, found.field) == ("unsupported", field) and "no probabilities" in str(found)


@pytest.mark.parametrize(
    ("name", "item", "options", "result"),
    [
        ("embed", lambda text: text, {}, Result(np.ones(3, np.float32))),
        ("classify", lambda text: text, {"labels": ["yes", "no"]}, Result(np.ones(1, np.float32))),
        ("score", lambda text: (text, " yes"), {}, Result(np.ones(1, np.float32), np.ones(1, bool))),
        ("rerank", lambda text: ("what?", text), {"words": ("a", "b")}, Result(np.ones(2, np.float32))),
        ("rerank", lambda text: ("what?", [text]), {"words": ("a", "b")}, Result(np.ones(2, np.float32))),
    ],
)
def test_an_animation_is_told_beside_numbers(made, name, item, options, result):
    task, _ = made(name, **options)
    data = file_of(PICTURES[0], "GIF", save_all=True, append_images=PICTURES[1:])
    for image, notes in ((data, ["images[0] is an animation; only its first frame is used"]), (PICTURES[0], None)):
        (work,) = task.prepare([item(TextWithImages("what?", [image]))])
        assert task.finish(work.note, [result] * len(work.requests)).line().get("image_notes") == notes


def test_a_text_model_says_what_to_load(tmp_path):
    from tiny import tiny_checkpoint

    checkpoint = resolve(str(tiny_checkpoint(tmp_path)))
    task = make_task("generate", checkpoint, load_tokenizer(checkpoint))
    for item in ([{"role": "user", "content": [PICTURES[0]]}], {"prompt": "a", "images": PICTURES[:1]}):
        (found,) = task.prepare([item])
        assert isinstance(found, InputError) and found.code == "no_tower"
        assert "accepts only text" in str(found) and "--mmproj" in found.remedy


def noting(images, decoded: list):
    """The settings of images, with a decoder that notes what it is given."""
    real = images.reader.decoder
    decoder = SimpleNamespace(limits=real.limits, decode=lambda *given: decoded.append(given) or real.decode(*given))
    return replace(images, reader=replace(images.reader, decoder=decoder))


def test_a_file_is_decoded_once_where_the_tower_follows(made, tmp_path):
    task, _ = made()
    data, decoded = file_of(PIL.Image.fromarray(drawing(78, 20, 20))), []
    task.inputs = replace(task.inputs, images=noting(task.inputs.images, decoded))
    (work,) = task.prepare([[{"role": "user", "content": [{"type": "image", "image": data}]}]])
    (medium,) = work.requests[0].media
    tiles = medium.load()
    assert len(decoded) == 1
    assert np.array_equal(medium.load(), tiles) and len(decoded) == 2, "it is not held for longer"


@pytest.mark.parametrize("kind", ["bytes", "data URL", "path", "Path"])
def test_a_file_that_comes_again_is_decoded_once(made, tmp_path, kind):
    """As the images of a record with several continuations do, or examples in the prompts of all records. A tenant does
    not learn what another has sent."""
    task, images = made("score")
    files, decoded = [file_of(PIL.Image.fromarray(drawing(60 + i, 20, 20))) for i in range(3)], []
    images = noting(replace(images, files=LRUCache(FILES)), decoded)
    task.inputs = replace(task.inputs, images=images)
    for i, data in enumerate(files):
        (tmp_path / f"{i}.png").write_bytes(data)
    values = {
        "bytes": files,
        "data URL": ["data:image/png;base64," + base64.b64encode(data).decode() for data in files],
        "path": [str(tmp_path / f"{i}.png") for i in range(3)],
        "Path": [tmp_path / f"{i}.png" for i in range(3)],
    }[kind]
    prompt = TextWithImages("what?", values)
    works = task.prepare([{"prompt": prompt, "continuation": choice} for choice in (" yes", " no", " a", " b")])
    assert len(decoded) == 3
    keys = [[medium.key for medium in work.requests[0].media] for work in works]
    assert keys == [keys[0]] * 4 and len(set(keys[0])) == 3
    theirs = copy(task)
    theirs.inputs = replace(task.inputs, images=replace(images, salt_prefix="tenant"))
    theirs.prepare([{"prompt": prompt, "continuation": " yes"}])
    assert len(decoded) == 6
    works = task.prepare([{"prompt": TextWithImages("what?", [PICTURES[0]]), "continuation": " yes"}])
    assert len(decoded) == 6, "pixels are no file"


def test_files_in_items_are_held_in_bounded_memory(made, tmp_path, monkeypatch):
    """Those of all requests of a job wait for the tower, however large they are."""
    task, images = made("embed")
    images = replace(images, blobs=BlobStore(1 << 20, tmp_path), recent=image_cache(1 << 20))
    task.inputs = replace(task.inputs, images=images)
    decoder = SimpleNamespace(decode=lambda data, *given: DecodedImage(Image(drawing(data[0], 8, 8)), False))
    task.inputs = replace(task.inputs, images=replace(images, reader=Reader(decoder)))
    spool = Spool(memory_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(20):
            data = bytes([number]) + bytes(1 << 20)
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            for _ in range(2):  # the second one is the same image
                (work,) = task.prepare([TextWithImages(str(number), [url])])
                spool.add(work.requests[0])
            del work, data, url
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 6 << 20
    finally:
        tracemalloc.stop()
    blobs = images.blobs
    assert 18 <= blobs.size // (2 << 20) <= 20 and not any(blobs.free.values()), "each takes a power of two"
    (window,) = spool.windows(max_tokens=1 << 20)
    media = images.table.find(window.tokens[window.tokens >= MEDIA_BASE])
    assert len(media) == 20 and all(medium.load().shape[1] == 3 for medium in media)
    spool.close()
    del media, window
    gc.collect()
    assert len(blobs.free[2 << 20]) == blobs.size // (2 << 20)


def test_what_is_held_of_recent_images():
    one, two, three = (Image(drawing(i, 10, 10)) for i in range(3))
    recent = image_cache(2 * 300)
    for image in (one, two, one, three):  # `two` was put longest ago
        recent.put(image.digest, image)
        large = Image(drawing(3, 100, 100))
        recent.put(large.digest, large)  # larger than all that is held
    assert recent.take(two.digest) is None
    assert recent.take(one.digest) is one and recent.take(one.digest) is None
    recent.put(two.digest, two)
    assert recent.take(two.digest) is two and recent.take(three.digest) is three


def test_a_text_with_images_is_a_prompt_wherever_it_stands(made):
    task = made(truncate=True, max_tokens=4)[0]
    long = TextWithImages("word " * 2000, PICTURES[:1])
    items = [long, {"prompt": long}, {"prompt": long.text, "images": long.images}, {"prompt": long, "salt": "s"}]
    (one, *others, salted) = [work.requests[0] for work in task.prepare(items)]
    assert all(other.tokens.tolist() == one.tokens.tolist() for other in others)
    assert salted.namespace.salt == salted.media[0].salt == "s"


def test_places_of_images_in_tables(made):
    """A table fills the fields that a part does not have with nulls."""
    import pyarrow as pa

    task, _ = made()
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    (row,) = pa.Table.from_pylist([{"messages": [{"role": "user", "content": content}]}]).to_pylist()
    assert row["messages"][0]["content"][0] == {"type": "image", "text": None}
    works = task.prepare([{"messages": [{"role": "user", "content": content}], "images": PICTURES[:1]},
                          row | {"images": PICTURES[:1]}, row])  # fmt: skip
    assert works[0].requests[0].tokens.tolist() == works[1].requests[0].tokens.tolist()
    assert works[2].code == "missing_field" and works[2].field == "messages[0].content[0]"


def test_images_of_another_namespace_have_ids_of_their_own(made, family):
    task, images = made()
    content = [PICTURES[0], "and", PICTURES[1]]
    item = {"messages": [{"role": "user", "content": content}], "salt": "s"}
    (request,) = task.prepare([item])[0].requests
    theirs = copy(task)
    theirs.inputs = replace(task.inputs, images=images.for_clients(salt_prefix="tenant"))
    (other,) = theirs.prepare([item])[0].requests
    assert {medium.salt for medium in request.media} == {"s"} and {m.salt for m in other.media} == {"tenant/s"}
    assert with_tokens(other.tokens, images) == with_tokens(request.tokens, images)
    assert not np.isin(other.tokens[other.tokens >= MEDIA_BASE], request.tokens).any()
    (direct,) = task.prepare([item | {"salt": "tenant/s"}])
    assert direct.requests[0].tokens.tolist() == other.tokens.tolist()


def test_an_image_that_has_changed_is_told(made, tmp_path):
    task, _ = made()
    PIL.Image.fromarray(drawing(77, 20, 20)).save(tmp_path / "a.png")  # nobody else has this one
    part = {"type": "image", "path": str(tmp_path / "a.png")}
    (work,) = task.prepare([[{"role": "user", "content": [part]}]])
    medium = work.requests[0].media[0]
    assert medium.load().shape[1] == 3
    PICTURES[1].save(tmp_path / "a.png")
    with pytest.raises(InputError, match="has changed since"):
        medium.load()
