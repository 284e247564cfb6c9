"""Prompts as people read them."""

from __future__ import annotations

import numpy as np

from prefold.text.prompts import readable
from prefold.trie import MEDIA_BASE, SPAN_BASE


def test_images_are_named_and_never_decoded():
    def decode(tokens):
        assert max(tokens, default=0) < 1000
        return "".join(chr(token) for token in tokens)

    read = readable(decode)
    text = [ord(c) for c in "ab"]
    span = [SPAN_BASE + 7, SPAN_BASE + 8]
    next_span = [SPAN_BASE + 10, SPAN_BASE + 11]
    rows = [MEDIA_BASE, MEDIA_BASE + 1]
    assert read(np.array(text)) == "ab"
    assert read(np.array([], np.int32)) == ""
    assert read(np.array([*text, *span, *text])) == "ab[image]ab"
    assert read(np.array([*span, *next_span, *rows, *text])) == "[image][image][image]ab"
