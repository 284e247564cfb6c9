"""Joins equal requests of a job, so that an engine computes each of them once.

Requests are equal if namespace, tokens, targets and options are. A sampled request without a seed equals no other one:
each is to get an answer of its own. Equal requests lie side by side in sorted order, so that a spool needs no memory to
find them. One request carries the tags of all; the engine sees a single tag, which `read_tags` takes apart again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from .order import SpooledRequest, decode_options

_HEADER = struct.Struct("<II")  # the tokens of the prompt, the number of tags
_TAG = struct.Struct("<II")  # the tokens that the tag's request counts, the bytes of the tag
# Tags of equal requests that one request carries, at most: a table of nothing but equal records stays out of memory.
_MOST_BYTES = 1 << 20


class CountedTag(NamedTuple):
    """A CountedTag is the tag of a request, and how many tokens of the prompt it counts: all, or 0 for a further read
    of a prompt that the request before it counts (see `Window.twins`)."""

    tag: bytes
    tokens: int


def pack_tags(num_tokens: int, tags: Sequence[CountedTag]) -> bytes:
    """Returns the tags of equal requests as one tag. num_tokens: of their prompt"""
    heads = b"".join(_TAG.pack(tokens, len(tag)) for tag, tokens in tags)
    return b"".join((_HEADER.pack(num_tokens, len(tags)), heads, *(tag for tag, _ in tags)))


def read_tags(packed: bytes) -> tuple[int, list[CountedTag]]:
    """Returns (the tokens of the prompt, the tags that `pack_tags` joined)."""
    num_tokens, count = _HEADER.unpack_from(packed)
    place, tags = _HEADER.size + count * _TAG.size, []
    for tokens, size in _TAG.iter_unpack(packed[_HEADER.size : place]):
        tags.append(CountedTag(packed[place : (place := place + size)], tokens))
    return num_tokens, tags


def is_repeatable(options: bytes) -> bool:
    """Returns whether equal requests with these options (see `encode_options`) have equal answers."""
    sampling, _ = decode_options(options)
    return sampling is None or not sampling.temperature or sampling.seed is not None


@dataclass(slots=True)
class _Equal:
    """An _Equal is a request, and the tags of the requests that equal it."""

    request: SpooledRequest
    tags: list[CountedTag] = field(default_factory=list)

    def joined(self) -> SpooledRequest:
        return self.request._replace(tag=pack_tags(self.request.num_tokens, self.tags))


def join_repeats(requests: Iterable[SpooledRequest]) -> Iterator[SpooledRequest]:
    """Yields sorted requests with equal ones joined, in the same order. All tags are packed, also those of requests
    without a repeat."""
    for _, prompts in groupby(requests, itemgetter(0, 1)):
        equal: dict[object, _Equal] = {}
        size, last, rounds = 0, -2, 0  # how often the prompt has begun anew
        for request in prompts:
            key = (request.targets, request.options if is_repeatable(request.options) else request.number)
            entry = equal.setdefault(key, _Equal(request))
            continued = decode_options(request.options)[0] is not None
            again = not continued and request.number == last + 1 and len(entry.tags) <= rounds
            rounds = rounds if again else len(entry.tags)
            last = request.number
            entry.tags.append(CountedTag(request.tag, 0 if again else request.num_tokens))
            size += len(request.tag)
            if size > _MOST_BYTES:
                yield from (entry.joined() for entry in equal.values())
                equal, size = {}, 0
        yield from (entry.joined() for entry in equal.values())


def pack_each(requests: Iterable[SpooledRequest]) -> Iterator[SpooledRequest]:
    """Yields requests with their tags packed, each by itself."""
    for request in requests:
        yield request._replace(tag=pack_tags(request.num_tokens, [CountedTag(request.tag, request.num_tokens)]))
