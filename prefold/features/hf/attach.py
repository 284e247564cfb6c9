"""Enters transformers' modules in the tables of the core, for architectures that no family takes. No torch."""

from __future__ import annotations

from ...model.families import add_fallback
from .config import ABOUT, family_of

add_fallback(family_of, ABOUT)
