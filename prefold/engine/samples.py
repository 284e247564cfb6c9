"""A sample of a request while it is generated: its tokens, its text, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ..errors import InputError
from ..spec.requests import Generated, Request, TokenLogprobs
from ..text import Tokenizer
from ..text.detokenize import Detokenizer
from ..text.grammar import Matcher
from .sampling import SamplerState
from .schedule.steps import NOT_FINITE


class TextPiece(NamedTuple):
    """A TextPiece is the next piece of a sample's text.

    sample  the number of the sample
    tokens  (id, log-probabilities) of the tokens whose text begins in this piece; None for log-probabilities that the
            request does not want
    count   how many tokens the sample has so far
    """

    sample: int
    text: str
    tokens: tuple[tuple[int, TokenLogprobs | None], ...] = ()
    count: int = 0


OnText = Callable[[TextPiece], None]


class Sample:
    """A Sample takes the tokens that steps chose for it, one after the other, and makes its text of them.

    asked          the Sampling
    number         the sample's number in its request
    tokens         the tokens that it has taken
    finish_reason  why it ended; None while it goes on
    state          the state on which the choice of its next token depends
    error          the error in place of a result; None without one
    on_text        called with every piece of text as it becomes final; None: text is made at the end
    """

    def __init__(
        self,
        request: Request,
        number: int,
        *,
        seed: int,
        limit: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | None,
        matcher: Matcher | None = None,
        on_text: OnText | None = None,
    ):
        sampling = request.sampling
        assert sampling is not None
        self.number = number
        self.asked = sampling
        self.tokens: list[int] = []
        self.finish_reason: Literal["stop", "length", "cancelled"] | None = None
        self.error: InputError | None = None
        self._limit = limit
        self._stop: str | int | None = None
        self._stop_ids = set(sampling.stop_ids)
        self._end_ids = self._stop_ids | (set() if sampling.ignore_eos else set(eos_ids))
        self._logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self._num_sent = 0  # tokens that were sent with a piece of text
        self._tokenizer = tokenizer
        self._on_text = on_text
        # Without stop strings and without a listener, text is made at the end.
        streams = detokenizer is not None and (sampling.stop or on_text is not None)
        # A choice that holds special tokens is told by them alone.
        self._skips = sampling.skip_special_tokens and not (matcher is not None and matcher.shows_special)
        self._text = None
        if detokenizer is not None and streams:
            self._text = detokenizer.stream(sampling.stop, sampling.min_tokens, skip_special=self._skips)
        self.state = SamplerState(
            sampling, seed=seed, sample=number, prompt=request.tokens, end_ids=self._end_ids, matcher=matcher
        )

    @property
    def is_done(self) -> bool:
        """Returns whether the sample has ended."""
        return self.finish_reason is not None

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> bool:
        """Takes the next token, and returns whether the sample has ended.

        token  None: the grammar allows no token; NOT_FINITE: the logits were no finite numbers
        """
        if token == NOT_FINITE:
            message = f"the logits after {len(self.tokens)} tokens are not finite numbers"
            remedy = 'try dtype="float32" (--dtype float32); if it stays, the weights are damaged'
            self.error = InputError(message, remedy=remedy, code="not_finite")
            return self._end("stop")
        if token is None:
            self._check_grammar()
            return self._end("stop")
        if token in self._end_ids:
            if token not in self._stop_ids:
                self._check_grammar()
            return self._end("stop", token if token in self._stop_ids else None)
        is_last = self.state.advance(token)
        self.tokens.append(token)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if self._text is not None:
            self._send(self._text.add(token))
            if self._text.stopped is not None:
                return self._end("stop", self._text.stopped)
        if is_last:
            self._check_grammar()
            return self._end("stop")
        return self._end("length") if len(self.tokens) == self._limit else False

    def cancel(self) -> None:
        """Ends the sample as it is, with finish_reason "cancelled"; does nothing where it has ended."""
        if not self.is_done:
            self._end("cancelled")

    def result(self, cached_tokens: int, **noted: int) -> Generated:
        """Returns the result of a sample that has ended without an error. noted: further fields of the Generated"""
        assert self.finish_reason is not None
        # Tokens behind a stop string are no part of the result.
        count = len(self.tokens) if self._text is None else self._text.num_tokens
        if self._text is not None:
            text: str | None = self._text.text
        else:
            text = None if self._tokenizer is None else self._tokenizer.decode(self.tokens, skip_special=self._skips)
        return Generated(
            tokens=tuple(self.tokens[:count]),
            text=text,
            finish_reason=self.finish_reason,
            stop=self._stop,
            cached_tokens=cached_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs[:count]),
            **noted,
        )

    def _check_grammar(self) -> None:
        """Sets `error` if the text ends before its grammar does: the grammar grew too complex, or no token fits."""
        matcher = self.state.matcher
        if matcher is not None and (matcher.failed or not matcher.is_complete):
            reason = " ".join((matcher.failed or "no token goes on as it asks").split())[:300]
            message = f"the grammar could not be followed after {len(self.tokens)} tokens: {reason}"
            self.error = InputError(message, field="grammar", remedy="give a simpler one", code="grammar_failed")

    def _end(self, reason: Literal["stop", "length", "cancelled"], stop: str | int | None = None) -> bool:
        self.finish_reason, self._stop = reason, stop
        if self._text is not None:
            self._send(self._text.finish())
        return True

    def _send(self, piece: str) -> None:
        if piece and self._on_text is not None:
            assert self._text is not None
            first, self._num_sent = self._num_sent, self._text.num_given
            ids = self.tokens[first : self._num_sent]
            logprobs = [None] * len(ids) if self._logprobs is None else self._logprobs[first : self._num_sent]
            self._on_text(TextPiece(self.number, piece, tuple(zip(ids, logprobs, strict=True)), len(self.tokens)))
