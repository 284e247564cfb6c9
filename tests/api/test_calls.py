"""What may be handed to the methods of LLM, what comes back, and what is said of what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from adapters import write_adapter
from tiny import tiny_checkpoint

import prefold
from prefold import LLM, InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("calls"), "llama")


@pytest.fixture(scope="module")
def llm(folder, tmp_path_factory):
    adapter = write_adapter(tmp_path_factory.mktemp("adapter") / "a", folder, seed=1)
    return LLM(str(folder), dtype="float32", device="cpu", kv_memory=1 << 22, adapters={"a": str(adapter)})


SHORT = {"max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("depth", [300, 900])
def test_a_schema_that_is_too_deep_is_refused(llm, depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    with pytest.raises(InputError, match="recursion"):
        llm.generate("a", response_format=wanted, **SHORT)


@pytest.mark.parametrize("value", [None, 5, 2.5, True, b"yes", object(), np.array(3)])
def test_what_is_no_text_is_said_of_the_argument(llm, value):
    for method, argument in ((llm.generate, "prompts"), (llm.embed, "texts"), (llm.score, "prompts")):
        with pytest.raises(InputError, match=argument) as caught:
            method(value)
        assert caught.value.field == argument
    with pytest.raises(InputError, match="texts"):
        llm.classify(value, ["yes", "no"])
    with pytest.raises(InputError, match="documents"):
        llm.rerank("yes", value)
    with pytest.raises(InputError, match="messages"):
        llm.chat(value)
    with pytest.raises(InputError):
        llm.stream(value)
    with pytest.raises(InputError):
        llm.rerank(value, ["yes"])


@pytest.mark.parametrize("value", [["a"], [["a"]], [None], ["a", 5], {"no": 1}])
def test_what_is_no_text_is_said_of_the_item(llm, value):
    for method in (llm.embed, llm.score, llm.generate, lambda v: llm.classify(v, ["yes", "no"])):
        with pytest.raises(InputError, match="item 1"):
            method(["fine", value])


def test_a_list_of_lists_is_no_list_of_texts(llm):
    with pytest.raises(InputError, match="a list instead of one text"):
        llm.embed([["a"]])
    with pytest.raises(InputError, match="one text"):
        llm.rerank("yes", "no")
    with pytest.raises(InputError, match="empty"):
        llm.rerank("yes", [])
    with pytest.raises(InputError, match="query is a list of 2 texts; give one query") as caught:
        llm.rerank(["yes", "no"], [["a"], ["b"]])
    assert caught.value.field == "query"


def test_an_option_that_an_llm_does_not_have_is_named_with_the_near_one():
    with pytest.raises(InputError, match="LLM has no option 'quantization'; it has: model, tokenizer, ") as caught:
        LLM("smollm2-135m", quantization="awq")
    assert caught.value.field == "quantization"
    with pytest.raises(InputError, match="LLM has no option 'max_batch_row'; did you mean max_batch_rows"):
        LLM("smollm2-135m", max_batch_row=3)


def test_tensors_and_arrays_of_ids(llm):
    ids = [5, 6, 7]
    expected = llm.generate(ids, **SHORT).tokens
    for one in (torch.tensor(ids), np.array(ids), tuple(ids)):
        assert llm.generate(one, **SHORT).tokens == expected
        assert llm.generate([one, [9]], **SHORT)[0].tokens == expected
        np.testing.assert_allclose(llm.embed(one), llm.embed(ids), atol=1e-6)
    both = llm.embed(torch.tensor([ids, ids]))
    assert both.shape[0] == 2


def test_internal_options_are_no_options(llm):
    for options in ({"adapters": ["a"]}, {"inputs": 1}, {"context": 5}):
        with pytest.raises(InputError, match="no option") as caught:
            llm.generate("yes", **options)
        assert "adapters" not in str(caught.value).replace("'adapters'", "").split("it has:")[1]
    with pytest.raises(InputError, match="did you mean max_tokens"):
        llm.generate("yes", max_tokns=3)


def test_an_adapter_for_each_prompt(llm):
    base, tuned = (llm.generate("yes no", adapter=name, **SHORT).tokens for name in (None, "a"))
    assert base != tuned
    found = llm.generate(["yes no"] * 3, adapter=["a", None, "a"], **SHORT)
    assert [one.tokens for one in found] == [tuned, base, tuned]
    items = [{"prompt": "yes no", "adapter": "a"}, "yes no"]
    assert [one.tokens for one in llm.generate(items, **SHORT)] == [tuned, base]
    assert llm.generate(items[0], **SHORT).tokens == tuned
    chats = [[{"role": "user", "content": "yes"}]] * 2
    mixed = llm.chat(chats, adapter=[None, "a"], **SHORT)
    assert mixed[0].tokens != mixed[1].tokens
    with pytest.raises(InputError, match="list of 1, for 2 prompts"):
        llm.generate(["yes", "no"], adapter=["a"])
    with pytest.raises(InputError, match="one prompt"):
        llm.generate("yes", adapter=["a"])
    with pytest.raises(InputError, match="there is no adapter 'b'"):
        llm.generate(["yes"], adapter=["b"])


def test_score_takes_lists_of_continuations(llm):
    one, two, three = (llm.score("yes", text).logprob for text in (" no", " the", " cat"))
    found = llm.score("yes", [" no", " the", " cat"])
    assert [s.logprob for s in found] == pytest.approx([one, two, three], abs=1e-5)
    nested = llm.score(["yes", "no"], [[" no", " the"], [" cat"]])
    assert [len(scores) for scores in nested] == [2, 1]
    assert [s.logprob for s in nested[0]] == pytest.approx([one, two], abs=1e-5)
    paired = llm.score(["yes", "yes"], [" no", " the"])
    assert [s.logprob for s in paired] == pytest.approx([one, two], abs=1e-5)
    ids = llm.score([5, 6], [[7, 8], [9]])
    assert [len(s.logprobs) for s in ids] == [2, 1]
    assert len(llm.score([5, 6], [7, 8, 9]).logprobs) == 3
    assert llm.score("yes", []) == []
    with pytest.raises(InputError, match="2 prompts and one continuation"):
        llm.score(["yes", "no"], " the")
    with pytest.raises(InputError, match="some continuations are lists"):
        llm.score(["yes", "no"], [[" the"], " cat"])


def test_bad_items_are_given_back_among_the_good_ones(llm):
    long = [5] * 600
    texts = ["yes", None, long, "no"]
    vectors = llm.embed(texts, errors="return")
    assert [isinstance(one, InputError) for one in vectors] == [False, True, True, False]
    np.testing.assert_allclose(vectors[3], llm.embed("no"), atol=1e-6)
    labels = llm.classify(texts, ["yes", "no"], errors="return")
    assert labels[0].label and isinstance(labels[2], InputError) and labels[3].label
    scores = llm.score(texts, errors="return")
    assert scores[0].logprob < 0 and isinstance(scores[1], InputError)
    nested = llm.score(["yes", "no"], [[" no", None], [" the"]], errors="return")
    assert isinstance(nested[0][1], InputError) and nested[1][0].logprob < 0
    answers = llm.generate(texts, errors="return", **SHORT)
    assert answers[0].text and isinstance(answers[1], InputError) and answers[3].text
    alone = llm.rerank("yes", ["no", "the"])
    ranking = llm.rerank("yes", ["no", None, "the", long], errors="return")
    np.testing.assert_allclose(ranking.scores[[0, 2]], alone.scores, atol=1e-6)
    assert np.isnan(ranking.scores[[1, 3]]).all() and sorted(ranking.errors) == [1, 3]
    assert ranking.order == [[0, 2][i] for i in alone.order]
    assert isinstance(llm.embed(None if False else [None], errors="return")[0], InputError)
    with pytest.raises(InputError, match="errors"):
        llm.embed("yes", errors="ignore")
    small = LLM(str(llm.checkpoint.path), dtype="float32", kv_memory=20_000)
    found = small.generate([[5] * 300, "yes"], errors="return", max_tokens=10)
    assert isinstance(found[0], InputError) and found[1].text is not None  # found out when it was to run


def test_a_ranking_is_finished_once_and_names_documents_that_are_not_finite(llm, monkeypatch):
    task, calls = llm.task("rerank"), []
    margins = {1: 0.5, 2: float("nan"), 3: 2.0}
    monkeypatch.setattr(task, "_margin", lambda result: calls.append(result) or margins[len(calls)])
    ranking = llm.rerank("yes", ["no", "the", "no no"], errors="return", top_n=2)
    assert len(calls) == 3
    assert ranking.order == [2, 0] and [*ranking.errors] == [1] and ranking.errors[1].code == "not_finite"
    assert np.isnan(ranking.scores).tolist() == [False, True, False] and ranking.num_tokens > 0
    calls.clear()
    with pytest.raises(InputError, match="not a finite number") as caught:
        llm.rerank("yes", ["no", "the", "no no"])
    assert "item 1 of documents" in str(caught.value)


def test_remedies_name_the_option(llm):
    for method in (llm.embed, llm.generate, lambda v, **o: llm.classify(v, ["yes", "no"], **o)):
        with pytest.raises(InputError, match="truncate=True") as caught:
            method([5] * 600)
        assert "--truncate" in str(caught.value)
        assert method([5] * 600, truncate=True) is not None
    with pytest.raises(InputError, match="truncate=True"):
        llm.score([5] * 600, [6])
    with pytest.raises(InputError, match="truncate=True"):
        llm.rerank("yes", ["no " * 600])


def test_results_are_read_and_written(llm):
    one = llm.generate("yes", **SHORT)
    assert (
        repr(one).startswith(f"Generated({one.text!r}") and "6 tokens" in repr(one) and str(one.tokens) not in repr(one)
    )
    ranking = llm.rerank("yes", ["no", "the", "yes"], top_n=2)
    assert len(ranking) == 2
    assert list(ranking) == [(i, ranking.scores[i]) for i in ranking.order]
    logged = llm.generate("yes", logprobs=1, **SHORT)
    for result in (one, logged, ranking, llm.score("yes", " no"), llm.classify("yes", ["yes", "no"]), llm.stats):
        assert json.loads(json.dumps(result.to_dict()))
    assert json.loads(json.dumps(one.to_dict()))["text"] == one.text
    assert "tokens" in repr(llm.score("yes", " no"))
    assert "rows computed" in str(llm.stats) and "saved" in str(llm.stats)
    assert f"{llm.config.layers} layers of {llm.config.hidden}" in repr(llm) and "float32 on cpu" in repr(llm)


def test_n_gives_lists(llm):
    assert len(llm.generate("yes", n=1, **SHORT)) == 1
    assert len(llm.generate(["yes"], n=2, temperature=1.0, **SHORT)[0]) == 2


def test_a_progress_bar(llm, capsys):
    plain = llm.classify(["yes", "no"], ["yes", "no"])
    shown = llm.classify(["yes", "no"], ["yes", "no"], progress=True)
    assert [one.label for one in shown] == [one.label for one in plain]
    printed = capsys.readouterr()
    assert "classify" in printed.err and "4/4" in printed.err and not printed.out


def test_tasks_are_kept_by_their_options(llm, monkeypatch):
    llm.embed("yes")
    llm.classify("yes", ["yes", "no"], calibrate=True)
    requests = llm.stats.requests
    read = []
    monkeypatch.setattr(type(llm.checkpoint), "read_json", lambda self, name: read.append(name))
    llm.embed("no")
    llm.classify("no", ["yes", "no"], calibrate=True)
    assert not read and llm.stats.requests <= requests + 3  # no second calibration
    assert llm.embed("no", normalize=True) is not None and read
    assert llm.task("embed", dimensions=1) is llm.task("embed", dimensions=1)
    with pytest.raises(InputError, match="dimensions"):
        llm.task("embed", dimensions=True)  # equal to 1, and not the same


def test_pinned_prompts_stay(folder):
    with LLM(str(folder), dtype="float32", kv_memory=1 << 20, cache=prefold.CacheOptions(min_overlap=0)) as llm:
        assert llm.pin("yes no the") == 0
        llm.generate("yes no the", **SHORT)
        size = len(llm.tokenizer.encode("yes no the"))
        assert llm.pin("yes no the") == size
        llm.cache.clear()
        assert llm.generate("yes no the", **SHORT).cached_tokens == size
        assert llm.pin("yes no the", salt="another") == 0
        assert llm.unpin("yes no the") == size
        llm.cache.clear()
        assert llm.generate("yes no the", **SHORT).cached_tokens == 0
        with pytest.raises(InputError):
            llm.pin(None)
    off = LLM(str(folder), dtype="float32", kv_memory=1 << 20, cache="off")
    with pytest.raises(InputError, match="cache"):
        off.pin("yes")


FORKED = """
import os, sys
from prefold import LLM, ForkedError
llm = LLM(sys.argv[1], dtype="float32", device="cpu", kv_memory=1 << 20)
llm.embed("yes no")
llm.generate("yes", max_tokens=2)
def refused(call):
    try:
        call()
    except ForkedError as error:
        return "spawn" in str(error)
if (child := os.fork()) == 0:
    calls = [lambda: llm.embed("yes no"), lambda: llm.generate("yes"), lambda: llm.stream("yes")]
    calls.append(lambda: LLM(sys.argv[1]))
    os._exit(0 if all([refused(call) for call in calls]) else 1)
_, status = os.waitpid(child, 0)
llm.embed("no")
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_after_a_fork_a_call_is_an_error(folder):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, str(folder)], timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("top_n", [0, -1, True, "2", 1.5])
def test_a_bad_number_of_documents_is_said_before_anything_is_computed(llm, top_n):
    before = llm.stats.requests
    with pytest.raises(InputError, match="'top_n'"):
        llm.rerank([60], [[61], [62]], top_n=top_n, template="{query}{document}")
    assert llm.stats.requests == before


def test_no_method_of_the_face_takes_or_gives_any():
    methods = {name: getattr(LLM, name) for name in dir(LLM) if not name.startswith("_")}
    vague = {
        f"{name}({what}: {kind})"
        for name, method in methods.items()
        for what, kind in getattr(getattr(method, "fget", method), "__annotations__", {}).items()
        if "Any" in str(kind).replace("[", " ").replace("]", " ").replace(",", " ").split()
    }
    assert methods and not vague
