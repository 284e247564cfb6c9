"""Reranking: the prompt's tokens, truncation of the document only, scores and order."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tokenizers as backends
import torch
from task_inputs import FakeCheckpoint, ids, result, tokenizer
from tiny import reference, tiny_checkpoint
from tokenizers import models, normalizers
from tokenizers.processors import TemplateProcessing

from prefold import LLM
from prefold.errors import InputError, UnsupportedModelError
from prefold.spec.requests import Readout
from prefold.tasks import RerankItem, make_task
from prefold.tasks.base import sigmoid
from prefold.text import RERANK_INSTRUCTION, Tokenizer

TOK = tokenizer("<|im_start|> $A", think=True)
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank(tok=TOK, config=None, **options):
    return make_task("rerank", FakeCheckpoint(config), tok, **options)


def body(query: str, document: str, instruction: str = RERANK_INSTRUCTION) -> str:
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"


def tokens(work) -> list[list[int]]:
    return [request.tokens.tolist() for request in work.requests]


def test_prefix_body_and_suffix_are_encoded_apart_without_special_tokens():
    task = rerank()
    one, many, own = task.prepare(
        [
            ("a b?", "no"),
            RerankItem("q", documents=["x", {"text": "y"}]),
            {"query": "q", "document": "d", "instruction": "I"},
        ]
    )
    assert tokens(one) == [ids(TOK, PREFIX) + ids(TOK, body("a b?", "no")) + ids(TOK, SUFFIX)]
    assert tokens(many) == [ids(TOK, PREFIX) + ids(TOK, body("q", d)) + ids(TOK, SUFFIX) for d in "xy"]
    assert tokens(own) == [ids(TOK, PREFIX) + ids(TOK, body("q", "d", "I")) + ids(TOK, SUFFIX)]
    assert task.readout == Readout("logits", (TOK.token_id("yes"), TOK.token_id("no")))


def test_the_suffix_of_models_that_do_not_think_and_of_models_without_chatml():
    chatml, plain = tokenizer(), tokenizer(chatml=False)
    (work,) = rerank(chatml).prepare([("q", "d")])
    suffix = SUFFIX.replace("<think>\n\n</think>\n\n", "")
    assert tokens(work) == [ids(chatml, PREFIX) + ids(chatml, body("q", "d")) + ids(chatml, suffix)]
    (work,) = rerank(plain).prepare([("q", "d")])
    text = PREFIX + body("q", "d") + suffix
    assert tokens(work) == [ids(plain, text)]
    assert plain.decode(work.requests[0].tokens) == text
    assert 1 not in work.requests[0].tokens


def test_braces_in_what_users_write_stay():
    (work,) = rerank().prepare([("{document} {x}", "{query}{")])
    assert body("{document} {x}", "{query}{") in TOK.decode(work.requests[0].tokens)


def test_token_ids():
    task = rerank()
    start, middle = body("", "").split("\n<Document>: ")[0], "\n<Document>: "
    one, two, three = task.prepare([("q", [5, 6]), ([7, 8], ["d", [9]]), ([7], [8])])
    assert tokens(one) == [ids(TOK, PREFIX) + ids(TOK, body("q", "")) + [5, 6] + ids(TOK, SUFFIX)]
    head = ids(TOK, PREFIX) + ids(TOK, start) + [7, 8]
    assert tokens(two) == [
        head + ids(TOK, middle + "d") + ids(TOK, SUFFIX),
        head + ids(TOK, middle) + [9] + ids(TOK, SUFFIX),
    ]
    assert tokens(three) == [ids(TOK, PREFIX) + ids(TOK, start) + [7] + ids(TOK, middle) + [8] + ids(TOK, SUFFIX)]


def test_only_the_document_is_truncated():
    document = "the quick brown fox yes no"
    whole = ids(TOK, body("what?", document))
    head = len(ids(TOK, body("what?", "")))
    around = len(ids(TOK, PREFIX)) + len(ids(TOK, SUFFIX))
    for budget in range(head - 2, len(whole) + 3):
        item = ("what?", document)
        (cut,) = rerank(max_length=around + budget, truncate=True).prepare([item])
        (strict,) = rerank(max_length=around + budget).prepare([item])
        # The reference way: the body alone, cut to what is left of the limit.
        expected = ids(TOK, PREFIX) + whole[:budget] + ids(TOK, SUFFIX)
        if budget <= head:
            assert cut.field == "query"
            assert cut.code == "too_long"
        else:
            assert tokens(cut) == [expected]
        if budget >= len(whole):
            assert tokens(strict) == [expected]
        else:
            assert (strict.field, strict.code) == ("document", "too_long")


def test_one_document_too_long_is_named():
    (error,) = rerank().prepare([("q", ["fine", "x" * 600])])
    assert error.field == "documents[1]"
    assert "512" in str(error)


def test_scores_and_order():
    task = rerank()
    one, many = task.prepare([("q", "d"), RerankItem("q", documents=list("abcde"), top_n=3, return_documents=True)])
    assert json.loads(json.dumps(many.note)) == many.note
    out = task.finish(one.note, [result(2.5, 1.0)])
    assert out.score == pytest.approx(1 / (1 + math.exp(-1.5)), rel=1e-12)
    assert out.num_tokens == one.requests[0].tokens.size
    # The third and fifth tie; the second and fourth round to one score but differ.
    out = task.finish(many.note, [result(0, 0), result(90, 0), result(1, 2), result(91, 0), result(-1, 0)])
    assert out.order == [3, 1, 0]
    assert out.documents == ["d", "b", "a"]
    assert out.scores == pytest.approx([0.5, 1.0, 1 / (1 + math.e), 1.0, 1 / (1 + math.e)], rel=1e-6)
    (plain,) = task.prepare([("q", list("abc"))])
    out = task.finish(plain.note, [result(0, 1), result(0, 1), result(1, 0)])
    assert out.order == [2, 0, 1]
    assert "documents" not in out
    json.dumps(out.line())


def test_raw_scores():
    task = rerank(raw_scores=True)
    (work,) = task.prepare([("q", "d")])
    assert task.finish(work.note, [result(2.5, 1.0)]).score == 1.5


def test_sigmoid_does_not_overflow():
    assert sigmoid(0) == 0.5
    assert sigmoid(1e4) == 1.0
    assert sigmoid(-1e4) == 0.0
    for x in (-30, -1.5, 0.1, 7):
        assert sigmoid(x) == pytest.approx(1 / (1 + math.exp(-x)), rel=1e-14)
        assert sigmoid(x) + sigmoid(-x) == pytest.approx(1)


def test_a_template_and_words_of_ones_own():
    task = rerank(template="Q {query} D {document} A:", words=("a", "b"))
    (work,) = task.prepare([("x", "y")])
    assert tokens(work) == [ids(TOK, "<|im_start|>Q x D y A:")]
    assert task.readout.ids == (TOK.token_id("a"), TOK.token_id("b"))
    (own,) = rerank().prepare([{"query": "x", "document": "y", "template": "Q {query} D {document} A:"}])
    assert tokens(own) == tokens(work)
    (error,) = rerank().prepare([{"query": "x", "document": "y", "template": "{query}"}])
    assert error.field == "template"


def test_a_template_begins_with_the_special_tokens_of_the_tokenizer_once():
    for template, special, expected in (
        ("{query}|{document}", None, "<|im_start|>x|y"),
        ("<|im_start|>{query}|{document}", None, "<|im_start|>x|y"),
        ("{query}|{document}", False, "x|y"),
        ("<|im_start|>{query}|{document}", True, "<|im_start|><|im_start|>x|y"),
    ):
        (work,) = rerank(template=template, add_special_tokens=special).prepare([("x", "y")])
        assert tokens(work) == [ids(TOK, expected)]
    # Qwen3-Reranker's prompt is the same if it is given as a template.
    written = PREFIX + body("{query}", "{document}", "{instruction}") + SUFFIX
    plain, own = (rerank(**o).prepare([("a b?", "no no")])[0] for o in ({}, {"template": written}))
    assert tokens(plain) == tokens(own)


def gemma_tokenizer():
    """Gemma's kind: SentencePiece's BPE, blanks as \u2581 and no pre-tokenizer, <bos> before each text."""
    letters = [*"\n\u2581", *map(chr, range(0x21, 0x7F))]
    merges = [("\u2581", "w"), ("\u2581w", "h"), ("\u2581", "T"), ("\u2581T", "h"), ("A", ":"), ("e", "s")]
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    words += ["".join(pair) for pair in merges]
    vocab = {word: i for i, word in enumerate(words)}
    made = backends.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    return Tokenizer(made, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})


GEMMA = "A: {query}\nB: {document}\nGiven a query A and a passage B, determine whether it is the answer: 'Y' or 'N'."


def test_the_recipe_of_bge_reranker_v2_gemma_gives_its_makers_tokens():
    """FlagEmbedding: [bos] + enc("A: " + query) + enc("\n") + enc("B: " + passage) + enc("\n") + enc(prompt)."""
    tok = gemma_tokenizer()
    query, documents = "what makes tides? ", ["The moon pulls.", "Thé 3 seas\n\nof  it", " water"]
    task = rerank(tok, {"vocab_size": 400}, template=GEMMA, words=("Y", "N"))
    (work,) = task.prepare([(query, documents)])
    prompt = GEMMA.rpartition("\n")[2]
    expected = [
        [tok.bos_id, *(i for part in (f"A: {query}", "\n", f"B: {d}", "\n", prompt) for i in ids(tok, part))]
        for d in documents
    ]
    assert tokens(work) == expected
    assert [*ids(tok, "A: "), *ids(tok, "what")] != ids(tok, "A: what")  # a token reaches over the border


@pytest.mark.parametrize("truncate", [True, "left", "right"])
def test_only_the_document_is_truncated_wherever_it_stands(truncate):
    for template in ("D {document} Q {query}?", "Q {query} D {document} ?", "Q {query} D {document}"):
        for document in ("ab no yes " * 4, TOK.encode("ab no yes " * 4, special=False)):
            text = document if isinstance(document, str) else TOK.decode(document)
            whole = tokens(rerank(template=template).prepare([("x", text)])[0])[0]
            for room in range(len(whole) - 9, len(whole) + 1):
                (work,) = rerank(template=template, max_length=room, truncate=truncate).prepare([("x", document)])
                before, after = template.replace("{query}", "x").split("{document}")
                made = TOK.decode(work.requests[0].tokens).removeprefix("<|im_start|>")
                assert made.startswith(before) and made.endswith(after) and room - 2 <= len(tokens(work)[0]) <= room
                kept = made[len(before) : len(made) - len(after)]
                assert text.endswith(kept) if truncate == "left" else text.startswith(kept)


def test_a_template_with_the_document_first_shares_the_document(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3")
    llm, oracle = LLM(str(folder), dtype="float32", device="cpu"), reference(folder)
    yes, no = (llm.tokenizer.token_id(word) for word in ("yes", "no"))
    options = {"template": "{document} ? {query}", "words": ("yes", "no"), "raw_scores": True}
    task, document = llm.task("rerank", **options), "the one of all the oceans"
    before = llm.stats.rows_computed
    lines = llm.run(task, [{"query": q, "document": document} for q in ("yes", "no", "the")])
    assert llm.stats.rows_computed - before < len(document) + 3 * len(" ? yes")
    for query, line in zip(("yes", "no", "the"), lines, strict=True):
        prompt = torch.from_numpy(llm.tokenizer.encode(f"{document} ? {query}")).long()
        logits = oracle(prompt[None]).logits[0, -1].detach()
        assert line["score"] == pytest.approx(float(logits[yes] - logits[no]), abs=1e-4)


def test_a_classification_head_of_one_label():
    config = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    task = rerank(config=config)
    assert task.readout == Readout("head")
    (work,) = task.prepare([("q", "d")])
    assert task.finish(work.note, [result(1.5)]).score == pytest.approx(sigmoid(1.5))
    with pytest.raises(UnsupportedModelError, match="2 labels"):
        rerank(config={"architectures": ["Qwen3ForSequenceClassification"]})


ONE_LABEL = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def test_a_cross_encoder_gets_the_pair_it_was_trained_on():
    thinks = tokenizer(think=True)

    def text(config, tok=thinks, **options):
        (work,) = rerank(tok, ONE_LABEL | config, **options).prepare([("yes", "no")])
        return tok.decode(work.requests[0].tokens)

    assert text({}).startswith("<|im_start|>system")  # Qwen3-Reranker, turned into a classifier
    assert text({"sentence_transformers": {"version": "5.0"}}) == "yesno"
    assert text({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}) == "yesno"
    assert text({"architectures": ["LlamaForSequenceClassification"]}, tokenizer()) == "yesno"
    assert text({"sentence_transformers": {}}, template="{query}|{document}") == "yes|no"
    config = ONE_LABEL | {"sentence_transformers": {}}
    with pytest.raises(InputError, match="without an instruction"):
        rerank(thinks, config, instruction="Say.")
    (error,) = rerank(thinks, config).prepare([{"query": "q", "document": "d", "instruction": "Say."}])
    assert "without an instruction" in str(error)
    (work,) = rerank(thinks, config, truncate=True).prepare([("yes", "no" * 600)])
    assert work.requests[0].tokens.size == 512


@pytest.mark.slow
def test_a_cross_encoder_scores_as_sentence_transformers_does(tmp_path):
    cross = pytest.importorskip("sentence_transformers").CrossEncoder
    folder = tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    saved = tmp_path / "saved"
    model = cross(str(folder), device="cpu")
    model.save_pretrained(str(saved))
    pairs = [("the cat", "no"), ("the cat", "yes yes the"), ("the cat", "perhaps")]
    expected = [float(model.predict([pair])[0]) for pair in pairs]
    llm = LLM(str(saved), dtype="float32", device="cpu")
    np.testing.assert_allclose(llm.rerank("the cat", [d for _, d in pairs]).scores, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": ("yes", "nope")}, "'nope' is 3 tokens"),
        ({"words": ("", "no")}, "'' is 0 tokens"),
        ({"words": ("yes", "yes")}, "same token"),
        ({"words": "no"}, r"words \(--words\) is 'no'"),
        ({"words": ("yes",)}, r"words \(--words\) is"),
        ({"template": "{query}"}, "rerank template"),
        ({"template": 5}, "template is 5"),
        ({"instruction": 5}, "instruction is 5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        rerank(**options)


@pytest.fixture(scope="module", params=["normalised", "not normalised", "without a head"])
def embedder(request, tmp_path_factory):
    """A checkpoint that embeds texts: by sentence-transformers' modules, or without an LM head."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("embedder"), "llama")
    if request.param == "without a head":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    else:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        kinds = kinds[: 3 if request.param == "normalised" else 2]
        (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in kinds]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    return LLM(str(folder), dtype="float32")


