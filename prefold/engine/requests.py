"""Requests on their way through the generator, and what takes the tokens and numbers that are read for them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError
from ..prefix import SPAN_BASE
from ..text import Tokenizer
from ..text.detokenize import Detokenizer
from ..text.grammar import GrammarCompiler
from ..types import Exits, Generated, Owner, Readout, Request, Result, TokenLogprobs
from ..worker.protocol import Facts
from .samples import OnText, Sample

PROBED = ("last", "head", "logits")  # kinds of Readout, beside "logprobs" of one target

NO_TARGETS = np.zeros(0, np.int32)

Answer = list[Generated] | Result | InputError


@dataclass(frozen=True, slots=True)
class Kept:
    """A Kept stands in the namespace of rows whose hidden states are kept in their slots, so that any of them can be
    read once the prompt's last row is there, whoever computed them. exits: after which visit they are read."""

    exits: Exits | None


def kept_in(namespace: Sequence[Hashable]) -> Kept | None:
    """Returns the Kept that stands in a namespace; None: there is none."""
    return namespace[2] if len(namespace) > 2 and isinstance(namespace[2], Kept) else None


class NumberReader:
    """A NumberReader takes the numbers that are read of a prompt. It has no tokens, and takes none.

    targets  int32, with "logprobs": the tokens whose log-probabilities are wanted
    count    how many of the prompt's last rows are read, whose hidden states are kept; None: the last row alone
    """

    number = 0
    state = None
    tokens: Sequence[int] = ()

    def __init__(self, readout: Readout, targets: np.ndarray, count: int | None):
        self.readout, self.targets, self.count, self.exits = readout, targets, count, readout.exits
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
        """Returns True: the prompt ends with its one read."""
        return True

    def cancel(self) -> None:
        """Does nothing: a request for numbers that is cancelled has no answer."""


Reader = Sample | NumberReader


@dataclass(eq=False, slots=True)
class OpenRequest:
    """An OpenRequest is a request that has no answer yet, with its readers, and the function that is told the answer.

    readers        one for each sample; of a request that is not continued, one NumberReader
    limit          how many tokens each reader takes at most
    reserve        whether room for all of these is set aside
    namespace      rows are shared only between requests of one namespace
    owner          for whom it runs
    again          whether it is a further read of a prompt, which an earlier request counts
    cached_tokens  how many of the prompt's rows the first sample found in place
    approximate_tokens  how many of the prompt's rows were copied from other positions
    notes          what parts of the engine keep with it
    """

    key: int
    request: Request
    readers: Sequence[Reader]
    on_done: Callable[[Any], None]
    limit: int
    reserve: bool
    namespace: tuple[Hashable, ...]
    owner: Owner
    again: bool = False
    cached_tokens: int = 0
    approximate_tokens: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> np.ndarray:
        """Returns the ids of the rows that are computed of the prompt, int32 [n]."""
        reader = self.readers[0]
        reads_first = isinstance(reader, NumberReader) and reader.readout.kind == "first"
        return self.request.tokens[:1] if reads_first else self.request.tokens

    @property
    def is_done(self) -> bool:
        """Returns whether all of its readers are done."""
        return all(reader.is_done for reader in self.readers)

    @property
    def num_tokens(self) -> int:
        """Returns how many rows its sequences would have had, were nothing shared between them."""
        return sum(len(self.request.tokens) + max(0, len(reader.tokens) - 1) for reader in self.readers)

    def answer(self) -> Answer:
        """Returns the answer to a request that is done.

        It is a Generated for each sample, or the error of a sample that has one; of a request that is not continued it
        is the Result.
        """
        samples = []
        for reader in self.readers:
            if isinstance(reader, NumberReader):
                assert reader.result is not None
                return reader.result
            if reader.error is not None:
                return reader.error
            samples.append(reader)
        return [sample.result(self.cached_tokens, self.approximate_tokens) for sample in samples]


def together(readout: Readout, num_targets: Iterable[int]) -> Readout:
    """Returns how prompts are read together that have so many targets each: where one needs rows whose hidden states
    are kept, all are among these, so that they share."""
    return readout if readout.kind != "logprobs" or can_probe(readout, num_targets) else replace(readout, keeps=True)


