"""docs/models.md is what its generator writes, and what it says of checkpoints is so."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import PREFIXES, reference, tiny_checkpoint

from prefold import LLM
from prefold.errors import UnsupportedModelError
from prefold.model import config_from, supported_architectures

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "models_page.py"))
WORKING = [known for known in PAGE["CHECKPOINTS"] if not known.refused]
REFUSED = [known for known in PAGE["CHECKPOINTS"] if known.refused]
TEXTS = ["a text", "a text that is longer", "another"]


def test_the_page_is_what_the_generator_writes():
    written = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == PAGE["page"](), "python scripts/models_page.py > docs/models.md"
    assert all(architecture in written for architecture in supported_architectures())
    assert {known.architecture for known in WORKING} <= {*supported_architectures()}


@pytest.mark.parametrize("known", REFUSED, ids=lambda known: known.architecture)
def test_what_is_refused_says_why(known):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    config = {"architectures": [known.architecture], "vocab_size": 99, "intermediate_size": 64} | sizes
    with pytest.raises(UnsupportedModelError, match=known.refused):
        config_from(config | {"max_position_embeddings": 64} | dict(known.settings))


def tiny(tmp_path, architecture):
    """A tiny checkpoint of an architecture."""
    family = max((f for f, prefix in PREFIXES.items() if architecture.startswith(prefix.removesuffix("Text"))), key=len)
    head = {"ForCausalLM": "causal", "Model": "bare", "ForSequenceClassification": "classifier"}
    kind = next(kind for end, kind in head.items() if architecture.endswith(end))
    labels = {"num_labels": 1} if kind == "classifier" else {}
    return tiny_checkpoint(tmp_path, family, head=kind, **labels), kind


@pytest.mark.parametrize("known", [known for known in WORKING if known.task == "embed"], ids=lambda known: known.names)
def test_embeddings_are_those_of_the_last_token(tmp_path, known):
    folder, kind = tiny(tmp_path, known.architecture)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [known.architecture]
    llm, oracle = LLM(str(folder), dtype="float32", device="cpu"), reference(folder, kind)
    found = llm.embed(TEXTS, instruction="Find it")
    for text, vector in zip(TEXTS, found, strict=True):
        tokens = torch.tensor([llm.tokenizer.encode(f"Instruct: Find it\nQuery:{text}").tolist()])
        with torch.inference_mode():
            state = getattr(oracle, "base_model", oracle)(tokens).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-4)


WORDS = [known for known in WORKING if known.task == "rerank" and known.ran != PAGE["FILES"]]


@pytest.mark.parametrize("known", WORDS, ids=lambda known: known.names)
def test_rerankers_compare_two_words_or_have_a_head(tmp_path, known):
    folder, kind = tiny(tmp_path, known.architecture)
    llm, oracle = LLM(str(folder), dtype="float32", device="cpu"), reference(folder, kind)
    template = PAGE["BGE"] if "bge" in known.names else "{query} {document}"
    found = llm.rerank("a query", TEXTS, template=template, raw_scores=True).scores
    for text, score in zip(TEXTS, found, strict=True):
        prompt = template.format(query="a query", document=text)
        tokens = torch.tensor([llm.tokenizer.encode(prompt).tolist()])
        with torch.inference_mode():
            logits = oracle(tokens).logits[0]
        if kind == "causal":
            yes, no = (llm.tokenizer.encode(word).tolist()[0] for word in ("yes", "no"))
            expected = logits[-1, yes] - logits[-1, no]
        else:
            expected = logits[0]
        assert abs(score - expected.item()) < 1e-4
