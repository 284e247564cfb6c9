"""Open requests of the generator, and readers for the tokens and values that steps return."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError, no_lm_head
from ..spec.requests import Asked, Generated, Namespace, Owner, Readout, Request, Result, Sharing, TokenLogprobs
from ..text import Tokenizer
from ..text.detokenize import Detokenizer
from ..text.grammar import GrammarCompiler
from .samples import OnText, Sample
from .schedule.parts import EnginePart, hooks
from .worker import Facts

# Kinds of Readout that read only a prompt's last row. "logprobs" of a single target does too.
LAST_ROW_KINDS = ("last", "head", "logits")
# Kinds of Readout that need an LM head.
_LOGIT_KINDS = ("logits", "logprobs", "tokens")

NO_TARGETS = np.zeros(0, np.int32)

Answer = list[Generated] | Result | InputError


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Namespace part of rows with hidden states kept in their slots.

    All rows of a prompt can then be read in the step of its last row, no matter which request computed them.
    """


@dataclass(frozen=True, slots=True)
class Alone:
    """Namespace part of a request that shares no rows."""

    key: int  # the key of the request


class ValueReader:
    """Receives the values read from a prompt. It has the interface of a Sample without tokens.

    Attributes:
        asked: The Readout.
        targets: int32, for "logprobs": the tokens to score.
        count: How many of the prompt's last rows are read from kept hidden states; None: only the last row is read.
    """

    number = 0
    state = None
    tokens: Sequence[int] = ()

    def __init__(self, readout: Readout, targets: np.ndarray, count: int | None):
        self.asked = self.readout = readout
        self.targets, self.count = targets, count
        self.result: Result | None = None

    @property
    def has_rows(self) -> bool:
        """True if the result has a row, or a value, for each row that is read."""
        return self.readout.kind in ("logprobs", "every")

    @property
    def is_done(self) -> bool:
        """True if the values have been read."""
        return self.result is not None

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> bool:
        """Return True, because the request ends when its values are read."""
        return True

    def cancel(self) -> None:
        """Do nothing: a cancelled request for values has no answer."""


Reader = Sample | ValueReader


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request without an answer so far."""

    key: int
    request: Request
    readers: Sequence[Reader]  # one Sample per sample; for a request that is not continued, one ValueReader
    on_done: Callable[[Any], None]  # called with the answer
    limit: int  # the most tokens of each reader
    reserve: bool  # reserve slots for all these tokens at admission
    namespace: Namespace  # rows are shared only between requests of one namespace
    owner: Owner  # the tenant and the class (interactive or batch)
    again: bool = False  # a twin: another read of a prompt that is counted already
    cached_tokens: int = 0  # prompt rows in the KV store when the first sample was admitted
    noted: dict[str, int] = field(default_factory=dict)  # further fields of each Generated, set by features

    @property
    def rows(self) -> np.ndarray:
        """The ids of the prompt's rows that are computed, int32 [n]."""
        return self.request.tokens

    @property
    def is_done(self) -> bool:
        """True if all its readers are done."""
        return all(reader.is_done for reader in self.readers)

    @property
    def num_tokens(self) -> int:
        """The number of rows that its sequences would have without sharing."""
        return sum(len(self.request.tokens) + max(0, len(reader.tokens) - 1) for reader in self.readers)

    def answer(self) -> Answer:
        """Return the answer to a request that is done.

        The answer is a list with a Generated per sample, or the error of the first sample that failed. For a request
        that is not continued, it is the Result.
        """
        samples = []
        for reader in self.readers:
            if isinstance(reader, ValueReader):
                assert reader.result is not None
                return replace(reader.result, cached_tokens=self.cached_tokens)
            if reader.error is not None:
                return reader.error
            samples.append(reader)
        return [sample.result(self.cached_tokens, **self.noted) for sample in samples]


def joint_readout(readout: Readout, num_targets: Iterable[int]) -> Readout:
    """Return the Readout for all prompts of a group, given the number of targets of each prompt.

    If one prompt needs kept hidden states, all keep them, so that they can share rows.
    """
    return (
        readout if readout.kind != "logprobs" or reads_last_rows(readout, num_targets) else replace(readout, keeps=True)
    )


def num_read_rows(readout: Readout, request: Request) -> int | None:
    """Return how many of a prompt's last rows are read from kept hidden states.

    None means that only the last computed row is read, and nothing needs to be kept.
    """
    if readout.kind in ("mean", "every"):
        return len(request.tokens)
    if readout.kind != "logprobs":
        return None
    targets = 0 if request.targets is None else len(request.targets)
    return targets if readout.keeps or targets != 1 else None


def check_asked(parts: Sequence[EnginePart], asked: Asked, sharing: Sharing = "full") -> None:
    """Raise InputError if an engine with these parts does not support a question with this sharing."""
    for check in hooks(parts, "check"):
        check(asked, sharing)


