"""A text has never fewer tokens than is said of it without encoding it, and its parts begin and end as it does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import TEXTS
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from prefold.text import Tokenizer
from prefold.text.linecut import least_tokens

# What NFC joins, runs for which there may be long tokens, white space, and what some vocabularies lack.
PIECES = [
    "\u03b1\u0313\u0300\u0345",
    "\u1112\u1161\u11ab",
    " " * 40,
    "=" * 30,
    "x" * 200,
    "\n\n",
    "\x06",
    "\u3000",
    "🙂",
    "é",
]


def least(backend):
    return least_tokens(backend, backend.get_vocab(with_added_tokens=True))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "sentencepiece"])
def test_no_text_has_fewer_tokens(backends, kind):
    backend = Backend.from_str(backends[kind])
    count = least(backend)

    @given(st.lists(st.sampled_from([*TEXTS, *PIECES]), max_size=30).map("".join))
    def check(text):
        assert count.of(text) <= len(backend.encode(text, add_special_tokens=False).ids)

    check()
    assert count.of("x" * 10_000) > 50


def test_characters_that_a_vocabulary_lacks_are_not_counted(backends):
    letters = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in ("x", "Ġ")]
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert least(backend).of("x y x") == len(backend.encode("x y x").ids) == 1


def test_nothing_is_said_of_a_tokenizer_that_leaves_text_out(backends):
    def changed(change):
        backend = Backend.from_str(backends["gpt-2"])
        change(backend)
        return least(backend)

    assert changed(lambda backend: None) is not None
    for change in (
        lambda b: b.add_tokens([AddedToken("<x>", rstrip=True)]),
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda b: setattr(b, "model", models.WordLevel({"a": 0}, "a")),
    ):
        assert changed(change) is None


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["gpt-2", "qwen2", "llama-bpe", "sentencepiece"])
def test_a_part_begins_or_ends_as_the_whole_does(backends, kind, left):
    tokenizer = Tokenizer(Backend.from_str(backends[kind]))
    rng = np.random.default_rng(0)
    text = "".join(rng.choice([*TEXTS, *PIECES], 4000))
    part, whole = tokenizer.part(text, 50, left=left), tokenizer.encode(text, special=False)
    assert len(part) < len(text) / 5 and (text.endswith(part) if left else text.startswith(part))
    found = tokenizer.encode(part, special=False)
    assert np.array_equal(found[-50:], whole[-50:]) if left else np.array_equal(found[:50], whole[:50])
    assert tokenizer.part(text, 10**6) == text and tokenizer.part("yes", 1) == "yes"
