"""Text as tokens come, against `decode` of all of them."""

from __future__ import annotations

import random

import pytest
from counts import lines_run
from letters import letter_by_letter
from small_tokenizers import TEXTS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from prefold.text import Tokenizer
from prefold.text.detokenize import Detokenizer, bytes_of_tokens

KINDS = ["gpt-2", "qwen2", "tekken", "sentencepiece", "llama-2", "metaspace", "no decoder"]


@pytest.fixture(scope="module")
def tokenizers(backends) -> dict[str, Tokenizer]:
    made = {kind: Backend.from_str(backends[kind]) for kind in ("gpt-2", "qwen2", "tekken", "sentencepiece")}
    made["llama-2"] = Backend.from_str(backends["sentencepiece"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made["llama-2"].decoder = decoders.Sequence(steps)
    words = ["<unk>", "▁", "▁a", "b", "▁▁", "c▁", "é"]
    made["metaspace"] = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made["metaspace"].pre_tokenizer = pre_tokenizers.Metaspace()
    made["metaspace"].decoder = decoders.Metaspace()
    made["no decoder"] = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    return {kind: Tokenizer(backend) for kind, backend in made.items()}


def ids_of(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Tokens of a text, any tokens, or both; some special, some unknown to the tokenizer."""
    ids = tokenizer.encode(rng.choice(TEXTS), special=rng.random() < 0.5).tolist()[:40]
    if rng.random() < 0.7:
        some = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(12))]
        place = rng.randrange(len(ids) + 1)
        ids[place:place] = some
    return ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_the_whole(tokenizers, kind, skip):
    tokenizer = tokenizers[kind]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(0)
    for _ in range(400 if skip else 200):
        ids = ids_of(tokenizer, rng)
        stream = detokenizer.stream(skip_special=skip)
        parts = [stream.add(token) for token in ids] + [stream.finish()]
        assert "".join(parts) == stream.text == tokenizer.decode(ids, skip_special=skip), ids
        assert stream.stopped is None
        assert stream.num_tokens == len(ids)


@pytest.mark.parametrize("kind", ["gpt-2", "qwen2", "tekken", "sentencepiece", "llama-2"])
def test_the_bytes_of_tokens_join_to_the_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    bytes_of = bytes_of_tokens(tokenizer)
    parts = 0
    for text in [*TEXTS, "x 😊在", "é 日"]:
        ids = tokenizer.encode(f"a{text}", special=False).tolist()
        joined = b"".join(map(bytes_of, ids)).decode()
        # The decoder leaves out the blank that begins a whole text.
        assert joined.removeprefix(" " if kind == "llama-2" else "") == tokenizer.decode(ids), text
        parts += sum("\ufffd" in bytes_of(token).decode(errors="replace") for token in ids)
    assert parts


@pytest.mark.parametrize("kind", ["gpt-2", "sentencepiece"])
def test_bytes_that_are_no_utf8(tokenizers, kind):
    """Runs of single bytes, valid and not, broken off by tokens of text."""
    tokenizer = tokenizers[kind]
    letters = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)]
    if kind == "gpt-2":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        letters = [tokenizer.token_id(letter) for letter in alphabet]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(1)
    text = "é日😀\u07ff\uffff"
    for _ in range(500):
        if kind == "gpt-2":
            ids = [rng.choice(letters) for _ in range(rng.randrange(12))]
        else:
            data = bytearray(rng.choice(text) * 2 + rng.choice(text), "utf-8")
            if rng.random() < 0.4:
                data[rng.randrange(len(data))] = rng.randrange(256)
            ids = [letters[byte] for byte in data[: rng.randrange(len(data) + 1)]]
        place = rng.randrange(len(ids) + 1)
        ids[place:place] = [tokenizer.token_id("a")] * rng.randrange(2)
        stream = detokenizer.stream()
        assert "".join([stream.add(token) for token in ids] + [stream.finish()]) == tokenizer.decode(ids), ids


def test_letters_come_when_they_are_complete(tokenizers):
    tokenizer = tokenizers["gpt-2"]
    stream = Detokenizer(tokenizer).stream()
    parts = [stream.add(tokenizer.token_id(letter)) for letter in "Ã©æĹ¥"]  # the bytes of é and 日
    assert parts == ["", "é", "", "", "日"]


@pytest.mark.parametrize("kind", KINDS)
def test_stops_are_found_wherever_tokens_end(tokenizers, kind):
    tokenizer = tokenizers[kind]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(2)
    found = 0
    for _ in range(400):
        ids = ids_of(tokenizer, rng)
        whole = tokenizer.decode(ids, skip_special=True)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(whole) + 1)
            stops.append(whole[start : start + rng.randrange(1, 5)] or "zz")
        stops = [stop for stop in stops if "\ufffd" not in stop] or ["zz"]
        stream, given, used = detokenizer.stream(stops), [], 0
        for used, token in enumerate(ids, 1):  # noqa: B007
            given.append(stream.add(token))
            if stream.stopped is not None:
                break
        given.append(stream.finish())
        # The tokens up to the stop decide what the text is; what comes later might change it again.
        text, stop = letter_by_letter(tokenizer.decode(ids[:used], skip_special=True), stops)
        assert ("".join(given), stream.stopped) == (text, stop), (ids, stops)
        assert stream.text == text
        if stop is None:
            assert stream.num_tokens == len(ids)
            continue
        found += 1
        assert letter_by_letter(tokenizer.decode(ids[: used - 1], skip_special=True), stops)[1] is None
        kept = ids[: stream.num_tokens]
        assert stream.num_tokens <= used
        if "\ufffd" not in whole:
            assert tokenizer.decode(kept, skip_special=True).startswith(text)
            assert not kept or not tokenizer.decode(kept[:-1], skip_special=True).startswith(text)
    assert found > 100


def test_a_token_that_holds_the_end_and_the_stop_is_kept_whole(tokenizers):
    tokenizer = tokenizers["metaspace"]
    stream = Detokenizer(tokenizer).stream(["a"])
    given = [stream.add(tokenizer.token_id(name)) for name in ("b", "é", "▁a")]
    assert (given, stream.stopped, stream.num_tokens) == (["b", "é", " "], "a", 3)
    stream = Detokenizer(tokenizer).stream([" a"])
    given = [stream.add(tokenizer.token_id(name)) for name in ("b", "é", "▁a")]
    assert (given, stream.stopped, stream.num_tokens) == (["b", "é", ""], " a", 2)


def test_no_stop_within_the_first_tokens(tokenizers):
    tokenizer = tokenizers["gpt-2"]
    ids = [tokenizer.token_id(letter) for letter in "abcabc"]
    for min_tokens, expected in ((0, "a"), (2, "a"), (3, "abca"), (4, "abca"), (6, "abcabc")):
        stream = Detokenizer(tokenizer).stream(["bc"], min_tokens)
        for token in ids:
            stream.add(token)
            if stream.stopped:
                break
        stream.finish()
        assert stream.text == expected
        assert stream.num_tokens == len(expected)


def test_a_newline_byte_stops_at_once(tokenizers):
    """Llama 2 writes line ends as bytes, and what a run of bytes means is only certain when it ends."""
    tokenizer = tokenizers["llama-2"]
    ids = [tokenizer.token_id("▁"), tokenizer.token_id("a"), tokenizer.token_id("<0x0A>")]
    stream = Detokenizer(tokenizer).stream(["\n"])
    assert [stream.add(token) for token in ids] == ["", "a", ""]
    assert (stream.stopped, stream.num_tokens, stream.finish(), stream.text) == ("\n", 2, "", "a")
    stream = Detokenizer(tokenizer).stream()
    assert [stream.add(token) for token in ids] + [stream.finish()] == ["", "a", "", "\n"]


def test_work_does_not_grow_with_the_text(tokenizers):
    """A long text costs about what as many short ones do."""
    tokenizer = tokenizers["sentencepiece"]
    detokenizer = Detokenizer(tokenizer)
    ids = (tokenizer.encode("日本語 ok", special=False).tolist() * 1000)[:5000]

    def decode(parts: int) -> None:
        for _ in range(parts):
            stream = detokenizer.stream(["zzz", "\n\n"])
            for token in ids[: len(ids) // parts]:
                stream.add(token)

    decode(10)
    assert lines_run(lambda: decode(1)) < 1.1 * lines_run(lambda: decode(100))
