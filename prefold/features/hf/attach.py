"""Register transformers' modules in the core's tables, for architectures without a prefold family. No torch."""

from __future__ import annotations

from ...model.families import add_fallback
from .config import ABOUT, family_of

add_fallback(family_of, ABOUT)
