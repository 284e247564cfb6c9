"""Causal rerankers whose files are sentence-transformers' CrossEncoder with LogitScore, against the library itself.

mxbai-rerank-v2 compares "1" and "0", Prism-Reranker and Qwen3-Reranker "yes" and "no", zerank-2 reads one logit.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import SIZES, randomise, tiny_checkpoint, write_tokenizer

from prefold import LLM, CheckpointError, InputError, UnsupportedModelError

MXBAI = (
    "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n"
    "{% for m in messages if m.role == 'system' %}instruction: {{ m.content }}\n{% endfor %}"
    "query: {{ (messages | selectattr('role', 'equalto', 'query') | first).content }}\n"
    "document: {{ (messages | selectattr('role', 'equalto', 'document') | first).content }}\n"
    "Is it relevant, 0 or 1?\nRelevance:<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRISM = (
    "{% set rest = messages | rejectattr('role', 'equalto', 'system') | list %}"
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: "
    "{{ messages[0].content | trim if messages[0].role == 'system' else 'Reply yes or no.' }}\n"
    "<Query>: {{ rest[0].content | trim }}\n<Document>: {{ rest[1].content | trim }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
PAIRS = [("the cat", "no"), ("the cat", "yes yes the"), (" perhaps ", "perhaps?\n")]


def hybrid(tmp_path):
    """A tiny Qwen 3.5, with a layer of linear attention."""
    import transformers

    own = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    own |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "head_dim": 16}
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES | own))
    randomise(model, 3, norm=0)
    model.save_pretrained(tmp_path / "hybrid")
    write_tokenizer(tmp_path / "hybrid")
    return tmp_path / "hybrid"


def write(tmp_path, family="qwen2", template=MXBAI, ids=("1", "0"), modality_config=None, **settings):
    """A folder of CrossEncoder: its modules, and settings of config_sentence_transformers.json."""
    folder = hybrid(tmp_path) if family == "qwen3_5" else tiny_checkpoint(tmp_path, family)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    true, false = (None if id is None else vocabulary[id] for id in ids)
    own = {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}
    modules = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""}, own]
    modules = [{"idx": i, "name": str(i)} | module for i, module in enumerate(modules)]
    reads = {"method": "forward", "method_output_name": "logits"}
    modality = {"message": reads | {"format": "flat"}} if modality_config is None else modality_config
    contents = {
        "modules.json": modules,
        "1_LogitScore/config.json": {"true_token_id": true, "false_token_id": false},
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", "prompts": {}} | settings,
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {"text": reads, **modality},
            "module_output_name": "causal_logits",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}} if modality else {},
        },
    }
    (folder / "1_LogitScore").mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": template}))
    return folder


FILES = {
    "mxbai": {},
    "mxbai with a prompt": {"prompts": {"web": "Find the cat."}, "default_prompt_name": "web"},
    "prism": {"family": "qwen3_5", "template": PRISM, "ids": ("yes", "no"),
              "activation_fn": "torch.nn.modules.activation.Sigmoid"},
    "qwen3": {"family": "qwen3", "template": PRISM, "ids": ("yes", "no"), "prompts": {"a": "Judge it."},
              "default_prompt_name": "a", "activation_fn": "torch.nn.modules.linear.Identity"},
    "plain": {"modality_config": {}, "prompts": {"a": "yes "}, "default_prompt_name": "a"},
    "zerank": {"family": "qwen3", "template": PLAIN, "ids": ("yes", None)},
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_scores_equal_those_of_sentence_transformers(tmp_path, kind):
    cross = pytest.importorskip("sentence_transformers").CrossEncoder
    folder = write(tmp_path, **FILES[kind])
    theirs = cross(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    with LLM(str(folder), dtype="float32", max_batch_rows=11) as llm:
        found = [llm.rerank(query, [document]).scores[0] for query, document in PAIRS]
        np.testing.assert_allclose(found, theirs.predict(PAIRS), atol=1e-5)
        documents = [document for _, document in PAIRS]
        ranking = llm.rerank("the cat", documents)
        expected = theirs.rank("the cat", documents)
        assert ranking.order == [entry["corpus_id"] for entry in expected]
        if kind in ("zerank", "plain"):
            with pytest.raises(InputError, match="without an instruction"):
                llm.rerank("q", ["d"], instruction="Judge.")
        else:
            asked = llm.rerank("the cat", documents, instruction="Judge it well.")
            np.testing.assert_allclose(
                asked.scores, theirs.predict([("the cat", d) for d in documents], prompt="Judge it well."), atol=1e-5
            )
            (work,) = llm.task("rerank").prepare([{"query": "q", "document": "d", "instruction": "Other."}])
            assert "Other." in llm.tokenizer.decode(work.requests[0].tokens)
        raw = llm.rerank("the cat", documents, raw_scores=True)
        if "Identity" in str(FILES[kind]):
            np.testing.assert_array_equal(raw.scores, ranking.scores)
        else:
            np.testing.assert_allclose(1 / (1 + np.exp(-raw.scores)), ranking.scores, atol=1e-9)


def test_options_come_before_the_files(tmp_path):
    with LLM(str(write(tmp_path)), dtype="float32") as llm:
        assert len(llm.task("rerank").readout.ids) == 2
        words = llm.task("rerank", words=("no", "yes"))
        assert words.readout.ids == tuple(llm.tokenizer.token_id(word) for word in ("no", "yes"))
        own = llm.task("rerank", template="{query}|{document}")
        (work,) = own.prepare([("a", "b")])
        assert llm.tokenizer.decode(work.requests[0].tokens).endswith("a|b")
        assert own.readout == llm.task("rerank").readout


def test_a_score_is_followed_by_text(tmp_path):
    """Prism-Reranker writes more behind "yes": a chat of the same messages has the prompt that is scored."""
    with LLM(str(write(tmp_path, **FILES["prism"])), dtype="float32") as llm:
        (work,) = llm.task("rerank").prepare([("the cat", "yes")])
        messages = [{"role": "query", "content": "the cat"}, {"role": "document", "content": "yes"}]
        (asked,) = llm.task("generate", max_tokens=4).prepare([{"messages": messages}])
        np.testing.assert_array_equal(asked.requests[0].tokens, work.requests[0].tokens)


@pytest.mark.parametrize(("name", "change", "error", "says"), [
    ("modules.json", [{"type": "Transformer", "path": ""}, {"type": "x.Dense", "path": "1_Dense"}],
     UnsupportedModelError, "the modules Transformer, Dense of sentence-transformers' CrossEncoder"),
    ("1_LogitScore/config.json", {"false_token_id": 3}, CheckpointError, "does not name the tokens"),
    ("1_LogitScore/config.json", {"true_token_id": 3, "module_input_name": "other"},
     UnsupportedModelError, "module_input_name is 'other'"),
    ("1_LogitScore/config.json", {"true_token_id": 999}, InputError, "outside the model's vocabulary"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, UnsupportedModelError, "for fill-mask"),
    ("sentence_bert_config.json", {"modality_config": {"text": {"method": "get_text_features"}}},
     UnsupportedModelError, "scores by its own method"),
    ("config_sentence_transformers.json", {"activation_fn": "x.Scaled"}, UnsupportedModelError, "'x.Scaled'"),
])  # fmt: skip
def test_files_that_ask_for_more_are_refused(tmp_path, name, change, error, says):
    folder = write(tmp_path)
    (folder / name).write_text(json.dumps(change))
    with LLM(str(folder), dtype="float32") as llm, pytest.raises(error, match=says):
        llm.rerank("q", ["d"])
