"""Tokenizers, chat templates and the prompts of tasks: text becomes token ids. Imports no torch."""

from __future__ import annotations

from .chat import ChatTemplates
from .load import load_tokenizer, tokenizer_or_none
from .prompts import (
    EMBED_INSTRUCTION,
    RERANK_INSTRUCTION,
    FewShotPrompt,
    FilledTemplate,
    RerankPrompt,
    instructed_query,
    rerank_prompt,
)
from .tokenizer import Tokenizer
