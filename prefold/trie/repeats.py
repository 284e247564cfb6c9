"""Join equal requests of a job, so that an engine computes each of them once.

Requests are equal if their namespace, tokens, targets and options are equal. A sampled request without a seed equals no
other request, because each one must get its own answer. Sorted requests with equal prompts are neighbours, so a spool
finds equal requests without extra memory. One request then carries all their tags as one packed tag; `read_tags`
unpacks it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from .order import SpooledRequest, decode_options

_HEADER = struct.Struct("<II")  # number of tokens of the prompt, number of tags
_TAG = struct.Struct("<II")  # number of tokens that the request adds to the job's count, size of the tag in bytes
# Byte limit on the tags held for one prompt. Its requests so far are yielded when their tags exceed the limit, so a
# table of only equal records does not fill the memory.
_MOST_BYTES = 1 << 20


class CountedTag(NamedTuple):
    """The tag of a request, with the tokens that the request adds to the job's count."""

    tag: bytes
    tokens: int  # number of tokens of the prompt; 0 for a twin, because its prompt was counted (see `Window.twins`)


def pack_tags(num_tokens: int, tags: Sequence[CountedTag]) -> bytes:
    """Return the tags of equal requests as one tag. `num_tokens` is the length of their prompt in tokens."""
    heads = b"".join(_TAG.pack(tokens, len(tag)) for tag, tokens in tags)
    return b"".join((_HEADER.pack(num_tokens, len(tags)), heads, *(tag for tag, _ in tags)))


def read_tags(packed: bytes) -> tuple[int, list[CountedTag]]:
    """Return the length of the prompt in tokens, and the tags that `pack_tags` packed."""
    num_tokens, count = _HEADER.unpack_from(packed)
    place, tags = _HEADER.size + count * _TAG.size, []
    for tokens, size in _TAG.iter_unpack(packed[_HEADER.size : place]):
        tags.append(CountedTag(packed[place : (place := place + size)], tokens))
    return num_tokens, tags


def is_repeatable(options: bytes) -> bool:
    """Return True if equal requests with these options (see `encode_options`) have equal answers."""
    sampling, _ = decode_options(options)
    return sampling is None or not sampling.temperature or sampling.seed is not None


@dataclass(slots=True)
class _Equal:
    """A request with the tags of all requests that equal it."""

    request: SpooledRequest
    tags: list[CountedTag] = field(default_factory=list)

    def joined(self) -> SpooledRequest:
        return self.request._replace(tag=pack_tags(self.request.num_tokens, self.tags))


def join_repeats(requests: Iterable[SpooledRequest]) -> Iterator[SpooledRequest]:
    """Join equal requests in a sorted iterable, and yield the requests in the same order.

    The tag of each yielded request is packed, even if the request equals no other.
    """
    for _, prompts in groupby(requests, itemgetter(0, 1)):
        equal: dict[object, _Equal] = {}
        size = 0  # bytes of the tags in `equal`
        last = -2  # number of the previous request; -2: no request follows it directly, not even number 0
        rounds = 0  # number of equal prompts before the current one, which may have several reads (twins)
        for request in prompts:
            key = (request.targets, request.options if is_repeatable(request.options) else request.number)
            entry = equal.setdefault(key, _Equal(request))
            continued = decode_options(request.options)[0] is not None  # generates text, so it is never a twin
            # A twin follows the previous request directly. If `entry` already has a tag of the current prompt, the
            # request is not a twin: it starts the next equal prompt.
            again = not continued and request.number == last + 1 and len(entry.tags) <= rounds
            rounds = rounds if again else len(entry.tags)
            last = request.number
            entry.tags.append(CountedTag(request.tag, 0 if again else request.num_tokens))
            size += len(request.tag)
            if size > _MOST_BYTES:
                yield from (entry.joined() for entry in equal.values())
                equal, size, rounds, last = {}, 0, 0, -2
        yield from (entry.joined() for entry in equal.values())


def pack_each(requests: Iterable[SpooledRequest]) -> Iterator[SpooledRequest]:
    """Yield requests with their tags packed, without joining any."""
    for request in requests:
        yield request._replace(tag=pack_tags(request.num_tokens, [CountedTag(request.tag, request.num_tokens)]))
