"""Kept answers: which answers are kept for later jobs and calls, and under which keys.

A key is a digest of everything that an answer depends on: the model's files, the arithmetic, and the request with its
read-out. Answers that were sampled without a seed are not kept, and neither are errors. A kept answer can differ from a
new one by floating-point reordering, because other requests were in its batch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np

from ..checkpoint import Checkpoint
from ..checkpoint.identity import folder_digest, model_identity
from ..engine.requests import Answer
from ..spec.model import ModelSpec
from ..spec.requests import Generated, Readout, Request, Result
from ..trie.order import decode_options, encode, encode_options, read_requests, request_bytes
from .kept_file import AnswersFile
from .results import all_finite

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)  # key of requests whose answers are not kept
# Options of a model that are left out of its identity. They change no answer beyond floating-point reordering, or the
# identity has them in another form.
NEUTRAL = {
    "max_batch_rows", "cache_prefill", "kv_memory", "state_memory", "max_running", "reserve_output", "threads",
    "revision", "dtype", "device", "adapters", "cache", "answers", "answers_bytes",
}  # fmt: skip
# One in this many answers is stored with its request, so that it can be verified.
_VERIFIABLE = 16


class _Stored(msgspec.Struct, array_like=True, tag="numbers"):
    """A stored Result."""

    values: bytes
    shape: tuple[int, ...]
    greedy: bytes | None


class _Texts(msgspec.Struct, array_like=True, tag="texts"):
    """The stored samples of a request."""

    samples: list[Generated]


class _Asked(msgspec.Struct, array_like=True):
    """A stored request."""

    readout: Readout
    request: bytes


_ANSWERS, _ASKED = msgspec.msgpack.Decoder(_Stored | _Texts), msgspec.msgpack.Decoder(_Asked)


def answer_bytes(answer: Answer) -> bytes | None:
    """Return an answer as bytes, or None if it must not be kept."""
    if isinstance(answer, Result):
        if not np.isfinite(answer.values).all():
            return None
        greedy = None if answer.greedy is None else answer.greedy.astype(bool).tobytes()
        return msgspec.msgpack.encode(_Stored(answer.values.astype("<f4").tobytes(), answer.values.shape, greedy))
    if not isinstance(answer, list):
        return None
    if any(one.finish_reason == "cancelled" for one in answer):
        return None
    return msgspec.msgpack.encode(_Texts(answer)) if all_finite([asdict(one) for one in answer]) else None


def read_answer(data: bytes) -> Answer:
    """Return the answer that `answer_bytes` wrote."""
    stored = _ANSWERS.decode(data)
    if isinstance(stored, _Texts):
        return stored.samples
    values = np.frombuffer(stored.values, "<f4").reshape(stored.shape).astype(np.float32)
    return Result(values, None if stored.greedy is None else np.frombuffer(stored.greedy, bool).copy())


def is_kept(request: Request, *, has_seed: bool) -> bool:
    """Return whether the answer of a request may be kept.

    Args:
        has_seed: The user gave the list or job a seed.
    """
    sampling = request.sampling
    return sampling is None or not sampling.temperature or sampling.seed is not None or has_seed


class KeptAnswers:
    """The kept answers of one model, in a file.

    Args:
        file: the file with the answers of all models
        identity: the result of `answers_identity`
        adapters: {name: digest} of the LoRA adapters

    Attributes:
        model: number of this model in the file
    """

    def __init__(self, file: AnswersFile, identity: Mapping[str, object], adapters: Mapping[str, str]):
        self.file, self._adapters = file, adapters
        text = json.dumps(identity, sort_keys=True)
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self.model = file.model(self._digest, text)

    def of(self, readout: Readout) -> KeptReads:
        """Return the kept answers that have this read-out."""
        return KeptReads(self, replace(readout, keeps=False))

    def key(self, readout: Readout, request: Request) -> bytes:
        """Return the key of a request's answer."""
        tokens, media = _without_ids(request)
        name = request.namespace.adapter
        options = encode_options(request.sampling, 0).decode()
        parts = [repr(readout), self._adapters.get(name, name), request.namespace.salt, options, media, tokens.size]
        digest = hashlib.blake2b(json.dumps(parts).encode("utf-8", "surrogatepass"), digest_size=16, key=self._digest)
        digest.update(tokens.tobytes())
        digest.update(b"" if request.targets is None else request.targets.astype("<i8").tobytes())
        return digest.digest()

    def close(self) -> None:
        """Write the new answers, and close the file."""
        self.file.close()


