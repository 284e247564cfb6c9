"""Listwise reranking with random weights, in Jina's layout, against the prompt and the formula in torch."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from serving import serving
from tiny import reference, tiny_checkpoint
from tokenizers import AddedToken, Tokenizer

from prefold import LLM, InputError, UnsupportedModelError
from prefold.cli import main
from prefold.errors import CheckpointError
from prefold.tasks import make_task

MARKS = ("<|embed_token|>", "<|rerank_token|>")
LIMIT, SHORT = 8192, 4096
HIDDEN, SIZE = 36, 20
QUERY = "is the cat on the mat?"
DOCUMENTS = ["yes it is", "no", "the dog is on the mat, and the cat is out", "é 1 <b>", "no"]


def write_jina(tmp_path, family="qwen3", **config):
    """A folder as Jina publishes it: JinaForRanking, its projector among the weights, two special tokens."""
    folder = tiny_checkpoint(tmp_path, family, max_position_embeddings=LIMIT, num_hidden_layers=2, **config)
    generator = torch.Generator().manual_seed(5)
    shapes = {"projector.0.weight": (HIDDEN // 2, HIDDEN), "projector.2.weight": (SIZE, HIDDEN // 2)}
    projector = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}
    weights = folder / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(weights).items() if name != "lm_head.weight"}
    save_file(stored | projector, weights, {"format": "pt"})
    change(folder / "config.json", architectures=["JinaForRanking"], auto_map={"AutoModel": "modeling.JinaForRanking"})
    change(folder / "tokenizer_config.json", model_max_length=LIMIT)
    (folder / "modeling.py").write_text("raise AssertionError('the code of a checkpoint is not run')")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class Oracle:
    """Reranks as the model's authors do, one prompt after the other, each encoded and computed as a whole."""

    def __init__(self, folder):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        change(folder / "config.json", architectures=["Qwen3ForCausalLM"], auto_map={})
        self.model = reference(folder, "bare", "sdpa")
        change(
            folder / "config.json", architectures=["JinaForRanking"], auto_map={"AutoModel": "modeling.JinaForRanking"}
        )
        tensors = load_file(folder / "model.safetensors")
        self.first, self.second = tensors["projector.0.weight"], tensors["projector.2.weight"]

    def prompt(self, query, documents, instruction=None):
        lines = [
            "<|im_start|>system",
            "You are a search relevance expert who can determine a ranking of the passages based on how relevant they "
            "are to the query. If the query is a question, how relevant a passage is depends on how well it answers "
            "the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
            "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
            "<|im_end|>",
            "<|im_start|>user",
            f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the "
            f"passages based on their relevance to query: {query}",
            *(["<instruct>", instruction, "</instruct>"] if instruction else []),
            *(f'<passage id="{i}">\n{text}{MARKS[0]}\n</passage>' for i, text in enumerate(documents)),
            f"<query>\n{query}{MARKS[1]}\n</query><|im_end|>",
            "<|im_start|>assistant",
            "<think>\n\n</think>\n\n",
        ]
        return "\n".join(lines)

    def size(self, text):
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def vectors(self, query, documents, instruction=None):
        text = self.prompt(query, documents, instruction)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        with torch.no_grad():
            rows = self.model(ids[None]).last_hidden_state[0]
        documents_at, query_at = (ids == self.tokenizer.token_to_id(mark) for mark in MARKS)
        project = lambda part: torch.relu(part @ self.first.T) @ self.second.T  # noqa: E731
        return project(rows[documents_at]).double(), project(rows[query_at])[0].double()

    def split(self, query, documents, limit):
        parts, free = [[]], limit - 2 * self.size(query)
        for text in documents:
            parts[-1].append(text)
            free -= self.size(text)
            if len(parts[-1]) >= 125 or free <= 2048:
                parts, free = [*parts, []], limit - 2 * self.size(query)
        return [part for part in parts if part]

    def scores(self, query, documents, instruction=None, limit=LIMIT):
        cosine = torch.nn.functional.cosine_similarity
        found = [self.vectors(query, part, instruction) for part in self.split(query, documents, limit)]
        weights = torch.stack([(1 + cosine(vectors, asked[None])).max() / 2 for vectors, asked in found])
        mean = (torch.stack([asked for _, asked in found]) * weights[:, None]).sum(0) / weights.sum()
        return cosine(torch.cat([vectors for vectors, _ in found]), mean[None]).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_jina(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32") as llm:
        yield llm


def test_a_list_is_scored_in_one_prompt(llm, oracle):
    found = llm.rerank(QUERY, DOCUMENTS, top_n=3)
    expected = oracle.scores(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found.scores, expected, atol=1e-5)
    assert found.order == np.argsort(-expected, kind="stable")[:3].tolist()
    assert abs(found.scores[1] - found.scores[4]) > 1e-3  # equal documents at other places
    assert found.num_tokens < oracle.size(oracle.prompt(QUERY, DOCUMENTS))
    asked = llm.rerank(QUERY, DOCUMENTS, instruction="Find cats.", raw_scores=True)
    np.testing.assert_allclose(asked.scores, oracle.scores(QUERY, DOCUMENTS, "Find cats."), atol=1e-5)
    # A mark in a text is taken out of it, as the authors do.
    bare = llm.rerank(QUERY + MARKS[1], [DOCUMENTS[0] + MARKS[0], *DOCUMENTS[1:]])
    np.testing.assert_allclose(bare.scores, expected, atol=1e-5)


@pytest.mark.parametrize("options", [
    {"max_batch_rows": 7}, {"max_batch_rows": 50, "sharing": "mlp"}, {"sharing": "off"}, {"executor": "torch"},
    {"executor": "torch", "max_batch_rows": 61},
])  # fmt: skip
def test_cuts_and_executors(folder, oracle, options):
    with LLM(str(folder), dtype="float32", **options) as llm:
        np.testing.assert_allclose(llm.rerank(QUERY, DOCUMENTS).scores, oracle.scores(QUERY, DOCUMENTS), atol=1e-5)


def test_layers_with_windows(tmp_path):
    """As version 3.5 has them; it keeps 8,192 tokens of a prompt free for the next document."""
    types = ["sliding_attention", "full_attention"]
    folder = write_jina(tmp_path, layer_types=types, sliding_window=9, use_sliding_window=True)
    with LLM(str(folder), dtype="float32", max_batch_rows=40) as llm:
        task = llm.task("rerank")
        (work,) = task.prepare([(QUERY, DOCUMENTS)])
        assert task.reader.spare == 8192 and work.note["prompts"] == [1] * 5
        task.reader.spare = 2048
        (line,) = llm.run(task, [(QUERY, DOCUMENTS)])
        np.testing.assert_allclose(line["scores"], Oracle(folder).scores(QUERY, DOCUMENTS), atol=1e-5)


def test_a_query_is_computed_once_for_its_lists(llm, oracle):
    task = llm.task("rerank")
    items = [{"query": QUERY, "documents": DOCUMENTS}, {"query": QUERY, "documents": [*DOCUMENTS[:4], "other"]}]
    before = llm.stats.rows_computed
    lines = llm.run(task, items)
    rows = llm.stats.rows_computed - before
    for item, line in zip(items, lines, strict=True):
        np.testing.assert_allclose(line["scores"], oracle.scores(QUERY, item["documents"]), atol=1e-5)
    one, two = (oracle.prompt(QUERY, item["documents"]).partition(MARKS[1])[0] for item in items)
    shared = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert rows <= oracle.size(one) + oracle.size(two) + 2 - oracle.size(one[:shared]) + 1


@pytest.mark.parametrize(("documents", "limit"), [
    ([f"the {i}" for i in range(130)], LIMIT),  # more than 125
    (["yes the cat is out " * 20] * 3 + ["no " * 300] * 4, SHORT),  # few free tokens
])  # fmt: skip
def test_long_lists_are_split_as_the_authors_do(llm, oracle, documents, limit):
    parts = oracle.split(QUERY, documents, limit)
    assert len(parts) > 1
    (work,) = llm.task("rerank", max_length=limit).prepare([{"query": QUERY, "documents": documents}])
    assert work.note["prompts"] == [len(part) for part in parts]
    assert json.loads(json.dumps(work.note)) == work.note
    found = llm.rerank(QUERY, documents, max_length=limit)
    np.testing.assert_allclose(found.scores, oracle.scores(QUERY, documents, limit=limit), atol=1e-5)


def test_what_is_too_long_is_named_or_cut(llm, oracle):
    long = "no the " * 1500
    with pytest.raises(InputError, match="item 1 of documents: 'document' makes a prompt of") as error:
        llm.rerank(QUERY, ["yes", long, "no"], max_length=SHORT)
    assert error.value.code == "too_long"
    found = llm.rerank(QUERY, ["yes", long, "no"], errors="return", max_length=SHORT)
    assert set(found.errors) == {1} and np.isnan(found.scores[1])
    np.testing.assert_allclose(found.scores[[0, 2]], oracle.scores(QUERY, ["yes", "no"]), atol=1e-5)
    strict, cut = llm.task("rerank", max_length=SHORT), llm.task("rerank", max_length=SHORT, truncate=True)
    (error,) = strict.prepare([{"query": QUERY, "documents": ["yes", long, "no"]}])
    assert (error.field, error.code) == ("documents[1]", "too_long")
    (error,) = cut.prepare([{"query": long, "documents": ["yes"]}])
    assert (error.field, error.code) == ("query", "too_long")
    (work,) = cut.prepare([{"query": QUERY, "documents": ["yes", long, "no"]}])
    assert work.note["prompts"] == [1, 1, 1]
    assert SHORT - 4 <= work.requests[3].tokens.size <= SHORT
    (work,) = strict.prepare([{"query": QUERY, "documents": [long, "no"], "max_tokens_per_doc": 20}])
    text = oracle.tokenizer.decode(work.requests[-1].tokens.tolist(), skip_special_tokens=False)
    assert work.note["prompts"] == [2] and text.count("no the") == 7


def test_what_a_list_does_not_take(llm, folder, tmp_path):
    for options in ({"template": "{query} {document}"}, {"words": ("yes", "no ")}, {"add_special_tokens": True}):
        with pytest.raises(InputError, match="its own prompt"):
            llm.rerank(QUERY, DOCUMENTS, **options)
    task = llm.task("rerank")
    id = task.inputs.tokenizer.token_id(MARKS[0])
    wrong = [
        {"query": QUERY, "document": "x", "template": "{query} {document}"},
        {"query": QUERY, "documents": ["x", [5, id]]},
        {"query": [id], "document": "x"},
        {"query": QUERY, "documents": []},
        {"query": " ", "document": "x"},
    ]
    fields = [work.field for work in task.prepare(wrong)]
    assert fields == ["template", "documents", "document", "documents", "query"]
    one, ids = task.prepare([(QUERY, "yes"), {"query": [7, 8], "documents": ["yes", [5, 6]]}])
    assert len(one.requests) == 2 and len(ids.requests) == 3
    with pytest.raises(UnsupportedModelError, match="no head at all"):
        llm.generate("x")
    with pytest.raises(UnsupportedModelError, match="load the model here"):
        LLM(str(folder), load_format="dummy").rerank(QUERY, DOCUMENTS)
    lacking = write_jina(tmp_path)  # as a GGUF file has it
    change(lacking / "config.json", architectures=["Qwen3ForCausalLM"], auto_map={})
    tensors = load_file(lacking / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("projector.")}
    save_file(kept, lacking / "model.safetensors", {"format": "pt"})
    with LLM(str(lacking)) as other, pytest.raises(UnsupportedModelError, match="lacks the projector"):
        other.rerank(QUERY, DOCUMENTS)
    bare = write_jina(tmp_path)
    tensors = load_file(bare / "model.safetensors")
    del tensors["projector.2.weight"]
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    with LLM(str(bare)) as other, pytest.raises(CheckpointError, match=r"projector.2.weight.* no such tensor"):
        other.rerank(QUERY, DOCUMENTS)


def test_a_projector_in_a_file_of_its_own(folder, oracle, tmp_path):
    apart = write_jina(tmp_path)
    tensors = load_file(apart / "model.safetensors")
    own = {f"linear{i}.weight": tensors.pop(f"projector.{name}.weight") for i, name in ((1, 0), (2, 2))}
    save_file(own, apart / "projector.safetensors")
    save_file(tensors, apart / "model.safetensors", {"format": "pt"})
    change(apart / "config.json", architectures=["Qwen3ForCausalLM"], auto_map={})
    with LLM(str(apart), dtype="float32") as llm:
        np.testing.assert_allclose(llm.rerank(QUERY, DOCUMENTS).scores, oracle.scores(QUERY, DOCUMENTS), atol=1e-5)


def test_a_table_is_one_list(llm, oracle):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": DOCUMENTS, "n": range(5)})
    found = llm.rerank(QUERY, table)
    np.testing.assert_allclose(found["score"].to_numpy(), oracle.scores(QUERY, DOCUMENTS), atol=1e-5)
    part = llm.rerank(QUERY, pa.table({"text": ["yes", None, "no"]}), errors="return")
    expected = oracle.scores(QUERY, ["yes", "no"])
    np.testing.assert_allclose(part["score"].to_pylist()[::2], expected, atol=1e-5)
    assert part["score"].to_pylist()[1] is None and part["error"].to_pylist()[1]
    with pytest.raises(InputError, match="one list"):
        llm.rerank(QUERY, table.to_reader())


def test_make_task_before_the_model_is_loaded(llm, folder):
    task = make_task("rerank", llm.checkpoint, llm.tokenizer)
    assert task.is_listwise and task.readout.kind == "last"


def test_jobs_and_the_shell(folder, oracle, tmp_path):
    lists = [DOCUMENTS, DOCUMENTS[:3], ["yes"]]
    records = [{"query": QUERY, "documents": documents} for documents in lists]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["-m", str(folder), "--dtype", "float32"]
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(main, ["rerank", str(tmp_path / "in.jsonl"), "-o", str(out), "--quiet", *options])
    assert done.exit_code == 0, done.output
    found = {line["record"]: line for line in map(json.loads, out.read_text().splitlines())}
    for number, documents in enumerate(lists, 1):
        expected = oracle.scores(QUERY, documents)
        np.testing.assert_allclose(found[number]["scores"], expected, atol=1e-5)
        assert found[number]["order"] == np.argsort(-expected, kind="stable").tolist()
    done = CliRunner().invoke(main, ["rerank", QUERY, *DOCUMENTS[:3], "--json", *options])
    assert done.exit_code == 0, done.output
    line = json.loads([line for line in done.output.splitlines() if line.startswith("{")][-1])
    np.testing.assert_allclose(line["scores"], oracle.scores(QUERY, DOCUMENTS[:3]), atol=1e-5)


def test_the_server(llm, oracle):
    expected = oracle.scores(QUERY, DOCUMENTS)
    with serving(llm) as server, httpx.Client(base_url=server.url) as client:
        tei = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}).json()
        assert {one["index"]: one["score"] for one in tei} == pytest.approx(dict(enumerate(expected)), abs=1e-5)
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        for path in ("/v1/rerank", "/v2/rerank"):
            answer = client.post(path, json=body).json()
            best = {one["index"]: one["relevance_score"] for one in answer["results"]}
            assert best == pytest.approx({i: expected[i] for i in np.argsort(-expected)[:2]}, abs=1e-5)
            usage = answer["usage"]
            assert usage["total_tokens"] == len(llm.task("rerank").prepare([body_of(body)])[0].requests[-1].tokens)
            assert usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) <= usage["total_tokens"]
        pair = client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS[:2]}).json()
        scores = [one["score"] for one in pair["data"]]
        np.testing.assert_allclose(scores, oracle.scores(QUERY, DOCUMENTS[:2]), atol=1e-5)
        assert list(client.get("/info").json()["model_type"]) == ["reranker"]
        assert client.post("/v1/rerank", json=body | {"template": "{query}{document}"}).status_code == 400


def body_of(body):
    return {name: body[name] for name in ("query", "documents")}
