"""Trained tokenizers, made once."""

from __future__ import annotations

import pytest
from small_tokenizers import byte_level, one_word, sentencepiece


@pytest.fixture(scope="session")
def backends() -> dict[str, str]:
    """Trained tokenizers by family, as tokenizer.json text (each test makes its own object of one)."""
    kinds = ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken")
    others = {"sentencepiece": sentencepiece().to_str(), "gemma": one_word().to_str()}
    return {kind: byte_level(kind).to_str() for kind in kinds} | others
