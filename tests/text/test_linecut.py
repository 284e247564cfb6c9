"""Shared beginnings are encoded once, and the ids are those of the whole text."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from small_tokenizers import CORPUS, TEXTS
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from prefold.text import Tokenizer
from prefold.text.linecut import common_prefix_length, encode_batch, line_cuts, shared_cuts

KINDS = ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "gemma"]
# What may stand on both sides of a line's end, the awkward cases among them.
ENDS = ["x", "word", "1", "12", "!", "...", "'", "é", "日", "😀", "\u0301", "\x1c", "\u200b", "/"]
ENDS += ["<|im_end|>", "<think>", " ", "\t", ""]
STARTS = ["Text", "a", "Z", "9", "s", "t", "12345", "re", "Label: yes", "{", '"x"', "/x", "'ll", "é", "日", "½", "Ⅷ"]
STARTS += ["<|im_end|>", "<think>", "<x", "\u0301", "(", " a", "\tx", "", "▁", "😀"]
LEADS = ["", "ab ", "\n\n"]
NEWLINES = ["\n", "\n\n", "\n\n\n", "\r\n", " \n", "\n \n", "\r\n\r\n", "\t\n\n", "\u2028\n"]


def cuts_of(backend: Backend):
    return line_cuts(backend, backend.get_vocab(with_added_tokens=True))


def encoded(backend: Backend, *parts: str) -> list[int]:
    return [id for part in parts for id in backend.encode(part, add_special_tokens=False).ids]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_may_be_cut_where_it_is_said(backends, kind):
    backend = Backend.from_str(backends[kind])
    places, cut = cuts_of(backend), 0
    for lead, end, newlines, start in itertools.product(LEADS, ENDS, NEWLINES, STARTS):
        text = f"{lead}{end}{newlines}{start} and more" if start else f"{lead}{end}{newlines}"
        line = len(lead + end + newlines)
        for place in {places.at(text, line), places.last(text, len(text))} - {0}:
            cut += 1
            assert encoded(backend, text[:place], text[place:]) == encoded(backend, text), (text, place)
    assert cut > 2400


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_may_be_cut_at_each_line(backends, kind):
    backend, draw = Backend.from_str(backends[kind]), random.Random(3)
    places, pieces, cut = cuts_of(backend), [*ENDS, *STARTS, *NEWLINES, *NEWLINES, *"ab.\n", *TEXTS], 0
    for _ in range(400):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(3, 14)))
        cuts = {places.at(text, line) for line in range(len(text) + 1)} - {0}
        cut += len(cuts)
        ends = [0, *sorted(cuts), len(text)]
        parts = [text[start:stop] for start, stop in itertools.pairwise(ends)]
        assert encoded(backend, *parts) == encoded(backend, text), (text, cuts)
    assert cut > 300


def test_places_where_no_text_is_cut(backends):
    joined, gpt2, one_word = (cuts_of(Backend.from_str(backends[kind])) for kind in ("qwen2", "smollm", "gemma"))
    for text in ("a\n Text", "a\n/x", "\nText", "a", "a\n\u0301", "a\n\n/x"):
        assert [places.last(text, len(text)) for places in (joined, gpt2)] == [0, 0], text
    assert [places.last("a\n", 2) for places in (joined, gpt2)] == [2, 2]
    assert [places.last("a\n\nText", 7) for places in (joined, gpt2, one_word)] == [3, 2, 3]
    assert [places.last("a\nText", 6) for places in (joined, gpt2, one_word)] == [2, 2, 2]
    assert [places.last("a\n\n1", 4) for places in (joined, gpt2)] == [3, 0]
    assert [places.last("a\n\n<x", 5) for places in (joined, gpt2)] == [3, 0]
    assert joined.last("a\nText", 2) == 2 and joined.last("a\nText", 1) == 0
    assert joined.last("a\nb\n\n\t", 6) == 2


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
    places = cuts_of(backend)
    rng = random.Random(1)
    cut = 0
    for _ in range(20):
        texts = [text for _ in range(rng.randrange(1, 4)) for text in family(rng)]
        cut += sum(c > 0 for c in shared_cuts(texts, places))
        for text, ids in zip(texts, ours.encode_batch(texts, special=False), strict=True):
            assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert cut > 20


def test_the_shared_beginning_is_encoded_once(backends):
    ours = Tokenizer(Backend.from_str(backends["smollm"]))
    head = "\n".join(f"Text: example {i}\nLabel: positive" for i in range(100))
    texts = [f"{head}\nText: item {i}\nLabel: {label}" for i in range(20) for label in ("yes", "no", "maybe")]
    seen = 0

    def counting(batch: list[str]) -> list[np.ndarray]:
        nonlocal seen
        seen += sum(map(len, batch))
        return ours._encode_all(batch)

    ids = encode_batch(texts, counting, cuts_of(ours.backend))
    assert seen < 2 * len(head) + 20 * 3 * 40
    assert [i.tolist() for i in ids] == [ours.encode(text).tolist() for text in texts]


def test_tokenizers_whose_parts_are_not_known_are_left_alone(backends):
    def cut(change) -> bool:
        backend = Backend.from_str(backends["qwen2"])
        change(backend)
        return cuts_of(backend) is not None

    assert cut(lambda b: None)
    assert cuts_of(Backend.from_str(backends["sentencepiece"])) is None
    assert not cut(lambda b: b.add_tokens([AddedToken("x\ny")]))
    assert not cut(lambda b: b.add_tokens([AddedToken("<m>", lstrip=True)]))
    assert not cut(lambda b: setattr(b, "normalizer", normalizers.Lowercase()))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Metaspace()))
    assert not cut(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split("\n", "isolated")))
    only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not cut(lambda b: setattr(b, "pre_tokenizer", only))


def test_a_vocabulary_refuses_cuts_that_its_entries_lie_across(backends):
    spec = json.loads(backends["gemma"])
    places = cuts_of(Backend.from_str(json.dumps(spec)))
    assert places.last("a\nText", 6) == 2 and places.last("a\n{x", 6) == 2
    vocab = spec["model"]["vocab"]
    vocab["\nT"] = max(len(vocab), *(token["id"] for token in spec["added_tokens"])) + 1
    spec["model"]["merges"].append(["\n", "T"])
    backend = Backend.from_str(json.dumps(spec))
    assert cuts_of(backend).last("a\nText", 6) == 0 and cuts_of(backend).last("a\n{x", 6) == 2
    assert encoded(backend, "a\n", "Text") != encoded(backend, "a\nText")


def test_gpt2s_expression_joins_newlines_before_an_added_token(backends):
    backend = Backend.from_str(backends["smollm"])
    backend.add_tokens(["Q"])
    assert cuts_of(backend).last("a\n\nQuestion", 9) == 0 and cuts_of(backend).last("a\n\nquestion", 9) == 2
    backend.add_special_tokens([AddedToken("<r>", rstrip=True)])
    assert cuts_of(backend).last("a\n\nquestion", 9) == 0 and cuts_of(backend).last("a\nquestion", 9) == 2
