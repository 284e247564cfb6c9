"""Tokenizers against transformers, from folders and from GGUF metadata."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import TEXTS, FolderCheckpoint, GgufCheckpoint, gguf_metadata
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.text import Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

ANY_TEXT = st.text(
    st.one_of(
        st.sampled_from(list("aAzZ09 \t\n\r.,'/<>|_eé́日本😀½")),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


def write_folder(path, backend: str | Backend, config: dict, model_type: str = "llama") -> FolderCheckpoint:
    path.mkdir(exist_ok=True)
    text = backend if isinstance(backend, str) else backend.to_str()
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return FolderCheckpoint(path)


def assert_equal(ours: Tokenizer, theirs, texts) -> None:
    for special in (True, False):
        batch = ours.encode_batch(texts, special)
        for text, ids in zip(texts, batch, strict=True):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert ids.dtype == np.int32
            assert ids.tolist() == expected, text
            assert ours.encode(text, special).tolist() == expected, text


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "sentencepiece"])
def test_a_folder_equals_auto_tokenizer(tmp_path, backends, kind):
    config = CONFIG if kind != "sentencepiece" else CONFIG | {"eos_token": "</s>", "bos_token": "<s>"}
    checkpoint = write_folder(tmp_path, backends[kind], config)
    ours, theirs = load_tokenizer(checkpoint), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(ours, theirs, TEXTS)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.bos_id == theirs.bos_token_id
    assert ours.pad_id == theirs.pad_token_id

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(ANY_TEXT)
    def check(text):
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]

    check()


def test_qwen_class_and_trailing_token_equal_auto_tokenizer(tmp_path, backends):
    backend = Backend.from_str(backends["qwen2"])
    backend.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config |= {"bos_token": None, "add_bos_token": False, "model_max_length": 131072}
    ours = load_tokenizer(write_folder(tmp_path, backend, config, "qwen3"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(ours, theirs, TEXTS)
    assert ours.suffix_ids.tolist() == [0]
    assert ours.prefix_ids.tolist() == []
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (None, 2, 0)
    assert ours.max_length == 131072


def test_what_the_post_processor_adds_on_both_sides(tmp_path, backends):
    backend = Backend.from_str(backends["llama-bpe"])
    names = [("<|im_start|>", 1), ("<|im_end|>", 2), ("<|endoftext|>", 0)]
    backend.post_processor = TemplateProcessing(single="<|im_start|> <|endoftext|> $A <|im_end|>", special_tokens=names)
    ours = load_tokenizer(write_folder(tmp_path, backend, CONFIG))
    assert ours.prefix_ids.tolist() == [1, 0]
    assert ours.suffix_ids.tolist() == [2]
    assert_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), [*TEXTS, "<|im_start|>"])


@pytest.mark.parametrize("post_processor", [None, "<|im_start|> $A"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_token_follows_transformers(tmp_path, backends, post_processor, add_bos):
    backend = Backend.from_str(backends["llama-bpe"])
    if post_processor:
        backend.post_processor = TemplateProcessing(single=post_processor, special_tokens=[("<|im_start|>", 1)])
    config = CONFIG | {"bos_token": "<|im_start|>", "add_bos_token": add_bos}
    ours = load_tokenizer(write_folder(tmp_path, backend, config))
    assert_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), TEXTS)


def test_tokens_that_only_the_configuration_names_are_added(tmp_path, backends):
    flags = ("normalized", "rstrip", "single_word")
    config = CONFIG | {
        "pad_token": "[PAD]",
        "additional_special_tokens": ["<extra>", "the"],
        "added_tokens_decoder": {
            "900": {"content": "<late>", "lstrip": True, "special": False} | dict.fromkeys(flags, False)
        },
    }
    ours = load_tokenizer(write_folder(tmp_path, backends["gpt-2"], config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(ours, theirs, [*TEXTS, "a [PAD] b <extra>c the other <late> d\n <late>", "[PAD]"])
    assert ours.pad_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)


def test_special_tokens_map_and_generation_config_fill_in(tmp_path, backends):
    checkpoint = write_folder(tmp_path, backends["gpt-2"], {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "bos_token_id": 2}))
    ours = load_tokenizer(checkpoint)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, None)


def test_a_null_token_stays_absent(tmp_path, backends):
    checkpoint = write_folder(tmp_path, backends["gpt-2"], CONFIG | {"bos_token": None})
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0}))
    assert load_tokenizer(checkpoint).bos_id is None


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path, backends):
    backend = Backend.from_str(backends["gpt-2"])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    ours = load_tokenizer(write_folder(tmp_path, backend, CONFIG))
    plain = Backend.from_str(backends["gpt-2"])
    text = "the quick brown fox jumps over"
    assert len(ours.encode(text)) > 4
    assert ours.encode(text).tolist() == plain.encode(text).ids
    assert [len(ids) for ids in ours.encode_batch(["a", text])] == [1, len(ours.encode(text))]


def test_split_special_tokens(tmp_path, backends):
    ours = load_tokenizer(write_folder(tmp_path, backends["gpt-2"], CONFIG | {"split_special_tokens": True}))
    assert_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), ["a<|im_end|>b <think>"])
    assert 2 not in ours.encode("a<|im_end|>b")


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(FolderCheckpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(FolderCheckpoint(tmp_path))


# GGUF. The oracle is the tokenizer.json the metadata was made from: same pre-tokenizer, same flags.


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_gguf_metadata_give_the_tokenizer_they_were_made_from(backends, kind):
    backend = Backend.from_str(backends[kind])
    ours = load_tokenizer(GgufCheckpoint(gguf_metadata(backend, kind, ggml_add_bos_token=False)))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert_equal(ours, theirs, TEXTS)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (1, 2, None)
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

    @settings(max_examples=60)
    @given(ANY_TEXT)
    def check(text):
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]

    check()


@pytest.mark.parametrize(
    ("kind", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"ggml_add_bos_token": True}, [1], []),
        ("qwen2", {"ggml_add_eos_token": True}, [], [2]),
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"ggml_add_bos_token": False}, [], []),
    ],
)
def test_gguf_flags_for_bos_and_eos(backends, kind, flags, before, after):
    ours = load_tokenizer(GgufCheckpoint(gguf_metadata(Backend.from_str(backends[kind]), kind, **flags)))
    assert ours.prefix_ids.tolist() == before
    assert ours.suffix_ids.tolist() == after
    assert ours.encode("a dog").tolist() == [*before, *ours.encode("a dog", special=False), *after]


@pytest.mark.parametrize(
    ("kind", "whole"), [("llama-bpe", True), ("tekken", True), ("smollm", False), ("qwen2", False)]
)
def test_words_that_no_merge_gives(backends, kind, whole):
    """Llama 3 and Tekken take a word that is in the vocabulary before any merge."""
    metadata = gguf_metadata(Backend.from_str(backends[kind]), kind, ggml_add_bos_token=False)
    word = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "qzxj"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert (load_tokenizer(GgufCheckpoint(metadata)).encode("qzxj").tolist() == [word]) == whole


def test_gguf_unused_tokens_are_no_text(backends):
    metadata = gguf_metadata(Backend.from_str(backends["llama-bpe"]), "llama-bpe")
    unused = len(metadata["tokenizer.ggml.tokens"]) - 2
    assert unused not in load_tokenizer(GgufCheckpoint(metadata)).encode("[PAD0]")


@pytest.mark.parametrize(("key", "value"), [("model", "t5"), ("model", "bert"), ("pre", "gemma4"), ("model", None)])
def test_gguf_tokenizers_of_other_kinds_are_refused(backends, key, value):
    metadata = gguf_metadata(Backend.from_str(backends["gpt-2"]), "gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(UnsupportedModelError, match=r"byte-level BPE.*smollm"):
        load_tokenizer(GgufCheckpoint(metadata))


def test_a_gguf_file_that_does_not_name_its_pre_tokenizer_is_told(backends):
    """llama.cpp, too, takes it for GPT-2's, and says so."""
    backend = Backend.from_str(backends["gpt-2"])
    with pytest.warns(RuntimeWarning, match=r"has no tokenizer\.ggml\.pre, so texts are split like GPT-2") as told:
        tokenizer = load_tokenizer(GgufCheckpoint(gguf_metadata(backend, None)))
    assert len(told) == 1 and "\n" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = load_tokenizer(GgufCheckpoint(gguf_metadata(backend, "gpt-2")))
    assert [tokenizer.encode(text).tolist() for text in TEXTS] == [named.encode(text).tolist() for text in TEXTS]


