"""Sorted requests in memory or in a file; several threads can read ranges at once.

A file contains the requests one after the other. Its index has 16 bytes per request. The index is memory-mapped.
"""

from __future__ import annotations

import heapq
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..spec.requests import Grammar, Medium, Namespace, Request, Sampling
from .ragged import common_prefix_lengths
from .tempfiles import TempFile

_SAMPLING = {field.name: field.default for field in fields(Sampling)}


# Most requests of a job have the same options as the previous request, so both directions are cached. (The cache treats
# 1 and 1.0 as equal keys, and they mean the same.)
@lru_cache(maxsize=64)
def encode_options(sampling: Sampling | None, priority: int) -> bytes:
    """Return a request's sampling and priority as JSON, without defaults; b"" if all are defaults."""
    values: dict[str, Any] = {"priority": priority} if priority else {}
    if sampling is not None:
        values["sampling"] = changed = {name: getattr(sampling, name) for name in _SAMPLING}
        for name in [name for name, value in changed.items() if value == _SAMPLING[name]]:
            del changed[name]
        if sampling.grammar is not None:
            changed["grammar"] = [sampling.grammar.kind, sampling.grammar.text, sampling.grammar.compact]
    return json.dumps(values, separators=(",", ":")).encode() if values else b""


@lru_cache(maxsize=64)
def decode_options(data: bytes) -> tuple[Sampling | None, int]:
    """Return the sampling and the priority that `encode_options` wrote to `data`."""
    values = json.loads(data) if data else {}
    priority, changed = values.get("priority", 0), values.get("sampling")
    if changed is None:
        return None, priority
    if "grammar" in changed:
        changed["grammar"] = Grammar(*changed["grammar"])
    return Sampling(**{name: _tuples(value) for name, value in changed.items()}), priority


@lru_cache(maxsize=64)
def encode_namespace(namespace: Namespace) -> bytes:
    """Return the namespace of a request as JSON; b"" for the default namespace.

    `namespace.parts` must be empty: an engine adds parts only when it opens the request.
    """
    assert not namespace.parts
    names = [namespace.adapter, namespace.salt]
    return json.dumps(names, ensure_ascii=False).encode("utf-8", "surrogatepass") if any(names) else b""


@lru_cache(maxsize=64)
def decode_namespace(data: bytes) -> Namespace:
    """Return the namespace that `encode_namespace` wrote to `data`."""
    return Namespace(*json.loads(data.decode("utf-8", "surrogatepass"))) if data else Namespace()