def reads_last_rows(readout: Readout, num_targets: Iterable[int]) -> bool:
    """Return True if a Readout reads only the last rows of prompts.

    All other rows may then come from the cache, which holds K/V but no results. `num_targets` has the number of targets
    of each prompt, and only matters for "logprobs".
    """
    return all(count == 1 for count in num_targets) if readout.kind == "logprobs" else readout.kind in LAST_ROW_KINDS


class RequestBuilder:
    """Turns a Request into an OpenRequest. Any thread may call it.

    Args:
        reserve: Reserve slots for the whole output of requests that limit its length.
        check: Raises InputError if the engine does not support a request's question.
    """

    def __init__(self, facts: Facts, eos_ids: Sequence[int], *, reserve: bool, check: Callable[[Asked], None]):
        self.facts, self.eos_ids, self._reserve = facts, tuple(eos_ids), reserve
        self._check = check
        self._texts: _TextMakers | None = None

    def build(
        self,
        key: int,
        request: Request,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: OnText | None,
        *,
        readout: Readout | None,
        sharing: bool,
        owner: Owner,
    ) -> OpenRequest:
        """Return the OpenRequest of a request. Raise InputError if the request cannot run.

        Args:
            readout: The read-out, if the request is not continued.
            sharing: The request shares rows with other requests.
            owner: The tenant and the class (interactive or batch) of the request.
        """
        adapter_number(self.facts, request.namespace.adapter)
        check_logits(self.facts, "tokens" if readout is None else readout.kind)
        asked = request.sampling or readout
        assert asked is not None
        self._check(asked)
        namespace = request.namespace if sharing else request.namespace.with_part(Alone(key))
        if request.sampling is None:
            assert readout is not None
            reader = self._reader(readout, request)
            if reader.count is not None:
                namespace = namespace.with_part(KeptStates())
            return OpenRequest(key, request, [reader], on_done, 1, True, namespace, owner)
        room, most = self.facts.max_positions - len(request.tokens), request.sampling.max_tokens
        limit = room if most is None else min(most, room)
        if limit < 1:
            raise InputError(
                f"the prompt has {len(request.tokens)} tokens, but the context has {self.facts.max_positions}",
                field="prompt",
                remedy="shorten it",
                code="too_long",
            )
        samples = self._samples(request, limit, tokenizer, on_text)
        reserve = self._reserve and most is not None
        return OpenRequest(key, request, samples, on_done, limit, reserve, namespace, owner)

    def _reader(self, readout: Readout, request: Request) -> ValueReader:
        count = num_read_rows(readout, request)
        targets = NO_TARGETS if request.targets is None else request.targets
        return ValueReader(readout, targets, count)

    def _samples(
        self, request: Request, limit: int, tokenizer: Tokenizer | None, on_text: OnText | None
    ) -> list[Sample]:
        sampling = request.sampling
        assert sampling is not None
        # No lock is held while a grammar compiles, which may be slow: at worst two threads compile the same grammar.
        texts = self._texts_of(tokenizer, request)
        matcher = None if sampling.grammar is None else texts.grammars.matcher(sampling.grammar)
        detokenizer = None if tokenizer is None else texts.detokenizer
        seed = secrets.randbits(53) if sampling.seed is None else sampling.seed
        return [
            Sample(
                request, number, seed=seed, limit=limit, eos_ids=self.eos_ids, tokenizer=tokenizer,
                detokenizer=detokenizer, on_text=on_text,
                matcher=matcher if matcher is None or number == 0 else matcher.copy(),
            )
            for number in range(sampling.n)
        ]  # fmt: skip

    def _texts_of(self, tokenizer: Tokenizer | None, request: Request) -> _TextMakers:
        """Return the detokenizer and the grammars of a tokenizer. They are cached for the tokenizer used last."""
        if tokenizer is None:
            for field in ("stop", "grammar"):
                if getattr(request.sampling, field):
                    message = f"{field!r} needs a tokenizer, but the model has none"
                    raise InputError(message, field=field, remedy="leave it out", code="no_tokenizer")
        texts = self._texts
        if texts is None or texts.tokenizer is not tokenizer:
            texts = self._texts = _TextMakers(tokenizer, self.facts.vocab_size, self.eos_ids)  # type: ignore[arg-type]
        return texts


class _TextMakers:
    """A tokenizer with its detokenizer and its grammar compiler, each created at its first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_ids)


def check_logits(facts: Facts, kind: str) -> None:
    """Raise InputError if a kind of Readout needs logits but the model has no LM head.

    Every request is checked here before its first step.
    """
    if kind in _LOGIT_KINDS and not facts.has_logits:
        raise no_lm_head()


def adapter_number(facts: Facts, name: str) -> int | None:
    """Return the worker's number of an adapter; None for "". Raise InputError for an unknown adapter."""
    if not name or name in facts.adapters:
        return facts.adapters.index(name) if name else None
    remedy = f"loaded adapters: {', '.join(facts.adapters) or 'none'}"
    raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
