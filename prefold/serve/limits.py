"""What an item of a request, or of a batch's line, may not bring: programs, and grammars that take long to compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..tasks.images import chat_of
from ..text import Tokenizer
from .http import json_of
from .options import ServeOptions

__all__ = ["check_item", "has_images", "most_tokens", "takes_long", "too_many_tokens"]

# Those of a request for nothing but tokens, or their text, where the model takes no more of them in one prompt.
MOST_TOKENS = 1 << 18


def check_item(item: Any, options: ServeOptions, tokenizer: Tokenizer | None) -> None:
    """Raises InputError for an item of a task that strangers may not send. tokenizer: of the model that is served."""
    if isinstance(item, Mapping):
        _check_grammar(item, options.max_grammar_bytes)
        if not options.allow_chat_template:
            _check_template(item.get("chat_template"), tokenizer)


def takes_long(item: Mapping[str, Any]) -> bool:
    """Returns whether it may take long to make a request of an item: a grammar is compiled for it, and a chat template
    that it brings is a program, which may take all the time that it is allowed."""
    return bool((item.get("sampling") or {}).get("grammar")) or item.get("chat_template") is not None


def has_images(item: Any) -> bool:
    """Returns whether images are to be decoded for an item."""
    return isinstance(item, Mapping) and (bool(item.get("images")) or chat_of(item.get("messages")) is not None)


def most_tokens(llm: Any) -> int:
    """Returns how many tokens a request may hold that asks for nothing but them, or their text."""
    return max(MOST_TOKENS, llm.config.max_positions)


def too_many_tokens(llm: Any, field: str) -> InputError:
    """Returns the error of such a request with more tokens."""
    message, remedy = f"{field!r} holds more than {most_tokens(llm)} tokens", "send it in several requests"
    return InputError(message, field=field, remedy=remedy, code="too_many")


def _check_grammar(item: Mapping[str, Any], most: int) -> None:
    """Raises InputError for a schema, expression or grammar of more than `most` bytes: it might take long to compile,
    and much memory."""
    grammar = (item.get("sampling") or {}).get("grammar")
    if isinstance(grammar, Mapping):
        size = sum(len(one.encode()) if isinstance(one, str) else len(json_of(one)) for one in grammar.values())
        if size > most:
            message, remedy = f"the grammar has {size} bytes", f"send at most {most}"
            raise InputError(message, field="grammar", remedy=remedy, code="too_large")


def _check_template(template: Any, tokenizer: Tokenizer | None) -> None:
    """Raises InputError for a chat template that is not the checkpoint's own."""
    known = () if tokenizer is None else tokenizer.chat_templates.templates
    if template is not None and not (isinstance(template, str) and template in known):
        message = "'chat_template' is not the name of one of the model's templates"
        remedy = "leave it out, or start the server with --allow-chat-template"
        raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")