@dataclass(frozen=True, slots=True)
class KeptReads:
    """The kept answers that have one read-out."""

    kept: KeptAnswers
    readout: Readout

    def find(self, requests: Sequence[Request], originals: Sequence[Request], has_seed: bool) -> list[KeyedRequest]:
        """Return each request with its key, and with its answer if the answer is kept.

        Args:
            requests: The requests to look up.
            originals: The same requests as the user wrote them, without seeds derived from the seed of the list.
            has_seed: The user gave the list or job a seed.
        """
        keys = [
            self.kept.key(self.readout, request) if is_kept(original, has_seed=has_seed) else NO_KEY
            for request, original in zip(requests, originals, strict=True)
        ]
        found = self.kept.file.find(key for key in keys if key != NO_KEY)
        keyed = []
        for key, request in zip(keys, requests, strict=True):
            answer = found.get(key)
            keyed.append(KeyedRequest(key, request, None if answer is None else read_answer(answer)))
            if answer is None and key != NO_KEY and not request.media and key[0] % _VERIFIABLE == 0:
                asked = _Asked(self.readout, request_bytes(encode(request)))
                self.kept.file.add_request(key, msgspec.msgpack.encode(asked))
        return keyed

    def keep(self, key: bytes, answer: Answer) -> None:
        """Keep an answer under its key."""
        if key != NO_KEY and (data := answer_bytes(answer)) is not None:
            self.kept.file.add(self.kept.model, key, data)
            self.kept.file.commit(due_only=True)


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with the key of its answer, and the answer if it is kept."""

    key: bytes
    request: Request
    answer: Answer | None


def read_request(data: bytes) -> tuple[Readout, Request]:
    """Return the read-out and the request that are stored with some answers."""
    asked = _ASKED.decode(data)
    (spooled,) = read_requests(BytesIO(asked.request))
    targets = None if spooled.targets is None else np.frombuffer(spooled.targets, np.int32)
    sampling, _ = decode_options(spooled.options)
    return asked.readout, Request(spooled.tokens, targets, sampling, spooled.namespace)


def _without_ids(request: Request) -> tuple[np.ndarray, list[str]]:
    """Return (the tokens of a request, int64 [n]; the keys of its media in the order of their first rows).

    The ids of image rows differ between processes. They are replaced by negative numbers that encode image and row.
    """
    tokens = request.tokens.astype("<i8")
    places = []
    for medium in request.media:
        rows = np.flatnonzero(np.isin(request.tokens, medium.ids))
        places.append((int(rows[0]) if rows.size else -1, rows, medium))
    places.sort(key=lambda place: place[0])
    for number, (_, rows, medium) in enumerate(places):
        order = np.argsort(medium.ids)
        at = order[np.searchsorted(medium.ids, request.tokens[rows], sorter=order)]
        tokens[rows] = -1 - ((number << 32) + at)
    return tokens, [medium.key.hex() for _, _, medium in places]


# ------------------------------------------------------------------------------------------------ opening


def open_kept(
    spec: ModelSpec, checkpoint: Checkpoint, dtype: object, device: object, notify: Callable[[str], None]
) -> KeptAnswers | None:
    """Return the kept answers of a model, or None if its options name no folder for them.

    Args:
        spec: The options of the model.
        checkpoint: The model.
        dtype: The torch dtype it computes in.
        device: The device it computes on.
        notify: Called with a line for the user if the file is damaged.
    """
    if spec.answers is None:
        return None
    file = AnswersFile(Path(spec.answers), spec.answers_bytes, notify)
    adapters = {name: folder_digest(Path(folder), file.file_digest) for name, folder in (spec.adapters or {}).items()}
    words = str(dtype).removeprefix("torch."), str(device)
    return KeptAnswers(file, answers_identity(spec, checkpoint, *words, file.file_digest), adapters)


def answers_identity(
    spec: ModelSpec, checkpoint: Checkpoint, dtype: str, device: str, read: Callable[[Path], str]
) -> dict[str, object]:
    """Return everything besides requests and adapters that answers depend on, as JSON.

    These are the version of prefold, the model's files, the dtype, the kernels or device, and the options.

    Args:
        read: Returns a digest of a whole file.
    """
    from ..kernels import status

    options: dict[str, object] = {}
    for entry in fields(spec):
        if entry.name not in NEUTRAL:
            value = getattr(spec, entry.name)
            options[entry.name] = repr(value) if value != entry.default else None
    options["sharing"] = "full" if spec.sharing == "auto" else spec.sharing
    cache = [] if spec.cache is None else [entry.name for entry in fields(spec.cache) if entry.metadata["journal"]]
    options |= {name: repr(getattr(spec.cache, name)) for name in cache}
    given = {name: value for name, value in options.items() if value not in (None, "None")}
    computes = status() if device == "cpu" else device.partition(":")[0]
    model = model_identity(checkpoint, read)
    version = sys.modules["prefold"].__version__  # importing it here would be circular
    return {"prefold": version, "model": model, "dtype": dtype, "computes": computes, "options": given}
