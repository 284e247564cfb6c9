"""Embedding: tokens, prompts, settings of checkpoints, and the arithmetic of the result."""

from __future__ import annotations

import json

import numpy as np
import pytest
from task_inputs import FakeCheckpoint, FakeGguf, backend, ids, result, tokenizer

from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.spec.requests import Readout
from prefold.spec.task import EmbedOptions
from prefold.tasks import EmbedSettings, EmbedTask, Inputs, embed_settings, make_task

TOK = tokenizer("$A <|endoftext|>")


def embed(**options) -> EmbedTask:
    return make_task("embed", FakeCheckpoint(), TOK, **options)


def test_tokens_are_the_text_and_its_special_tokens():
    works = embed().prepare(["ab c", {"text": "x"}, [5, 6], ["a", [7], "b"]])
    tokens = [[request.tokens.tolist() for request in work.requests] for work in works]
    assert tokens == [
        [[*ids(TOK, "ab c"), 0]],
        [[*ids(TOK, "x"), 0]],
        [[5, 6]],
        [[*ids(TOK, "a"), 0], [7], [*ids(TOK, "b"), 0]],
    ]
    assert json.loads(json.dumps([work.note for work in works])) == [work.note for work in works]


def test_an_empty_text_is_an_error_with_special_tokens_and_without():
    for task in (embed(), make_task("embed", FakeCheckpoint(), tokenizer())):
        assert [error.code for error in task.prepare(["", " \n"])] == ["empty", "empty"]


def test_results_are_cut_then_normalised():
    task = embed(dimensions=2)
    one, many, three = task.prepare(["a", ["a", "b"], {"text": "a", "dimensions": 3}])
    out = task.finish(one.note, [result(3, 4, 12, 0)])
    assert out.embedding.dtype == np.float32
    np.testing.assert_allclose(out.embedding, [0.6, 0.8], rtol=1e-6)
    assert out.num_tokens == 2
    out = task.finish(many.note, [result(3, 4, 12, 0), result(0, 0, 1, 0)])
    np.testing.assert_allclose(out.embeddings, [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert out.num_tokens == 4
    out = task.finish(three.note, [result(3, 4, 12, 0)])
    np.testing.assert_allclose(out.embedding, np.array([3, 4, 12]) / 13, rtol=1e-6)
    plain = embed(normalize=False)
    (work,) = plain.prepare(["a"])
    assert plain.finish(work.note, [result(3, 4, 12, 0)]).embedding.tolist() == [3, 4, 12, 0]


def test_prompts():
    settings = EmbedSettings(prompts={"query": "Q: ", "document": ""}, default_prompt_name="query")
    inputs = Inputs(TOK, 512)

    def text(**options) -> str:
        (work,) = EmbedTask(inputs, EmbedOptions(**options), settings).prepare(["hi"])
        return TOK.decode(work.requests[0].tokens, skip_special=True)

    assert text() == "Q: hi"
    assert text(prompt_name="document") == "hi"
    assert text(prompt="P ") == "P hi"
    assert text(prompt="") == "hi"
    assert text(instruction="Find {it}") == "Instruct: Find {it}\nQuery:hi"
    (work,) = EmbedTask(inputs, settings=settings).prepare([[9, 9]])
    assert work.requests[0].tokens.tolist() == [9, 9]
    with pytest.raises(InputError, match=r"no prompt 'passage'.*query, document"):
        EmbedTask(inputs, EmbedOptions(prompt_name="passage"), settings)
    with pytest.raises(InputError, match="prompt_name and instruction exclude"):
        EmbedTask(inputs, EmbedOptions(prompt_name="query", instruction="x"), settings)


def test_a_prompt_left_out_of_pooling_is_refused_where_it_matters():
    inputs = Inputs(TOK, 512)
    for pooling, read in (("mean", "mean"), ("first", "last")):
        settings = EmbedSettings(pooling=pooling, pool_prompt=False)
        assert EmbedTask(inputs, settings=settings).readout == Readout(read)
        for options in ({"prompt": "x"}, {"instruction": "x"}):
            with pytest.raises(UnsupportedModelError, match="include_prompt"):
                EmbedTask(inputs, EmbedOptions(**options), settings)
    assert EmbedTask(inputs, EmbedOptions(prompt="x"), EmbedSettings(pool_prompt=False)).readout == Readout("last")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("post", [None, "$A <|endoftext|>", "<|im_start|> $A <|im_end|> <|endoftext|>"])
def test_truncation_equals_transformers(post, side):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(post), truncation_side=side)
    ours = tokenizer(post, truncation_side=side)
    text = "The quick brown fox"
    for max_length in range(4, 24):
        task = make_task("embed", FakeCheckpoint(), ours, max_length=max_length, truncate=True)
        (work,) = task.prepare([text])
        expected = theirs(text, truncation=True, max_length=max_length)["input_ids"]
        assert work.requests[0].tokens.tolist() == expected
        strict = make_task("embed", FakeCheckpoint(), ours, max_length=max_length)
        fits = len(theirs(text)["input_ids"]) <= max_length
        assert isinstance(strict.prepare([text])[0], InputError) == (not fits)


def test_truncation_of_ids_and_of_nothing():
    task = make_task("embed", FakeCheckpoint(), TOK, max_length=2, truncate=True)
    (work,) = task.prepare([[5, 6, 7]])
    assert work.requests[0].tokens.tolist() == [5, 6]
    task = make_task("embed", FakeCheckpoint(), TOK, max_length=1, truncate=True)
    assert task.prepare(["abc"])[0].code == "too_long"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dimensions": 9}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"prompt": 5}, "prompt"),
        ({"instruction": "\ud800"}, "instruction"),
        ({"prompt_name": "query"}, "prompt_name"),
    ],
)
def test_bad_options(options, field):
    with pytest.raises(InputError) as caught:
        embed(**options)
    assert caught.value.field == field


