"""Embeddings of sentence-transformers folders: tokens, prompts, pooling and normalising against the library itself.

The hidden states come from the transformers model, run on the tokens the task asks for.
"""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from task_inputs import backend

from prefold.errors import InputError, UnsupportedModelError
from prefold.spec.requests import Result
from prefold.tasks import make_task
from prefold.text import load_tokenizer

pytest.importorskip("sentence_transformers")
torch = pytest.importorskip("torch")

TEXTS = ["yes", "The quick brown fox jumps over the lazy dog", "é 日本 no", "  spaces  "]
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


def build(folder, pooling: str, normalize: bool, max_length: int, **options):
    """A SentenceTransformer saved over the tiny model's folder, with two prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    modules = [Transformer(str(folder), max_seq_length=max_length), Pooling(16, pooling_mode=pooling)]
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    model = SentenceTransformer(modules=modules + [Normalize()] * normalize, prompts=prompts, device="cpu", **options)
    return model


@pytest.mark.parametrize(
    ("pooling", "normalize", "max_length", "size"),
    [("lasttoken", True, 64, None), ("mean", False, 12, None), ("cls", True, 9, None), ("mean", True, 64, 6)],
)
def test_embeddings_equal_sentence_transformers(model_folder, tmp_path, pooling, normalize, max_length, size):
    theirs = build(model_folder, pooling, normalize, max_length, truncate_dim=size)
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
            np.testing.assert_allclose(out.embedding, expected, atol=2e-6)


SIMPLE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ ending }}"
)
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part.type == 'text' %}{{ m.role }}: {{ part.text }}"
    "{% endif %}{% endfor %}\n{% endfor %}{{ eos_token }}"
)
LONG = [*TEXTS, "one two three four five six seven", "Zz" * 40, "the 1 2 3 4\n" * 5]


def chat_folder(model_folder, tmp_path, template, pooling, max_length, processing=None):
    """(the folder that sentence-transformers saves of a decoder with a chat template, its model)"""
    from transformers import AutoTokenizer

    start, saved = tmp_path / "start", tmp_path / "saved"
    start.mkdir()
    for file in model_folder.iterdir():
        (start / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(start)
    theirs = build(start, pooling, True, max_length)
    theirs.save(str(saved), create_model_card=False)
    path = saved / "sentence_bert_config.json"
    config = json.loads(path.read_text())
    assert "message" in config["modality_config"]
    path.write_text(json.dumps(config | ({"processing_kwargs": processing} if processing else {})))
    return saved


@pytest.mark.parametrize(
    ("template", "pooling", "max_length", "processing"),
    [
        (SIMPLE, "lasttoken", 64, None),
        (CHATML, "lasttoken", 20, None),
        (CHATML, "mean", 33, {"chat_template": {"add_generation_prompt": True, "ending": "!"}}),
        (CHATML, "lasttoken", 24, {"chat_template": {"add_generation_prompt": True, "restore_suffix": False}}),
        (PARTS, "cls", 16, None),
        (PARTS, "lasttoken", 12, None),
    ],
)
def test_chat_messages_equal_sentence_transformers(model_folder, tmp_path, template, pooling, max_length, processing):
    from sentence_transformers import SentenceTransformer

    saved = chat_folder(model_folder, tmp_path, template, pooling, max_length, processing)
    logging.disable(logging.WARNING)
    theirs = SentenceTransformer(str(saved), device="cpu")
    checkpoint = Folder(saved)
    tokenizer = load_tokenizer(checkpoint)
    model = theirs[0].model.eval()
    for name in (None, "query", "document"):
        options = {} if name is None else {"prompt_name": name}
        task = make_task("embed", checkpoint, tokenizer, truncate=True, **options)
        for text, work in zip(LONG, task.prepare(LONG), strict=True):
            prompt = theirs.prompts[name] if name else None
            expected = theirs[0].preprocess([text], prompt=prompt)["input_ids"][0].tolist()
            expected = expected[:1] if pooling == "cls" else expected  # the first row sees nothing else
            assert work.requests[0].tokens.tolist() == expected
            with torch.no_grad():
                hidden = model(input_ids=torch.tensor([expected])).last_hidden_state[0]
            out = task.finish(work.note, [Result(READ[task.readout.kind](hidden).numpy())])
            np.testing.assert_allclose(out.embedding, theirs.encode(text, **options), atol=2e-6)
    logging.disable(logging.NOTSET)


def test_chat_messages_too_long_are_refused_unless_they_may_be_cut(model_folder, tmp_path):
    checkpoint = Folder(chat_folder(model_folder, tmp_path, CHATML, "lasttoken", 20))
    (bad,) = make_task("embed", checkpoint, load_tokenizer(checkpoint)).prepare(["Zz" * 40])
    assert isinstance(bad, InputError) and bad.code == "too_long"
    with pytest.raises(InputError, match="give prompt instead, which becomes the system message"):
        make_task("embed", checkpoint, load_tokenizer(checkpoint), instruction="find")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modality_config": {"text": {"method": "get_text_features", "method_output_name": "x"}}}, "own method"),
        ({"processing_kwargs": {"text": {"max_length": 5}}}, "processing_kwargs"),
        ({"processing_kwargs": {"chat_template": {"max_length": 5}}}, "processing_kwargs"),
        ({"do_lower_case": True}, "lower-cases chat messages"),
    ],
)
def test_what_is_not_followed_is_refused(model_folder, tmp_path, change, message):
    saved = chat_folder(model_folder, tmp_path, CHATML, "lasttoken", 20)
    path = saved / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModelError, match=message):
        make_task("embed", Folder(saved), None)
