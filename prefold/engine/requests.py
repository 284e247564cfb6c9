"""A request on its way through the engine, and who takes what is read for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property

from ..errors import InputError
from ..text import Tokenizer
from ..text.detokenize import Detokenizer
from ..text.grammar import GrammarCompiler
from ..types import Generated, Readout, Request, Result
from ..worker.protocol import Facts
from .samples import Sample

__all__ = ["Answer", "Job", "Maker", "NumberReader", "Reader"]

Answer = list[Generated] | Result | InputError


class NumberReader:
    """Takes what is read as numbers at the last row of a prompt."""

    def __init__(self, readout: Readout, target: int | None):
        self.readout, self.target = readout, target
        self.result: Result | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    def cancel(self) -> None:
        """Nothing comes of it."""


Reader = Sample | NumberReader


class Job:
    """A request, what reads for it, and who is told.

    limit    tokens that each reader takes at most
    reserve  room for all of them is set aside
    """

    def __init__(
        self,
        key: int,
        request: Request,
        readers: Sequence[Reader],
        on_done: Callable[[Answer], None],
        *,
        limit: int,
        reserve: bool,
        sharing: bool,
    ):
        self.key, self.request, self.readers, self.on_done = key, request, readers, on_done
        self.limit, self.reserve, self.sharing = limit, reserve, sharing
        self.cached_tokens = 0
        self.is_telling = False
        self._ended = 0

    @property
    def is_done(self) -> bool:
        while self._ended < len(self.readers) and self.readers[self._ended].is_done:
            self._ended += 1
        return self._ended == len(self.readers)

    @property
    def tokens(self) -> int:
        """What its sequences would have had rows for, each alone."""
        made = sum(max(0, len(reader.tokens) - 1) for reader in self.readers if isinstance(reader, Sample))
        return len(self.readers) * len(self.request.tokens) + made

    def answer(self) -> Answer:
        first = self.readers[0]
        if isinstance(first, NumberReader):
            assert first.result is not None
            return first.result
        samples: list[Sample] = self.readers  # type: ignore[assignment]
        failed = next((sample.error for sample in samples if sample.error is not None), None)
        return failed or [sample.result(self.cached_tokens) for sample in samples]


class Maker:
    """Makes jobs of requests; any thread may ask it to.

    reserve  whether room for the whole output is set aside where its length is given
    """

    def __init__(self, facts: Facts, eos_ids: Sequence[int], *, reserve: bool):
        self.facts, self.eos_ids, self._reserve = facts, tuple(eos_ids), reserve
        self._texts: _Texts | None = None

    def numbers(
        self, key: int, request: Request, readout: Readout, on_done: Callable[[Answer], None], *, sharing: bool
    ) -> Job:
        """A job whose last row is read. "logprobs": of one target. Raises InputError for an unknown adapter."""
        self._check_adapter(request.adapter)
        target = None if request.targets is None else int(request.targets[0])
        return Job(key, request, [NumberReader(readout, target)], on_done, limit=1, reserve=True, sharing=sharing)

    def samples(
        self,
        key: int,
        request: Request,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: Callable[[int, str], None] | None,
        *,
        sharing: bool,
    ) -> Job:
        """A job that generates. Raises InputError for what cannot be continued as asked."""
        sampling = request.sampling
        assert sampling is not None
        room = self.facts.max_positions - len(request.tokens)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if limit < 1:
            raise InputError(
                f"the prompt has {len(request.tokens)} tokens, the context {self.facts.max_positions}",
                field="prompt",
                remedy="shorten it",
                code="too_long",
            )
        self._check_adapter(request.adapter)
        # Without a lock: a grammar may take long, and at worst two threads make the same.
        texts = self._texts_of(tokenizer, request)
        matcher = None if sampling.grammar is None else texts.grammars.matcher(sampling.grammar)
        detokenizer = None if tokenizer is None else texts.detokenizer
        seed = secrets.randbits(53) if sampling.seed is None else sampling.seed
        samples = [
            Sample(
                request, number, seed=seed, limit=limit, eos_ids=self.eos_ids, tokenizer=tokenizer,
                detokenizer=detokenizer, on_text=on_text,
                matcher=matcher if matcher is None or number == 0 else matcher.copy(),
            )
            for number in range(sampling.n)
        ]  # fmt: skip
        reserve = self._reserve and sampling.max_tokens is not None
        return Job(key, request, samples, on_done, limit=limit, reserve=reserve, sharing=sharing)

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in self.facts.adapters:
            known = ", ".join(self.facts.adapters) or "none"
            message = f"there is no adapter {name!r}"
            raise InputError(message, field="adapter", remedy=f"those loaded: {known}", code="unknown_adapter")

    def _texts_of(self, tokenizer: Tokenizer | None, request: Request) -> _Texts:
        """What turns tokens into text, kept for the tokenizer used last."""
        if tokenizer is None:
            for field in ("stop", "grammar"):
                if getattr(request.sampling, field):
                    message = f"{field!r} needs a tokenizer, and the model has none"
                    raise InputError(message, field=field, remedy="leave it out", code="no_tokenizer")
        texts = self._texts
        if texts is None or texts.tokenizer is not tokenizer:
            texts = self._texts = _Texts(tokenizer, self.facts.vocab_size, self.eos_ids)  # type: ignore[arg-type]
        return texts


class _Texts:
    """A tokenizer, with what is made of it when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_ids)
