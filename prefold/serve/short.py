"""What the event loop does itself, and what it leaves to threads.

To hand work to another thread, and to be woken by it, takes a tenth of a millisecond: what takes about as long the
event loop does at once. Anything longer would hold up everybody's streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text.media import chat_of
from ..types import Generated

# The bytes of a body, the texts to generate, and the results and tokens of an answer, that are short.
SHORT_BYTES, SHORT_SAMPLES, SHORT_RESULTS, SHORT_TOKENS = 4096, 16, 16, 1024
# A token with the most likely ones beside it is as long as so many tokens.
TOKENS_A_LOGPROB = 16


def are_soon_ready(items: Sequence[Any], num_bytes: int) -> bool:
    """Returns whether requests are soon made of items: their body is short, few texts are to be generated, no grammar
    is to be compiled, and none brings a chat template, which is a program and may take all the time that it is
    allowed."""
    if num_bytes > SHORT_BYTES or num_samples(items) > SHORT_SAMPLES:
        return False
    found = [item for item in items if isinstance(item, Mapping)]
    return not any((one.get("sampling") or {}).get("grammar") or has_template(one) for one in found)


def num_samples(items: Sequence[Any]) -> int:
    """Returns how many texts are generated for items; an item of another task, or that is wrong, counts once."""
    asked = ((one.get("sampling") or {}).get("n") if isinstance(one, Mapping) else 1 for one in items)
    return sum(n if isinstance(n, int) and n > 1 else 1 for n in asked)


def has_images(item: Any) -> bool:
    """Returns whether images are to be decoded for an item. One may keep others waiting for long."""
    return isinstance(item, Mapping) and (bool(item.get("images")) or chat_of(item.get("messages")) is not None)


def has_template(item: Any) -> bool:
    """Returns whether an item brings a chat template, or names one."""
    return isinstance(item, Mapping) and item.get("chat_template") is not None


def are_short(results: Iterable[Sequence[Any]]) -> bool:
    """Returns whether it takes no time to make what a task gives of the engine's results: each of a few Results, or
    lists of Generated."""
    found = [result for some in results for result in some]
    texts = [one for result in found if isinstance(result, list) for one in result]
    return len(found) <= SHORT_RESULTS and sum(map(_length, texts)) <= SHORT_TOKENS


def are_soon_written(results: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether it takes no time to write a response of what a task gives."""
    texts = [choice for result in results for choice in result.get("choices") or [result]]
    numbers = sum(result.get("num_generated", 0) for result in results)
    vectors = sum(len(result["embeddings"]) if "embeddings" in result else 1 for result in results)
    told = sum(len(one.get(name) or ()) for name, some in (("logprobs", texts), ("prompt", results)) for one in some)
    return vectors <= SHORT_RESULTS and numbers + TOKENS_A_LOGPROB * told <= SHORT_TOKENS


def _length(text: Generated) -> int:
    return len(text.tokens) * (1 if text.logprobs is None else TOKENS_A_LOGPROB)
