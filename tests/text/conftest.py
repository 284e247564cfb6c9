"""Trained tokenizers, made once."""

from __future__ import annotations

import pytest
from small_tokenizers import byte_level, sentencepiece


@pytest.fixture(scope="session")
def backends() -> dict[str, str]:
    """Trained tokenizers by family, as tokenizer.json text (each test makes its own object of one)."""
    kinds = ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken")
    return {kind: byte_level(kind).to_str() for kind in kinds} | {"sentencepiece": sentencepiece().to_str()}
