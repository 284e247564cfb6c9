"""SentencePiece BPE out of a GGUF file's pieces, against its algorithm done by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CORPUS, TEXTS, GgufCheckpoint, sentencepiece

from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.text import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = [(f"<0x{i:02X}>", BYTE) for i in range(256)]
WORDS = ["he", "re", "er", "the", "her", "here", "there", "aa", "aaa", "ab", "aba", "▁a", "▁the", "a▁"]
WORDS += ["0x", "<0x4", "<0x41>x"]
DEFINED = ["\n", "\n\n", "\n\n\n", "\t", "▁▁", "▁▁▁", "▁▁▁▁", "<b>", "</b>"]


def pieces_of() -> list[tuple[str, int]]:
    """Controls, then what a user defined, bytes, words by rank, and letters; as Gemma's are laid out."""
    specials = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN), ("<turn>", CONTROL)]
    letters = sorted({c for c in "▁" + "".join(WORDS)})
    words = [(w, NORMAL) for w in [*WORDS, *letters]]
    return [*specials, *((d, USER_DEFINED) for d in DEFINED), *BYTES, *words]


def gguf(pieces: list[tuple[str, int]], **more) -> GgufCheckpoint:
    order = iter(range(len(pieces)))
    metadata = {
        "model": "llama",
        "pre": "default",
        # The converter writes the spaces of user-defined tokens as spaces, and -1000 for what has no score.
        "tokens": [p.replace("▁", " ") if kind == USER_DEFINED else p for p, kind in pieces],
        "scores": [-float(next(order)) if kind == NORMAL else -1000.0 for _, kind in pieces],
        "token_type": [kind for _, kind in pieces],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_space_prefix": False,
    } | more
    return GgufCheckpoint({f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None})


def by_hand(pieces: list[tuple[str, int]], text: str) -> list[int]:
    """Split off what the user defined, longest first; then join the best neighbours, the leftmost of equals."""
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    ranks = {piece: i for i, (piece, kind) in enumerate(pieces) if kind == NORMAL}
    defined = sorted((p for p, kind in pieces if kind == USER_DEFINED), key=len, reverse=True)
    text = text.replace(" ", "▁")
    symbols: list[tuple[str, bool]] = []  # and whether it may be joined
    while text:
        match = next((d for d in defined if text.startswith(d)), None)
        symbols.append((match or text[0], match is None))
        text = text[len(symbols[-1][0]) :]
    while True:
        pairs = [
            (ranks[a + b], i)
            for i, ((a, free), (b, also_free)) in enumerate(pairwise(symbols))
            if free and also_free and a + b in ranks
        ]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [(symbols[i][0] + symbols[i + 1][0], True)]
    found = []
    for symbol, _ in symbols:
        known = symbol in ids and pieces[ids[symbol]][1] != BYTE
        found += [ids[symbol]] if known else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(gguf(pieces_of()))


ALPHABET = st.sampled_from([*"there ab\n\t<>/x04é😀▁", "  ", "<b>", "aa", "\n\n", "<0x41>"])


@settings(max_examples=400)
@given(st.lists(ALPHABET, max_size=30).map("".join))
def test_as_by_hand(tokenizer, text):
    pieces = pieces_of()
    ids = tokenizer.encode(text, special=False).tolist()
    assert ids == by_hand(pieces, text)
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 1, 0)
    assert tokenizer.prefix_ids.tolist() == [2]
    turn = tokenizer.token_id("<turn>")
    assert tokenizer.encode("a<turn>").tolist() == [2, tokenizer.token_id("a"), turn]
    assert tokenizer.decode([2, turn], skip_special=True) == ""
    assert load_tokenizer(gguf(pieces_of(), add_bos_token=False)).prefix_ids.size == 0


@pytest.mark.parametrize("text", [*TEXTS, *CORPUS[:5]])
def test_with_a_space_before_the_text_as_llama_2_has_it(text):
    """The oracle is the tokenizer.json of such a tokenizer, whose merges are in the order of their pieces."""
    backend = sentencepiece()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | dict(BYTES)
    pieces = [(piece, kinds.get(piece, NORMAL)) for piece, _ in vocab]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": None}
    ours = load_tokenizer(gguf(pieces, add_space_prefix=None, **ids))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert ours.encode(text).tolist() == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text, special=False)) == text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": None}, "of different lengths"),
        ({"scores": [0.0]}, "of different lengths"),
        ({"token_type": [1]}, "of different lengths"),
    ],
)
def test_broken_metadata(more, message):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(gguf(pieces_of(), **more))


@pytest.mark.parametrize("key", ["precompiled_charsmap", "remove_extra_whitespaces"])
def test_normalisers_are_refused(key):
    with pytest.raises(UnsupportedModelError, match=key):
        load_tokenizer(gguf(pieces_of(), **{key: [1]}))
