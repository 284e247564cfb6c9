"""How a thread reads texts while they are generated, on any engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import InputError
from ..schedule.generate_step import NO_OWNER
from ..text import Tokenizer
from ..types import Request
from .calls import TOKENS, Call, Mailbox
from .protocol import Engine
from .requests import Answer
from .samples import TextPiece


def stream(
    engine: Engine, requests: Iterable[Request], tokenizer: Tokenizer | None
) -> Iterator[tuple[int, TextPiece | Answer]]:
    """Yields (number, TextPiece) of each request as its text comes, and (number, answer) when it ends.

    A caller that closes the generator early cancels the open requests. Raises the error of an engine that fails.
    """
    mailbox, open = Mailbox(), dict[Call, None]()
    try:
        for number, request in enumerate(requests):
            call = Call(mailbox, number, NO_OWNER)
            open[call] = None  # before it is submitted, so that it is cancelled whatever happens
            engine.submit([request], TOKENS, call, tokenizer, text=True)
        while open:
            for source, event in mailbox.take():
                assert source is not None
                if not isinstance(event, TextPiece):
                    del open[source]
                if isinstance(event, Exception) and not isinstance(event, InputError):
                    raise event
                yield source.tag, event  # type: ignore[misc]
    finally:
        engine.cancel(*open)
