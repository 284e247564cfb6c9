"""Checkpoints and a tokenizer of one token a byte (but for a few words), to follow by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from prefold.spec.requests import Result
from prefold.text import Tokenizer as PrefoldTokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "a"), ("Ġ", "b"), ("a", "b")]


def backend(post: str | None = None, chatml: bool = True, think: bool = False) -> Tokenizer:
    """Ids: 0-2 the special tokens, then the bytes, then what the merges give. `post`: as TemplateProcessing has it."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = SPECIALS if chatml else SPECIALS[:1]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if think:
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    if post is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=post, special_tokens=[(t, i) for i, t in enumerate(SPECIALS)]
        )
    return tokenizer


def tokenizer(post: str | None = None, **options: Any) -> PrefoldTokenizer:
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    side = options.pop("truncation_side", "right")
    named = options.pop("special_tokens", named)
    return PrefoldTokenizer(backend(post, **options), special_tokens=named, truncation_side=side)


class FakeCheckpoint:
    """A checkpoint of a config and JSON files, none of them on disk."""

    format = "folder"
    name = "fake"
    path = None
    gguf = None

    def __init__(self, config: dict[str, Any] | None = None, files: dict[str, Any] | None = None):
        sizes = {"max_position_embeddings": 512, "vocab_size": 300, "hidden_size": 8, "intermediate_size": 8}
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        named = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
        self.config = named | sizes | (config or {})
        self.files = files or {}

    def read_json(self, name: str) -> Any:
        return json.loads(json.dumps(self.files[name])) if name in self.files else None

    def file(self, name: str) -> Path | None:
        return None

    def metadata(self, key: str, default: Any = None) -> Any:
        return default


class FakeGguf(FakeCheckpoint):
    format = "gguf"
    gguf = "read"

    def __init__(self, metadata: dict[str, Any]):
        super().__init__()
        self._metadata = metadata

    def metadata(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)


def result(*values: float, greedy: list[bool] | None = None) -> Result:
    return Result(np.array(values, dtype=np.float32), None if greedy is None else np.array(greedy))


def ids(tok: PrefoldTokenizer, text: str) -> list[int]:
    return tok.encode(text, special=False).tolist()


CHAT = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ who or 'assistant' }}\n{% endif %}"
)


def chatty(post=None):
    plain = tokenizer(post)
    return PrefoldTokenizer(plain.backend, special_tokens=plain.special_tokens, chat_templates={"default": CHAT})
