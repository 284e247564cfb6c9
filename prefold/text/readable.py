"""Prompts as people read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..prefix import MEDIA_BASE, SPAN_BASE


def readable(decode: Callable[[np.ndarray], str]) -> Callable[[np.ndarray], str]:
    """Returns a function that gives the text of token ids as `decode` does, with "[image]" for the rows of an image."""

    def read(tokens: np.ndarray) -> str:
        tokens = np.asarray(tokens)
        if not len(tokens) or tokens.max() < MEDIA_BASE:
            return decode(tokens)
        # Ids of one image's rows go up by one; between spans one is unused.
        kind = (tokens >= MEDIA_BASE).astype(int) + (tokens >= SPAN_BASE)
        edges = (kind[1:] != kind[:-1]) | ((kind[1:] > 0) & (tokens[1:] != tokens[:-1] + 1))
        parts = np.split(tokens, np.flatnonzero(edges) + 1)
        return "".join("[image]" if part[0] >= MEDIA_BASE else decode(part) for part in parts)

    return read
