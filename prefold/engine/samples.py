"""A sample of a request during generation: its tokens, its text, and the conditions that end it."""

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
    """The next piece of a sample's text."""

    sample: int  # number of the sample
    text: str
    tokens: tuple[tuple[int, TokenLogprobs | None], ...] = ()  # (id, logprobs if requested) of tokens that start here
    count: int = 0  # tokens of the sample so far


OnText = Callable[[TextPiece], None]


class Sample:
    """Receives the tokens that steps drew for a sample, one after the other, and decodes them to text.

    Attributes:
        asked: The Sampling.
        number: The sample's number in its request.
        tokens: The tokens so far.
        finish_reason: Why it ended; None while it runs.
        state: The state that determines the next token.
        error: The error in place of a result, or None.

    Args:
        on_text: Called with every piece of final text. None: the text is decoded at the end.
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
        # Without stop strings and without a listener, text is decoded at the end.
        streams = detokenizer is not None and (sampling.stop or on_text is not None)
        # A choice with special tokens shows them, because its text may consist only of them.
        self._skips = sampling.skip_special_tokens and not (matcher is not None and matcher.shows_special)
        self._text = None
        if detokenizer is not None and streams:
            self._text = detokenizer.stream(sampling.stop, sampling.min_tokens, skip_special=self._skips)
        self.state = SamplerState(
            sampling, seed=seed, sample=number, prompt=request.tokens, end_ids=self._end_ids, matcher=matcher
        )

    @property
    def is_done(self) -> bool:
        """True if the sample has ended."""
        return self.finish_reason is not None

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> bool:
        """Add the next token, and return True if the sample has ended.

        `token` is None if the grammar allows no token, and NOT_FINITE if the logits were not finite.
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
        """End the sample with its tokens so far and finish_reason "cancelled". Do nothing if it has ended."""
        if not self.is_done:
            self._end("cancelled")

    def result(self, cached_tokens: int, **noted: int) -> Generated:
        """Return the result of a sample that ended without an error. `noted` are further fields of the Generated."""
        assert self.finish_reason is not None
        # Tokens after a stop string are not part of the result.
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
        """Set `error` if the text ends before its grammar does: the grammar became too complex, or no token fits."""
        matcher = self.state.matcher
        if matcher is not None and (matcher.failed or not matcher.is_complete):
            reason = " ".join((matcher.failed or "no token continues the text").split())[:300]
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