def test_gguf_broken_metadata(backends):
    metadata = gguf_metadata(Backend.from_str(backends["gpt-2"]), "gpt-2")
    with pytest.raises(CheckpointError, match="missing or of different lengths"):
        load_tokenizer(GgufCheckpoint(metadata | {"tokenizer.ggml.token_type": [1, 2]}))
    with pytest.raises(CheckpointError, match="do not fit each other"):
        load_tokenizer(GgufCheckpoint(metadata | {"tokenizer.ggml.merges": ["zz qq"]}))


def test_text_that_is_none(backends):
    ours = Tokenizer(Backend.from_str(backends["gpt-2"]))
    with pytest.raises(InputError, match="surrogate") as caught:
        ours.encode("abc\ud800")
    assert caught.value.code == "invalid_utf8"
    with pytest.raises(InputError, match=r"texts\[1\]") as caught:
        ours.encode_batch(["a", "b\udfff"])
    assert caught.value.field == "texts[1]"
    with pytest.raises(InputError, match="of type int"):
        ours.encode(5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="null"):
        ours.encode(None)  # type: ignore[arg-type]
    assert ours.encode_batch([]) == []


def test_decode_and_token_id(backends):
    ours = Tokenizer(Backend.from_str(backends["smollm"]))
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("a<|im_end|>"), skip_special=True) == "a"
    assert ours.token_id("<|im_end|>") == 2
    assert ours.token_id("no such token") is None


def test_smollm2_from_its_gguf_file():
    """The real vocabulary; its Hugging Face tokenizer is Sequence[Digits(individual), ByteLevel], no normaliser."""
    checkpoint = pytest.importorskip("prefold.checkpoint")
    try:
        source = checkpoint.resolve("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    tokens, merges = (source.metadata(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens[:17]])
    ours = load_tokenizer(source)
    assert_equal(ours, transformers.PreTrainedTokenizerFast(tokenizer_object=backend), TEXTS)
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.vocab_size) == (1, 2, 2, 49152)
    assert ours.token_id("<|im_start|>") == 1
    chat = ours.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
