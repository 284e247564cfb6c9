"""The Python face, on tiny random checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.errors import InputError, PrefoldError
from prefold.spec.model import GROUPS, ModelSpec, model_fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("llm"), "qwen2")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", device="cpu")


def test_embed_is_the_normalised_last_hidden_state(llm, folder):
    texts = ["the cat", "the cat sat", "no"]
    found = llm.embed(texts)
    model = reference(folder)
    for text, vector in zip(texts, found, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([llm.tokenizer.encode(text).tolist()])
            state = model.model(input_ids=ids).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-5)
    np.testing.assert_allclose(llm.embed(texts[1]), found[1], atol=1e-6)
    assert llm.embed(texts, dimensions=5).shape == (3, 5)
    assert llm.embed([]).shape == (0, 36)


def test_score_sums_to_what_transformers_says(llm, folder):
    prompt, continuation = "the cat", " sat on the mat"
    score = llm.score(prompt, continuation)
    ids = llm.tokenizer.encode(prompt + continuation).tolist()
    start = len(llm.tokenizer.encode(prompt))
    with torch.inference_mode():
        logprobs = reference(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    assert score.logprob == pytest.approx(sum(expected), abs=1e-3)
    rolling = llm.score(prompt + continuation)
    assert len(rolling.logprobs) == len(ids)


def test_rerank_orders_by_score(llm):
    ranking = llm.rerank("the", ["no", "yes", "the yes"], top_n=2)
    assert ranking.scores.shape == (3,)
    assert ranking.order == np.argsort(-ranking.scores, kind="stable")[:2].tolist()


def test_classify_compares_label_likelihoods(llm):
    labels = ["yes", "no", "perhaps not"]
    texts = ["the cat", "a dog"]
    examples = [("the mat", "yes"), ("a log", "no")]
    found = llm.classify(texts, labels, instructions="Say yes or no.", examples=examples)
    for text, one in zip(texts, found, strict=True):
        prompt = f"Say yes or no.\n\nText: the mat\nLabel: yes\n\nText: a log\nLabel: no\n\nText: {text}\nLabel:"
        scores = np.array([llm.score(prompt, " " + label).logprob for label in labels])
        expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        np.testing.assert_allclose(list(one.probabilities.values()), expected, atol=1e-4)
        assert one.label == labels[int(scores.argmax())]


def test_calibration_divides_by_what_the_model_says_of_nothing(llm):
    plain = llm.classify("the cat", ["yes", "no"])
    calibrated = llm.classify("the cat", ["yes", "no"], calibrate=True)
    empty = llm.classify(["N/A", "[MASK]"], ["yes", "no"])
    assert plain.probabilities != calibrated.probabilities
    assert sum(calibrated.probabilities.values()) == pytest.approx(1.0)
    assert len(empty) == 2


def test_a_classification_head(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3)
    llm = LLM(str(folder), dtype="float32", device="cpu")
    found = llm.classify(["the cat", "no"])
    model = reference(folder, head="classifier")
    for text, one in zip(["the cat", "no"], found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([llm.tokenizer.encode(text).tolist()])).logits[0]
        np.testing.assert_allclose(list(one.probabilities.values()), logits.softmax(-1), atol=1e-4)


def test_token_ids_and_stats(llm):
    before = llm.stats.tokens
    np.testing.assert_allclose(llm.embed([[5, 6, 7], [5, 6, 8]])[0], llm.embed([5, 6, 7]), atol=1e-6)
    assert llm.stats.tokens == before + 9
    assert type(llm.stats.requests) is int and type(llm.stats.tokens) is int  # JSON takes no other whole numbers


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"sharing": "some"}, "sharing"),
        ({"max_batch_rows": 0}, "max_batch_rows"),
        ({"threads": 0}, "threads"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "tpu9"}, "device"),
        ({"looped": {"exits": "leave"}}, "exits is 'leave'"),
    ],
)
def test_bad_arguments_name_themselves_before_the_model_is_looked_for(arguments, word):
    with pytest.raises(InputError, match=word):
        LLM("nothing-of-the-kind", **arguments)


def test_help_says_what_each_option_means():
    page = " ".join(LLM.__doc__.split())
    for name, option in model_fields(ModelSpec, *GROUPS.values()).items():
        assert f"{name} {' '.join(option.metadata['doc'].split())}" in page


def test_bad_items_name_themselves(llm):
    with pytest.raises(InputError, match="item 1"):
        llm.embed(["fine", None])
    with pytest.raises(InputError, match="limit is 512"):
        llm.embed([[5] * 600])
    with pytest.raises(InputError, match="vocabulary"):
        llm.embed([[5, 100_000]])
    with pytest.raises(InputError, match="continuations"):
        llm.score(["a", "b"], ["c"])
    with pytest.raises(PrefoldError, match="there is no model"):
        LLM("nothing-of-the-kind")


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0}, {"max_running": 0}, {"kv_memory": 0}, {"exits": "early"},
        {"cache": "mru"}, {"tensor_parallel": 0}, {"sharing": "some"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_a_wrong_argument_is_refused_before_a_model_is_looked_for(wrong):
    """Else the error would be that there is no such model."""
    threads = torch.get_num_threads()
    with pytest.raises(InputError) as caught:
        LLM("nothing-of-the-kind", **{"threads": threads + 1, **wrong})
    assert caught.value.field == next(iter(wrong))
    assert torch.get_num_threads() == threads
