"""What a classification head reads, and how logits become scores: as transformers and sentence-transformers do."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from serving import serving
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.cli import main
from prefold.errors import CheckpointError, UnsupportedModelError

PAD = 5
# With padding at the end, in the middle, nowhere and everywhere.
IDS = [[7, 9, 11], [7, 9, PAD], [7, PAD, 9, PAD, PAD], [PAD, 8], [8, PAD], [PAD], [PAD, PAD, PAD], [PAD, 7, PAD]]
PAIRS = [("yes", "the no"), ("no the", "yes yes"), ("the", "y")]


def change(folder, name: str, **values) -> None:
    """Changes keys of a JSON file; ... removes one."""
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in (config | values).items() if value is not ...}
    path.write_text(json.dumps(kept))


def logits_of(model, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].tolist()


def logits(llm, items) -> list[list[float]]:
    return [[*line["logits"].values()] for line in llm.run(llm.task("classify"), items)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "olmo2"])
@pytest.mark.parametrize("pad", [PAD, None, ..., -1])
def test_a_head_reads_the_last_row_that_is_not_padding(tmp_path, family, pad):
    """...: config.json says nothing, and the class of transformers has a default (0 for Gemma, 1 for OLMo 2)."""
    folder = tiny_checkpoint(tmp_path, family, head="classifier", num_labels=3, num_hidden_layers=1)
    change(folder, "config.json", pad_token_id=pad)
    model = reference(folder, "classifier")
    items = [*IDS, [9, 0, 0], [9, 1, 1], [0, 0]]
    with LLM(str(folder), dtype="float32") as llm:
        found = logits(llm, items)
    np.testing.assert_allclose(found, [logits_of(model, ids) for ids in items], rtol=1e-4, atol=1e-4)


def test_transformers_modules_read_it_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFOLD_TRANSFORMERS", "all")
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=2, num_hidden_layers=1, pad_token_id=PAD)
    model = reference(folder, "classifier")
    with LLM(str(folder), dtype="float32") as llm:
        assert llm.model.computed_by
        found = logits(llm, IDS)
    np.testing.assert_allclose(found, [logits_of(model, ids) for ids in IDS], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier of three labels; its sizes have a compiled program."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "num_labels": 3, "pad_token_id": PAD}
    return tiny_checkpoint(tmp_path_factory.mktemp("classifier"), "qwen3", head="classifier", **sizes)


SHARED = [*range(8, 48)]
LONG = [[*SHARED, 9], [*SHARED, 9, PAD], SHARED, [*SHARED, *[PAD] * 30], [PAD] * 50, [*SHARED, PAD, 9, PAD]]


@pytest.mark.parametrize(
    "options", [{"cache_prefill": True}, {"max_batch_rows": 7}, {"sharing": "off"}, {"sharing": "mlp"}], ids=str
)
def test_however_rows_are_computed(classifier, options):
    """Padding shares rows with what it follows, lies in other steps, and may be in the cache already."""
    model = reference(classifier, "classifier")
    wanted = [logits_of(model, ids) for ids in LONG]
    with LLM(str(classifier), dtype="float32", **options) as llm:
        for _ in range(2):  # the second time all rows may be kept
            np.testing.assert_allclose(logits(llm, LONG), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("truncate", "kept"), [(True, slice(20)), ("left", slice(-20, None))])
def test_padding_counts_when_a_text_is_cut(classifier, truncate, kept):
    model = reference(classifier, "classifier")
    with LLM(str(classifier), dtype="float32") as llm:
        task = llm.task("classify", max_length=20, truncate=truncate)
        found = [[*line["logits"].values()] for line in llm.run(task, LONG)]
    np.testing.assert_allclose(found, [logits_of(model, ids[kept]) for ids in LONG], rtol=1e-4, atol=1e-4)


def test_a_server_and_a_job_read_it_too(classifier, tmp_path):
    """The token of <|endoftext|> is 0; the tokenizer takes it from texts."""
    change_copy(classifier, tmp_path, "config.json", pad_token_id=0)
    texts, model = (
        ["the yes", "the yes<|endoftext|>", "no<|endoftext|><|endoftext|>"],
        reference(tmp_path, "classifier"),
    )
    with LLM(str(tmp_path), dtype="float32") as llm:
        ids = [llm.tokenizer.encode(text).tolist() for text in texts]
        assert [tokens[-1] for tokens in ids[1:]] == [0, 0]
        wanted = [torch.tensor(logits_of(model, tokens)).softmax(-1).tolist() for tokens in ids]
        with serving(llm) as server:
            answer = httpx.post(f"{server.url}/classify", json={"input": texts}, timeout=60).json()
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], wanted, atol=1e-5)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = ["classify", str(tmp_path / "in.jsonl"), "-m", str(tmp_path), "--dtype", "float32", "--keep-order"]
    done = CliRunner().invoke(main, [*job, "-o", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 0, done.output
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    np.testing.assert_allclose([[*line["probabilities"].values()] for line in lines], wanted, atol=1e-5)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A classifier of one label; its pairs end with the padding token, which is EOS in many tokenizers."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("head"), "qwen2", head="classifier", num_labels=1, pad_token_id=2)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    a, b, end = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}, "<|im_end|>"
    eos = {"SpecialToken": {"id": end, "type_id": 0}}
    special = {end: {"id": end, "ids": [2], "tokens": [end]}}
    parts = {"single": [a, eos], "pair": [a, b, eos], "special_tokens": special}
    tokenizer["post_processor"] = {"type": "TemplateProcessing"} | parts
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(folder, "tokenizer_config.json", pad_token="<|im_end|>", chat_template=...)
    return folder


def test_pairs_that_end_with_padding(reranker):
    from tokenizers import Tokenizer

    tokenizer, model = Tokenizer.from_file(str(reranker / "tokenizer.json")), reference(reranker, "classifier")
    wanted = [logits_of(model, tokenizer.encode(*pair).ids)[0] for pair in PAIRS]
    with LLM(str(reranker), dtype="float32") as llm:
        found = [llm.rerank(query, [document], raw_scores=True).scores[0] for query, document in PAIRS]
        labels = [row[0] for row in logits(llm, PAIRS)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(labels, wanted, rtol=1e-4, atol=1e-4)


FORMS = {
    "version 4": lambda path: {"sentence_transformers": {"activation_fn": path, "version": "5.0.0"}},
    "before": lambda path: {"sbert_ce_default_activation_function": path},
    "saved now": None,
}


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["activation.Sigmoid", "activation.Tanh", "activation.Softmax", "linear.Identity"])
def test_activations_of_cross_encoders(reranker, tmp_path, form, name):
    cross_encoder = pytest.importorskip("sentence_transformers").CrossEncoder
    keys = FORMS[form]
    if keys is None:
        activation = getattr(torch.nn, name.split(".")[1])()
        cross_encoder(str(reranker), activation_fn=activation, device="cpu").save_pretrained(str(tmp_path))
    else:
        change_copy(reranker, tmp_path, "config.json", **keys(f"torch.nn.modules.{name}"))
    wanted = cross_encoder(str(tmp_path), device="cpu").predict([list(pair) for pair in PAIRS])
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = [llm.rerank(query, [document]).scores[0] for query, document in PAIRS]
        templated = llm.rerank("yes", ["no"], template="{query}{document}<|im_end|>").scores
        bare = llm.rerank("yes", ["no"], template="{query}{document}<|im_end|>", raw_scores=True).scores
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    rule = {"Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Tanh": np.tanh, "Softmax": np.ones_like, "Identity": np.array}
    np.testing.assert_allclose(templated, rule[name.split(".")[1]](np.array(bare)), rtol=1e-4)


def change_copy(folder, copy, name: str, **values) -> None:
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy, name, **values)


def test_other_activations_are_refused_by_name(reranker, tmp_path):
    change_copy(reranker, tmp_path, "config.json", sentence_transformers={"activation_fn": "torch.nn.GELU"})
    with LLM(str(tmp_path), dtype="float32") as llm:
        with pytest.raises(
            UnsupportedModelError, match="activation_fn 'GELU'; prefold supports Sigmoid, Identity, Tanh"
        ):
            llm.rerank("yes", ["no"])
        assert np.isfinite(llm.rerank("yes", ["no"], raw_scores=True).scores).all()


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("regression", 1), ("regression", 3), ("single_label_classification", 3), ("multi_label_classification", 1),
        ("multi_label_classification", 3), (None, 1), (None, 3),
    ],
)  # fmt: skip
def test_problem_types_as_the_pipeline_of_transformers(tmp_path, problem, labels):
    import transformers

    names = {i: f"L{i}" for i in range(labels)}
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", id2label=names, num_hidden_layers=1)
    change(folder, "config.json", problem_type=problem)
    pipeline = transformers.pipeline("text-classification", str(folder), top_k=None, device="cpu")
    (wanted,) = pipeline(["the yes no y"])
    with LLM(str(folder), dtype="float32") as llm:
        found = llm.classify("the yes no y").probabilities
    assert found == pytest.approx({entry["label"]: entry["score"] for entry in wanted}, abs=1e-4)


def test_another_problem_type_is_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=2, num_hidden_layers=1)
    change(folder, "config.json", problem_type="ranking")
    with (
        LLM(str(folder)) as llm,
        pytest.raises(CheckpointError, match="problem_type is 'ranking'; it must be regression"),
    ):
        llm.classify("yes")