def test_bad_items_name_their_field():
    task = embed()
    errors = task.prepare([{"text": "a", "dimensions": 9}, ["a", None], {"txt": "a"}, {}])
    assert [error.field for error in errors] == ["dimensions", "text[1]", "txt", "text"]


# What checkpoints say.

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def folder(modules=(TRANSFORMER, POOLING, NORMALIZE), pooling=None, **files) -> FakeCheckpoint:
    pooling = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True} if pooling is None else pooling
    files = {f"{name}.json": content for name, content in files.items()}
    return FakeCheckpoint(files={"modules.json": list(modules), "1_Pooling/config.json": pooling} | files)


def test_settings_without_modules():
    assert embed_settings(FakeCheckpoint()) == EmbedSettings("last", True, None)
    assert make_task("embed", FakeCheckpoint(), TOK).inputs.max_length == 512


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (2, "first"), (3, "last"), (0, "last"), (None, "last")])
def test_settings_of_gguf_files(kind, pooling):
    checkpoint = FakeGguf({"general.architecture": "qwen3", "qwen3.pooling_type": kind})
    assert embed_settings(checkpoint).pooling == pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "first"),
        ({}, "mean"),
    ],
)
def test_pooling_modes(config, pooling):
    assert embed_settings(folder(pooling=config)).pooling == pooling


def test_settings_of_a_sentence_transformers_folder():
    checkpoint = folder(
        sentence_bert_config={"max_seq_length": 64, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Q:", "document": None}, "default_prompt_name": "query"},
    )
    settings = embed_settings(checkpoint)
    assert settings == EmbedSettings("last", True, 64, {"query": "Q:", "document": ""}, "query", True, True)
    task = make_task("embed", checkpoint, TOK)
    assert task.inputs.max_length == 64
    (work,) = task.prepare(["ABΣ"])
    assert TOK.decode(work.requests[0].tokens, skip_special=True) == "q:abσ"
    assert not embed_settings(folder((TRANSFORMER, POOLING))).normalize
    # Octen-Embedding and F2LLM: the last token, scaled; the former has a file of Normalize.
    octen = folder(
        pooling={"pooling_mode_lasttoken": True}, **{"2_Normalize/config.json": {"normalize_embeddings": True}}
    )
    assert (embed_settings(octen).pooling, embed_settings(octen).normalize) == ("last", True)
    assert not embed_settings(folder(pooling={"include_prompt": False})).pool_prompt
    assert embed_settings(folder(sentence_bert_config={"max_seq_length": 4096})).max_length == 512
    assert embed_settings(folder(tokenizer_config={"model_max_length": 128})).max_length == 128
    assert embed_settings(folder(tokenizer_config={"model_max_length": 1e30})).max_length == 512
    assert make_task(
        "embed", checkpoint, TOK, max_length=32, pooling="mean", normalize=False
    ).settings == EmbedSettings("mean", False, 64, settings.prompts, "query", True, True)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (folder((TRANSFORMER, POOLING, DENSE)), "Transformer, Pooling, Dense"),
        (folder((TRANSFORMER,)), "modules Transformer;"),
        (folder((TRANSFORMER, POOLING, NORMALIZE, DENSE)), "Dense"),
        (folder(({**TRANSFORMER, "path": "0_T"}, POOLING)), "'0_T'"),
        (folder(pooling={"pooling_mode_max_tokens": True}), "pools by max_tokens"),
        (folder(pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}), "cls and mean"),
        (folder(pooling={"pooling_mode": "weightedmean"}), "weightedmean"),
        (folder(sentence_bert_config={"transformer_task": "text-generation"}), "text-generation"),
    ],
)
def test_checkpoints_that_are_refused(checkpoint, message):
    with pytest.raises(UnsupportedModelError, match=message):
        embed_settings(checkpoint)


def test_a_missing_pooling_config():
    checkpoint = folder()
    del checkpoint.files["1_Pooling/config.json"]
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json"):
        embed_settings(checkpoint)