def test_a_checkpoint_that_embeds_scores_by_cosine(embedder):
    documents = ["no", "the one", "yes it is", "no"]
    vectors = embedder.embed(["is it", *documents])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = vectors[1:] @ vectors[0]
    found = embedder.rerank("is it", documents, top_n=3)
    assert found.scores == pytest.approx(expected, abs=1e-5) and len(found.order) == 3
    assert list(found.order) == sorted(range(4), key=lambda i: -found.scores[i])[:3]
    task = embedder.task("rerank", raw_scores=True, truncate=True)
    work, pair, wrong = task.prepare([
        {"query": "is it", "documents": [{"text": text} for text in documents], "return_documents": True, "top_n": 1},
        ("is it", documents[1]), {"query": "is it", "document": "no", "instruction": "Judge."},
    ])  # fmt: skip
    assert "without an instruction" in str(wrong) and wrong.field == "instruction"
    results = [result(*vector) for vector in embedder.embed(["is it", *documents])]
    line = task.finish(work.note, results)
    assert line.scores == pytest.approx(expected, abs=1e-5) and line.documents == [documents[line.order[0]]]
    assert task.finish(pair.note, [results[0], results[2]]).score == pytest.approx(expected[1], abs=1e-5)


def test_an_embedder_that_is_asked_by_a_template_is_asked_for_words(embedder):
    options = {"template": "{query} {document}", "words": ("yes", "no")}
    if not embedder.config.lm_head:
        with pytest.raises(UnsupportedModelError):
            embedder.task("rerank", **options)
    else:
        assert embedder.task("rerank", **options).readout.kind == "logits"


def test_bad_items_name_their_field():
    bad = {
        "documents": [
            {"query": "q"},
            {"query": "q", "document": "d", "documents": ["d"]},
            ("q", []),
            RerankItem("q", documents="d"),
        ],
        "query": [(None, "d"), {"document": "d"}, ("\ud800", ["d"])],
        "documents[1]": [("q", ["a", None]), ("q", ["a", 5]), RerankItem("q", documents=np.array(["a", None]))],
        "top_n": [RerankItem("q", "d", top_n=0), RerankItem("q", "d", top_n=True)],
        "instruction": [RerankItem("q", "d", instruction={})],
    }
    for field, items in bad.items():
        for error in rerank().prepare(items):
            assert isinstance(error, InputError)
            assert error.field == field, error
