"""Shared beginnings are encoded once, and the ids are those of the whole text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from small_tokenizers import CORPUS, TEXTS
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from prefold.text import Tokenizer
from prefold.text.linecut import common_prefix_length, cuts_at_lines, encode_batch, last_cut, shared_cuts

KINDS = ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"]
# What may stand on both sides of a line's end, the awkward cases among them.
ENDS = ["x", "word", "1", "12", "!", "...", "'", "é", "日", "😀", "\u0301", "\x1c", "\u200b", "/"]
ENDS += ["<|im_end|>", "<think>"]
STARTS = ["Text", "a", "Z", "9", "s", "t", "12345", "re", "Label: yes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_may_be_cut_where_last_cut_says(backends, kind):
    backend = Backend.from_str(backends[kind])
    for end in ENDS:
        for start in STARTS:
            for lead in ("", "ab ", "\n\n", "  ", "\r\n"):
                text = f"{lead}{end}\n{start} and more"
                cut = last_cut(text, len(text))
                if cut:
                    whole = backend.encode(text, add_special_tokens=False).ids
                    parts = [backend.encode(part, add_special_tokens=False).ids for part in (text[:cut], text[cut:])]
                    assert parts[0] + parts[1] == whole, (text, cut)


def test_last_cut_refuses_unsafe_places():
    for text in ("a\n\nText", "a \nText", "a\n Text", "a\r\nText", "a\n/x", "a\n日", "a\n'll", "\nText", "a\n"[:1]):
        assert last_cut(text, len(text)) == 0, text
    assert last_cut("a\nText", 6) == 2
    assert last_cut("a\nText", 2) == 2
    assert last_cut("a\nText", 1) == 0
    assert last_cut("a\nb\n\nc", 6) == 2
    assert last_cut("a\n", 2) == 2


def test_common_prefix_length():
    rng = random.Random(0)
    for _ in range(300):
        a = "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
        b = "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix_length(a, b) == expected


def family(rng: random.Random) -> list[str]:
    """Texts that begin alike: a head of many lines, then middles, then ends."""
    lines = [line for text in CORPUS + TEXTS for line in text.split("\n")]
    head = "\n".join(rng.choice(lines) for _ in range(rng.randrange(4, 30)))
    texts = []
    for _ in range(rng.randrange(1, 5)):
        middle = head + rng.choice(["", "\n", "\n\n", "\nText: "]) + rng.choice(lines)
        for _ in range(rng.randrange(1, 5)):
            texts.append(middle + rng.choice(["", "\nLabel: ", "\n", " "]) + rng.choice(lines)[: rng.randrange(20)])
    if rng.random() < 0.3:
        texts.append(head)
    if rng.random() < 0.3:
        rng.shuffle(texts)
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_single_texts(backends, kind):
    backend = Backend.from_str(backends[kind])
    ours = Tokenizer(Backend.from_str(backends[kind]))
    assert ours._cuts_at_lines
    rng = random.Random(1)
    cut = 0
    for _ in range(20):
        texts = [text for _ in range(rng.randrange(1, 4)) for text in family(rng)]
        cut += sum(c > 0 for c in shared_cuts(texts))
        for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
            assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert cut > 30


def test_the_shared_beginning_is_encoded_once(backends):
    ours = Tokenizer(Backend.from_str(backends["smollm"]))
    head = "\n".join(f"Text: example {i}\nLabel: positive" for i in range(100))
    texts = [f"{head}\nText: item {i}\nLabel: {label}" for i in range(20) for label in ("yes", "no", "maybe")]
    seen = 0

    def counting(batch: list[str]) -> list[np.ndarray]:
        nonlocal seen
        seen += sum(map(len, batch))
        return ours._encode_all(batch)

    ids = encode_batch(texts, counting)
    assert seen < 2 * len(head) + 20 * 3 * 40
    assert [i.tolist() for i in ids] == [ours.encode(text).tolist() for text in texts]


def test_tokenizers_whose_parts_are_not_known_are_left_alone(backends):
    def cut(change) -> bool:
        backend = Backend.from_str(backends["qwen2"])
        change(backend)
        return cuts_at_lines(backend)

    assert cut(lambda b: None)
    assert not cuts_at_lines(Backend.from_str(backends["sentencepiece"]))
    assert not cut(lambda b: b.add_tokens([AddedToken("x\ny")]))
    assert not cut(lambda b: b.add_tokens([AddedToken("<m>", lstrip=True)]))
    assert not cut(lambda b: setattr(b, "normalizer", normalizers.Lowercase()))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Metaspace()))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split("\n", "isolated")))
    only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not cut(lambda b: setattr(b, "pre_tokenizer", only))
