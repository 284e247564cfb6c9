"""Open requests of the generator, and the readers that take the tokens and numbers which steps read for them."""

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

# The kinds of Readout that are read at a prompt's last row alone; so is "logprobs" of a single target.
LAST_ROW_KINDS = ("last", "head", "logits")
# The kinds of Readout that need an LM head.
_LOGIT_KINDS = ("logits", "logprobs", "tokens")

NO_TARGETS = np.zeros(0, np.int32)

Answer = list[Generated] | Result | InputError


@dataclass(frozen=True, slots=True)
class KeptStates:
    """A KeptStates is the part of the namespace of rows whose hidden states are kept in their slots. All rows of a
    prompt can then be read in the step of its last row, whichever request computed them."""


@dataclass(frozen=True, slots=True)
class Alone:
    """An Alone is the part of the namespace of a request that shares no rows. key: of the request"""

    key: int


class ValueReader:
    """A ValueReader takes the numbers that are read of a prompt. It has the interface of a Sample that makes no
    tokens.

    asked    the Readout
    targets  int32, with "logprobs": the tokens whose log-probabilities are wanted
    count    how many of the prompt's last rows are read, by their kept hidden states; None: only the last row is read
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
        """Returns whether the result has a row, or a number, for each row that is read."""
        return self.readout.kind in ("logprobs", "every")

    @property
    def is_done(self) -> bool:
        """Returns whether the numbers are there."""
        return self.result is not None

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> bool:
        """Returns True: the request ends when its numbers are read."""
        return True

    def cancel(self) -> None:
        """Does nothing: a request for numbers that is cancelled has no answer."""


Reader = Sample | ValueReader


@dataclass(eq=False, slots=True)
class OpenRequest:
    """An OpenRequest is a request that has no answer yet.

    readers        a Sample for each sample; for a request that is not continued, one ValueReader
    on_done        called with the answer
    limit          the most tokens that each reader takes
    reserve        whether room for all of these is set aside at admission
    namespace      rows are shared only between requests of one namespace
    owner          the tenant and the class that it runs for
    again          whether it is a further read of a prompt that an earlier request counts
    cached_tokens  how many of the prompt's rows were in the KV store when its first sample was admitted
    noted          further fields of the Generated of each sample, which features fill in
    """

    key: int
    request: Request
    readers: Sequence[Reader]
    on_done: Callable[[Any], None]
    limit: int
    reserve: bool
    namespace: Namespace
    owner: Owner
    again: bool = False
    cached_tokens: int = 0
    noted: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> np.ndarray:
        """Returns the ids of the prompt's rows that are computed, int32 [n]."""
        return self.request.tokens

    @property
    def is_done(self) -> bool:
        """Returns whether all of its readers are done."""
        return all(reader.is_done for reader in self.readers)

    @property
    def num_tokens(self) -> int:
        """Returns how many rows its sequences would have without sharing."""
        return sum(len(self.request.tokens) + max(0, len(reader.tokens) - 1) for reader in self.readers)

    def answer(self) -> Answer:
        """Returns the answer to a request that is done.

        The answer is a list with a Generated for each sample, or the error of the first sample that failed. For a
        request that is not continued it is the Result.
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
    """Returns the Readout with which all prompts of a group are read: if one needs kept hidden states, all keep theirs,
    so that they share rows. num_targets: of each prompt."""
    return (
        readout if readout.kind != "logprobs" or reads_last_rows(readout, num_targets) else replace(readout, keeps=True)
    )


def num_read_rows(readout: Readout, request: Request) -> int | None:
    """Returns how many of a prompt's last rows are read by kept hidden states; None if only its last computed row is
    read, which needs nothing kept."""
    if readout.kind in ("mean", "every"):
        return len(request.tokens)
    if readout.kind != "logprobs":
        return None
    targets = 0 if request.targets is None else len(request.targets)
    return targets if readout.keeps or targets != 1 else None


def check_asked(parts: Sequence[EnginePart], asked: Asked, sharing: Sharing = "full") -> None:
    """Raise InputError if an engine of these parts cannot do with this sharing what is asked."""
    for check in hooks(parts, "check"):
        check(asked, sharing)


def reads_last_rows(readout: Readout, num_targets: Iterable[int]) -> bool:
    """Returns whether a Readout reads only the last rows of prompts. Other rows may be cached, and the cache holds K/V
    and no results.

    num_targets  the number of targets of each prompt; only "logprobs" depends on it
    """
    return all(count == 1 for count in num_targets) if readout.kind == "logprobs" else readout.kind in LAST_ROW_KINDS


class RequestBuilder:
    """A RequestBuilder turns a Request into an OpenRequest. Any thread may call it.

    reserve  whether room for the whole output is set aside when the request limits its length
    check    takes what is asked of a request, and raises InputError if the engine cannot do it
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
        """Returns the OpenRequest of a request. Raises InputError for a request that cannot be run.

        readout  what is read, if the request is not continued
        sharing  whether it shares rows with other requests
        owner    the tenant and the class that it runs for
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
                f"the prompt has {len(request.tokens)} tokens, the context {self.facts.max_positions}",
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
        # No lock is held while a grammar compiles, which may take long: at worst two threads compile the same one.
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
        """Returns the detokenizer and the grammars of a tokenizer; those of the tokenizer used last are kept."""
        if tokenizer is None:
            for field in ("stop", "grammar"):
                if getattr(request.sampling, field):
                    message = f"{field!r} needs a tokenizer, and the model has none"
                    raise InputError(message, field=field, remedy="leave it out", code="no_tokenizer")
        texts = self._texts
        if texts is None or texts.tokenizer is not tokenizer:
            texts = self._texts = _TextMakers(tokenizer, self.facts.vocab_size, self.eos_ids)  # type: ignore[arg-type]
        return texts


class _TextMakers:
    """A _TextMakers is a tokenizer with its detokenizer and its grammar compiler, each made at its first use."""

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
    """Raise InputError for a kind of Readout that needs logits if the model has no LM head. Every request passes here
    before its first step, whatever computes the step."""
    if kind in _LOGIT_KINDS and not facts.has_logits:
        raise no_lm_head()


def adapter_number(facts: Facts, name: str) -> int | None:
    """Returns the number by which the worker knows an adapter; None for "". Raises InputError for an unknown one."""
    if not name or name in facts.adapters:
        return facts.adapters.index(name) if name else None
    remedy = f"those loaded: {', '.join(facts.adapters) or 'none'}"
    raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
