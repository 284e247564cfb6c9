"""What a port of RadixAttention to a server of text and images did, as a specimen: why its answers got worse.

The port (llama.cpp's server, Gemma 3, LLaVA-Bench: latency +4.2 %, similarity -22 %) had one trie a slot, of the slot's
last prompt. It matched prompts with their images filtered out, and took a match for one where it covered a quarter of
the text. Rows of text, and the rows of the image between them, then stayed as they lay: those of the picture before.

`Port` makes the requests that an exact cache needs to do the same: where a prompt's text begins as the last one's did,
over at least `coverage` of it and beyond its images, its images are known by the ids of the last one's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefold.spec.requests import Request
from prefold.trie import MEDIA_BASE

COVERAGE = 0.25


class Port:
    """A Port has the last request of a slot. reused: how many requests took rows of another image for their own."""

    def __init__(self, coverage: float = COVERAGE):
        self.coverage, self.reused = coverage, 0
        self._last: Request | None = None

    def request(self, request: Request) -> Request:
        """Returns a request as the port would have understood it, which is the slot's last one from now on."""
        last, self._last = self._last, request
        if last is None:
            return request
        here, there = (one.tokens >= MEDIA_BASE for one in (request, last))
        rows = np.flatnonzero(here)
        if not len(rows) or not np.array_equal(rows, np.flatnonzero(there)):
            return request
        text, before = request.tokens[~here], last.tokens[~there]
        size = min(len(text), len(before))
        matched = int(np.append(text[:size] != before[:size], True).argmax())
        # The images lie within what is matched where it goes on behind the text that stands before their end.
        if matched < self.coverage * len(text) or matched <= rows[-1] + 1 - len(rows):
            return request
        tokens = request.tokens.copy()
        tokens[here] = last.tokens[there]
        self.reused += int(not np.array_equal(tokens, request.tokens))
        self._last = replace(request, tokens=tokens, media=last.media)
        return self._last
