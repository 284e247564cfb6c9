"""Names the fields of vLLM's requests about tokens, which compute nothing."""

from __future__ import annotations

__all__ = ["DETOKENIZE_NAMES", "TOKENIZE_NAMES"]

# Beside those of the completion, or the chat, whose prompt is tokenized.
TOKENIZE_NAMES = ("add_special_tokens", "return_token_strs")
DETOKENIZE_NAMES = ("model", "tokens")
