"""Embeddings of sentence-transformers folders: tokens, prompts, pooling and normalising against the library itself.

The hidden states come from the transformers model, run on the tokens the task asks for.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from task_inputs import backend

from prefold.tasks import make_task
from prefold.text import load_tokenizer
from prefold.types import Result

pytest.importorskip("sentence_transformers")
torch = pytest.importorskip("torch")

TEXTS = ["yes", "", "The quick brown fox jumps over the lazy dog", "é 日本 no", "  spaces  "]
READ = {"last": lambda h: h[-1], "first": lambda h: h[0], "mean": lambda h: h.mean(0)}


class Folder:
    """The folder as a checkpoint."""

    format, name, gguf = "folder", "tiny", None

    def __init__(self, path):
        self.path = path
        self.config = json.loads((path / "config.json").read_text())

    def file(self, name):
        return self.path / name if (self.path / name).is_file() else None

    def read_json(self, name):
        return json.loads((self.path / name).read_text()) if self.file(name) else None


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 300}
    torch.manual_seed(0)
    Qwen3Model(Qwen3Config(**sizes, **heads, initializer_range=0.3)).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend("$A <|endoftext|>"), pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def build(folder, pooling: str, normalize: bool, max_length: int):
    """A SentenceTransformer saved over the tiny model's folder, with two prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    modules = [Transformer(str(folder), max_seq_length=max_length), Pooling(16, pooling_mode=pooling)]
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    model = SentenceTransformer(modules=modules + [Normalize()] * normalize, prompts=prompts, device="cpu")
    return model


@pytest.mark.parametrize(
    ("pooling", "normalize", "max_length"), [("lasttoken", True, 64), ("mean", False, 12), ("cls", True, 9)]
)
def test_embeddings_equal_sentence_transformers(model_folder, tmp_path, pooling, normalize, max_length):
    theirs = build(model_folder, pooling, normalize, max_length)
    theirs.save(str(tmp_path), create_model_card=False)
    checkpoint = Folder(tmp_path)
    tokenizer = load_tokenizer(checkpoint)
    model = theirs[0].model.eval()
    for name in (None, "query", "document"):
        options = {} if name is None else {"prompt_name": name}
        task = make_task("embed", checkpoint, tokenizer, truncate=True, **options)
        assert task.inputs.max_length == max_length
        for text, work in zip(TEXTS, task.prepare(TEXTS), strict=True):
            tokens = torch.from_numpy(work.requests[0].tokens.astype(np.int64))[None]
            with torch.no_grad():
                hidden = model(input_ids=tokens).last_hidden_state[0]
            out = task.finish(work.note, [Result(READ[task.readout.kind](hidden).numpy())])
            expected = theirs.encode(text, **options)
            np.testing.assert_allclose(out["embedding"], expected, atol=2e-6)