def count_of(readout: Readout, request: Request) -> int | None:
    """Returns how many of a prompt's last rows are read, whose hidden states are kept; None: the last one that is
    computed, and it is not kept."""
    if readout.kind in ("mean", "every"):
        return len(request.tokens)
    if readout.kind != "logprobs":
        return None
    targets = 0 if request.targets is None else len(request.targets)
    return targets if readout.keeps or targets != 1 else None


def no_readout(readout: Readout) -> InputError:
    """Returns what is said where rows leave, and others than last ones are to be read."""
    what = "several targets of a prompt" if readout.kind == "logprobs" else f"{readout.kind!r}"
    message = f"{what} is read at rows that are not last, and only last rows are read where rows leave"
    remedy = 'ask for one target or the last row, or give the LLM looped={"exits": "read"}'
    return InputError(message, field="readout", remedy=remedy, code="no_readout")


def check_first(tokens: np.ndarray) -> None:
    """Raises InputError where a first token of prompts is that of an image: its row sees all of the image."""
    if (tokens >= SPAN_BASE).any():
        message = "a prompt begins with an image, and its first row is to be read"
        raise InputError(message, field="pooling", remedy='use pooling "last" or "mean", or begin with text')


def can_probe(readout: Readout, num_targets: Iterable[int]) -> bool:
    """Returns whether only last rows of prompts are read: of other rows the cache may have K/V, and never results.

    num_targets  of each prompt; looked at for "logprobs" only
    """
    return all(count == 1 for count in num_targets) if readout.kind == "logprobs" else readout.kind in PROBED


class Maker:
    """A Maker makes an OpenRequest of what is asked, in any thread.

    reserve  whether room for the whole output is set aside where its length is given
    checks   take the exits of a request, and raise InputError for those that cannot be followed
    keeps    whether hidden states may be kept, so that rows can be read which are not last
    """

    def __init__(
        self,
        facts: Facts,
        eos_ids: Sequence[int],
        *,
        reserve: bool,
        checks: Iterable[Callable[..., None]] = (),
        keeps: bool = True,
    ):
        self.facts, self.eos_ids, self._reserve = facts, tuple(eos_ids), reserve
        self._checks, self._keeps = checks, keeps
        self._texts: _TextMakers | None = None

    def make(
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
        """Returns a request that can be run. Raises InputError for one that cannot be read or continued as asked.

        readout  of a request that is not continued
        sharing  whether it shares rows with other requests
        owner    for whom it runs
        """
        adapter_number(self.facts, request.adapter)
        asks = request.sampling or readout
        for check in self._checks:
            check(None if asks is None else asks.exits)
        # What does not share is in a namespace of its own.
        namespace = (request.adapter, request.salt, *(() if sharing else (key,)))
        if request.sampling is None:
            assert readout is not None
            reader = self._reader(readout, request)
            if reader.count is not None:
                namespace = (*namespace[:2], Kept(reader.exits), *namespace[2:])
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

    def _reader(self, readout: Readout, request: Request) -> NumberReader:
        if readout.kind == "first":
            check_first(request.tokens[:1])
        count = count_of(readout, request)
        if not self._keeps and (count is not None or readout.kind == "first"):
            raise no_readout(readout)
        targets = NO_TARGETS if request.targets is None else request.targets
        return NumberReader(readout, targets, count)

    def _samples(
        self,
        request: Request,
        limit: int,
        tokenizer: Tokenizer | None,
        on_text: OnText | None,
    ) -> list[Sample]:
        sampling = request.sampling
        assert sampling is not None
        # Without a lock: a grammar may take long, and at worst two threads make the same.
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
        """Returns what turns tokens into text, kept for the tokenizer used last."""
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
    """A _TextMakers is a tokenizer with what is made of it: a detokenizer and grammars, each when first asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_ids)


def adapter_number(facts: Facts, name: str | None) -> int | None:
    """Returns the number by which the worker knows an adapter; None for None. Raises InputError for an unknown one."""
    if name is None or name in facts.adapters:
        return None if name is None else facts.adapters.index(name)
    remedy = f"those loaded: {', '.join(facts.adapters) or 'none'}"
    raise InputError(f"there is no adapter {name!r}", field="adapter", remedy=remedy, code="unknown_adapter")
