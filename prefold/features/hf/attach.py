"""Enters transformers' modules in the tables of the core, for architectures that no family takes. No torch."""

from __future__ import annotations

from ...model.families import add_fallback, add_families
from .config import ABOUT, family_of

_GEMMA3N = "its layers add embeddings of their own and mix several residual streams (AltUp); Gemma 3 and 4 work"

add_fallback(family_of, ABOUT)
add_families(
    {},
    model_types={"gemma3n": "Gemma3nForConditionalGeneration", "gemma3n_text": "Gemma3nForCausalLM"},
    refused=dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma3nTextModel"), _GEMMA3N),
)