def _tuples(value: Any) -> Any:
    """Return a JSON value with its lists as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# A request's header in a file: its number, its tokens, its targets (-1: no targets), and the sizes in bytes of its tag,
# options and namespace.
_HEADER = struct.Struct("<QIiIII")
_INDEX = np.dtype([("offset", "<i8"), ("length", "<i4"), ("shared", "<i4")])
_CHUNK_TOKENS = 1 << 16
_BUFFER = 1 << 20


class SpooledRequest(NamedTuple):
    """A request in a spool or a feed. It compares as (namespace, tokens, arrival)."""

    namespace: Namespace
    key: bytes  # the token ids as big-endian int32: byte order is token order
    number: int  # place in the order of arrival
    targets: bytes | None  # native int32
    tag: bytes
    options: bytes = b""  # see `encode_options`
    media: tuple[Medium, ...] = ()  # empty if the spool holds them; never written to files

    @property
    def num_tokens(self) -> int:
        return len(self.key) // 4

    @property
    def tokens(self) -> np.ndarray:
        return np.frombuffer(self.key, ">i4").astype(np.int32)


def encode(request: Request, tag: bytes = b"", number: int = 0) -> SpooledRequest:
    """Return a request as a SpooledRequest.

    Raise InputError if tokens or targets are not flat arrays of ids from 0 to 2**31 - 1, if there are no tokens, or if
    there are more targets than tokens.
    """
    key = _ids(request.tokens, "tokens", ">i4")
    targets = None if request.targets is None else _ids(request.targets, "targets", "=i4")
    options = encode_options(request.sampling, request.priority)
    if not key:
        raise InputError("tokens is empty", field="tokens", remedy="a request has at least one token")
    if targets is not None and len(targets) > len(key):
        message = f"{len(targets) // 4} targets for {len(key) // 4} tokens"
        raise InputError(message, field="targets", remedy="each target needs the row of a token")
    return SpooledRequest(request.namespace, key, number, targets, bytes(tag), options, request.media)


def _ids(array: Any, name: str, dtype: str) -> bytes:
    """Return the ids as bytes of the 4-byte type `dtype`. Raise InputError, naming the field `name`."""
    array = np.asarray(array)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        message = f"{name} is an array of {array.dtype} with {array.ndim} dimensions"
        raise InputError(message, field=name, remedy="give a flat array of integers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        bad = int(np.argmax((array < 0) | (array >= 2**31)))
        raise InputError(
            f"{name}[{bad}] is {int(array[bad])}", field=name, remedy="token ids lie between 0 and 2**31 - 1"
        )
    return array.astype(dtype).tobytes()


class Order:
    """The requests of a spool in lexicographic order. Any thread may read ranges."""

    lengths: np.ndarray  # int32 [requests]: tokens of each request
    shared: np.ndarray  # int32 [requests]: leading tokens that each request shares with the previous one

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, start: int, stop: int) -> Iterator[SpooledRequest]:
        """Yield the requests from `start` up to, not including, `stop`."""
        raise NotImplementedError


class MemoryOrder(Order):
    """The order of requests in memory."""

    def __init__(self, requests: Sequence[SpooledRequest]):
        self._requests = requests
        chunks = list(_with_shared(requests))
        self.lengths = np.array([r.num_tokens for r in requests], np.int32)
        self.shared = np.concatenate([shared for _, shared in chunks]) if chunks else np.zeros(0, np.int32)

    def read(self, start: int, stop: int) -> Iterator[SpooledRequest]:
        return iter(self._requests[start:stop])


class FileOrder(Order):
    """The order of requests in a temporary file; its index is in another file."""

    def __init__(self, requests: Iterable[SpooledRequest], directory: str | os.PathLike[str] | None = None):
        self._file, index_file = TempFile(directory), TempFile(directory)
        for chunk, shared in _with_shared(requests):
            parts = [request_bytes(request) for request in chunk]
            index = np.empty(len(chunk), _INDEX)
            index["shared"] = shared
            index["length"] = [request.num_tokens for request in chunk]
            index["offset"] = self._file.end + np.cumsum([0, *map(len, parts[:-1])])
            self._file.append(parts)
            index_file.append([index.tobytes()])
        self._index = np.frombuffer(index_file.mapped() if index_file.end else b"", _INDEX)
        self.lengths, self.shared = self._index["length"], self._index["shared"]

    def read(self, start: int, stop: int) -> Iterator[SpooledRequest]:
        if start >= stop:
            return
        buffering = _BUFFER if stop - start > 64 else 1 << 14
        with self._file.reader(int(self._index["offset"][start]), self._file.end, buffering) as file:
            yield from islice(read_requests(file), stop - start)


def _with_shared(requests: Iterable[SpooledRequest]) -> Iterator[tuple[list[SpooledRequest], np.ndarray]]:
    """Yield sorted requests in chunks, with the number of leading tokens shared with the previous request."""
    chunk: list[SpooledRequest] = []
    last: list[SpooledRequest] = []
    tokens = 0

    def compared() -> tuple[list[SpooledRequest], np.ndarray]:
        joined, offsets = join([*last, *chunk])
        shared = common_prefix_lengths(joined, offsets, np.arange(len(offsets) - 1)).astype(np.int32)[len(last) :]
        before = [*(last or chunk[:1]), *chunk[:-1]]
        shared[[a.namespace != b.namespace for a, b in zip(before, chunk, strict=True)]] = 0
        return chunk, shared

    for request in requests:
        chunk.append(request)
        tokens += request.num_tokens
        if tokens >= _CHUNK_TOKENS:
            yield compared()
            last, chunk, tokens = chunk[-1:], [], 0
    if chunk:
        yield compared()


def unique_tokens(orders: Iterable[Order]) -> int:
    """Return the number of rows of one stream with the requests of all `orders`. Reads each order once."""
    merged = heapq.merge(*(order.read(0, len(order)) for order in orders), key=lambda request: request[:2])
    return sum(
        sum(request.num_tokens for request in chunk) - int(shared.sum()) for chunk, shared in _with_shared(merged)
    )


def join(requests: Sequence[SpooledRequest]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of requests as a ragged array: (tokens, offsets)."""
    tokens = np.frombuffer(b"".join([r.key for r in requests]), ">i4").astype(np.int32)
    offsets = np.zeros(len(requests) + 1, np.int64)
    np.cumsum([r.num_tokens for r in requests], out=offsets[1:])
    return tokens, offsets


def request_bytes(request: SpooledRequest) -> bytes:
    """Return a request as bytes for a file."""
    targets, key, namespace = request.targets, request.key, encode_namespace(request.namespace)
    num_targets = -1 if targets is None else len(targets) // 4
    sizes = (len(request.tag), len(request.options), len(namespace))
    header = _HEADER.pack(request.number, len(key) // 4, num_targets, *sizes)
    return b"".join((header, key, targets or b"", request.tag, request.options, namespace))


def read_requests(file: Any) -> Iterator[SpooledRequest]:
    """Yield the requests of a file from its current position on."""
    read = file.read
    while header := read(_HEADER.size):
        number, num_tokens, num_targets, num_tag, num_options, num_namespace = _HEADER.unpack(header)
        key = read(4 * num_tokens)
        targets = None if num_targets < 0 else read(4 * num_targets)
        tag, options = read(num_tag), read(num_options)
        yield SpooledRequest(decode_namespace(read(num_namespace)), key, number, targets, tag, options)
