"""LoRA adapters of the methods whose answers are numbers: one for all, one a text, and the errors."""

from __future__ import annotations

import numpy as np
import pytest
from adapters import write_adapter
from tiny import tiny_checkpoint

from prefold import LLM, InputError


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    names = {name: str(write_adapter(folder.parent / name, folder, seed=i)) for i, name in enumerate("ab")}
    return LLM(str(folder), dtype="float32", device="cpu", adapters=names)


TEXTS = ["yes no", "the cat", "yes no the"]
NAMES = ["a", None, "b"]
LABELS = ["yes", "a long one"]


def test_embed(llm):
    whole = {name: llm.embed(TEXTS, adapter=name) for name in NAMES}
    assert np.abs(whole["a"] - whole[None]).max() > 0.01 < np.abs(whole["a"] - whole["b"]).max()
    np.testing.assert_array_equal(whole[None], llm.embed(TEXTS))
    mixed = llm.embed(TEXTS, adapter=NAMES)
    for i, name in enumerate(NAMES):
        np.testing.assert_allclose(mixed[i], whole[name][i], atol=1e-5)
        np.testing.assert_allclose(llm.embed(TEXTS[i], adapter=name), whole[name][i], atol=1e-5)


def test_rerank(llm):
    plain, tuned = (llm.rerank("yes", TEXTS, adapter=name).scores for name in (None, "a"))
    assert np.abs(plain - tuned).max() > 1e-4
    np.testing.assert_allclose(tuned[1], llm.rerank("yes", TEXTS[1:2], adapter="a").scores[0], atol=1e-5)


@pytest.mark.parametrize("calibrate", [False, True])
def test_classify(llm, calibrate):
    options = {"labels": LABELS, "calibrate": calibrate}
    one = llm.classify(TEXTS[0], adapter="b", **options).probabilities
    assert one != llm.classify(TEXTS[0], **options).probabilities
    if calibrate:
        with pytest.raises(InputError, match="item 0 of texts: the labels were calibrated with no adapter, not 'a'"):
            llm.classify(TEXTS, adapter=NAMES, **options)
        return
    for i, (name, found) in enumerate(zip(NAMES, llm.classify(TEXTS, adapter=NAMES, **options), strict=True)):
        alone = llm.classify(TEXTS[i], adapter=name, **options)
        assert found.probabilities == pytest.approx(alone.probabilities, abs=1e-5)


def test_score(llm):
    texts = llm.score(TEXTS, adapter=NAMES)
    pairs = llm.score(TEXTS, [" no"] * 3, adapter=NAMES)
    lists = llm.score(TEXTS, [[" no", " the"]] * 3, adapter=NAMES)
    for i, name in enumerate(NAMES):
        assert texts[i].logprob == pytest.approx(llm.score(TEXTS[i], adapter=name).logprob, abs=1e-4)
        alone = llm.score(TEXTS[i], [" no", " the"], adapter=name)
        assert [s.logprob for s in lists[i]] == pytest.approx([s.logprob for s in alone], abs=1e-4)
        assert pairs[i].logprob == pytest.approx(alone[0].logprob, abs=1e-4)
    assert texts[0].logprob != pytest.approx(llm.score(TEXTS[0]).logprob, abs=1e-3)


def test_adapters_that_are_wrong(llm):
    def classify(texts, **options):
        return llm.classify(texts, LABELS, **options)

    for call in (llm.embed, llm.score, classify, lambda texts, **options: llm.rerank("q", texts, **options)):
        with pytest.raises(InputError, match=r"no adapter 'c'; the adapters that are loaded: a, b"):
            call(TEXTS, adapter="c")
    for call in (llm.embed, llm.score, classify):
        with pytest.raises(InputError, match="list of 1, for 3"):
            call(TEXTS, adapter=["a"])
        with pytest.raises(InputError, match=r"item 1 of \w+: there is no adapter 'c'"):
            call(TEXTS, adapter=["a", "c", None])
    with pytest.raises(InputError, match="adapter is of type list"):
        llm.rerank("yes", TEXTS, adapter=["a"] * 3)
    found = llm.embed(TEXTS, adapter=["a", "c", None], errors="return")
    assert [isinstance(one, InputError) for one in found] == [False, True, False]
