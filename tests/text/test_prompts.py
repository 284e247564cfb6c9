"""The prompts of the tasks, letter by letter."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from prefold.errors import InputError
from prefold.text import FewShotPrompt, RerankPrompt, Tokenizer, instructed_query, rerank_prompt
from prefold.text.prompts import fill


def test_embedding_query():
    assert instructed_query("Do it", "what?") == "Instruct: Do it\nQuery:what?"


def test_rerank_prompt_of_a_qwen3_tokenizer(backends):
    prompt = rerank_prompt(Tokenizer(Backend.from_str(backends["qwen2"])))
    assert prompt.prefix == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    assert fill(prompt.body, {"instruction": "I", "query": "Q", "document": "D"}) == (
        "<Instruct>: I\n<Query>: Q\n<Document>: D"
    )
    assert prompt.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_rerank_prompt_without_a_think_token(backends):
    backend = Backend.from_str(backends["qwen2"].replace("<think>", "<other>"))
    prompt = rerank_prompt(Tokenizer(backend))
    assert prompt.suffix == "<|im_end|>\n<|im_start|>assistant\n"
    backend = Backend.from_str(backends["sentencepiece"])
    backend.add_tokens([AddedToken("<think>")])
    assert rerank_prompt(Tokenizer(backend)).suffix == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_rerank_template_of_ones_own():
    prompt = RerankPrompt.from_template("Q: {query} {x} D: {document}\nRelevant:".replace("{x} ", ""))
    assert prompt == RerankPrompt("", "Q: {query} D: {document}\nRelevant:", "", special=None)
    RerankPrompt.from_template("{document} {query}")
    for bad in ("{query}", "{document}", "{query} {document} {other}", "{query}{query}{document}", "x"):
        with pytest.raises(InputError, match="rerank template"):
            RerankPrompt.from_template(bad)


def test_fill_is_one_pass():
    assert fill("{a} {b} {c} {} {a", {"a": "{b}", "b": "{a}"}) == "{b} {a} {c} {} {a"


def test_few_shot_prompt():
    prompt = FewShotPrompt("Say which.", [("good {text}", "pos"), ("bad", "neg")])
    assert prompt.render("so {label} so") == (
        "Say which.\n\nText: good {text}\nLabel: pos\n\nText: bad\nLabel: neg\n\nText: so {label} so\nLabel: "
    )
    assert FewShotPrompt().render("x") == "Text: x\nLabel: "
    bare = FewShotPrompt("", [("1", "a")], template="{text} => {label};", separator="\n")
    assert bare.render("2") == "1 => a;\n2 => "
    assert (bare.head, bare.tail) == ("1 => a;\n", " => ")
    for bad in ("{text}", "{label} {text}", "{text} {text} {label}", "{text} {label} {x}"):
        with pytest.raises(InputError, match="template"):
            FewShotPrompt(template=bad)
