"""What an item of a request, or of a batch's line, may not bring: programs, grammars that take long to compile, and
more than a step has time for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..spec.requests import Generated
from ..spec.server import ServerSpec
from ..text import Tokenizer
from ..text.grammar import is_quick
from ..text.media import chat_of
from .http import json_of

# Those of a request for nothing but tokens, or their text, where the model takes no more of them in one prompt.
MOST_TOKENS = 1 << 18
# Of the texts that end an output: they are looked for at each of its tokens, by the thread that makes the steps.
MOST_STOPS, MOST_STOP_LETTERS = 64, 1024


def check_item(item: Any, options: ServerSpec, tokenizer: Tokenizer | None) -> None:
    """Raises InputError for an item that clients may not send: with too many or too long stop texts; with a schema,
    expression or grammar that might take much time and memory to compile; with a chat template that is not the
    checkpoint's own. tokenizer: of the served model"""
    if not isinstance(item, Mapping):
        return
    sampling = item.get("sampling") or {}
    grammar, stops, template = sampling.get("grammar"), sampling.get("stop"), item.get("chat_template")
    if isinstance(grammar, Mapping):
        size = sum(len(part.encode()) if isinstance(part, str) else len(json_of(part)) for part in grammar.values())
        if size > options.max_grammar_bytes:
            message, remedy = f"the grammar has {size} bytes", f"send at most {options.max_grammar_bytes}"
            raise InputError(message, field="grammar", remedy=remedy, code="too_large")
    if isinstance(stops, (str, list)):
        texts = [stops] if isinstance(stops, str) else stops
        letters = sum(len(text) for text in texts if isinstance(text, str))
        for count, most, unit in ((len(texts), MOST_STOPS, "texts"), (letters, MOST_STOP_LETTERS, "letters")):
            if count > most:
                message, remedy = f"'stop' holds {count} {unit}", f"give at most {most}"
                raise InputError(message, field="stop", remedy=remedy, code="too_large")
    if template is not None and not options.allow_chat_template:
        templates = () if tokenizer is None else tokenizer.chat_templates.templates
        if not (isinstance(template, str) and template in templates):
            message = "'chat_template' is not the name of one of the model's templates"
            remedy = "leave it out, or start the server with --allow-chat-template"
            raise InputError(message, field="chat_template", remedy=remedy, code="unsupported")


def check_texts(body: Mapping[str, Any], most: int) -> None:
    """Raises InputError for a request with more than `most` texts."""
    for name, value in body.items():
        value = value.get("sentences") if name == "inputs" and isinstance(value, dict) else value
        if isinstance(value, list) and len(value) > most and not all(isinstance(part, int) for part in value):
            message, remedy = f"{name!r} holds {len(value)} texts", f"send at most {most} at once"
            raise InputError(message, field=name, remedy=remedy, code="too_many")


def check_samples(items: Sequence[Any], most: int) -> None:
    """Raises InputError if more than `most` texts are to be generated for the items of a request."""
    if (count := num_samples(items)) > most:
        message, remedy = f"{count} texts are to be generated, n for each prompt", f"ask for at most {most} at once"
        raise InputError(message, field="n", remedy=remedy, code="too_many")


def most_tokens(llm: Any) -> int:
    """Returns how many tokens a request to tokenise or detokenise may have."""
    return max(MOST_TOKENS, llm.config.max_positions)


def too_many_tokens(llm: Any, field: str) -> InputError:
    """Returns the error of a request with more than `most_tokens` tokens."""
    message, remedy = f"{field!r} holds more than {most_tokens(llm)} tokens", "send it in several requests"
    return InputError(message, field=field, remedy=remedy, code="too_many")


# Up to so many bytes of a body, texts to generate, and results and tokens of an answer, work is short.
SHORT_BYTES, SHORT_SAMPLES, SHORT_RESULTS, SHORT_TOKENS = 4096, 16, 16, 1024
TOKENS_A_LOGPROB = 16  # a token with its log-probabilities takes as long as so many tokens without


def are_soon_ready(items: Sequence[Any], num_bytes: int) -> bool:
    """Returns whether making requests from items is short work: their body is short, few texts are to be generated, no
    grammar has to be compiled, and no item has a chat template, a program that may use up its time limit."""
    if num_bytes > SHORT_BYTES or num_samples(items) > SHORT_SAMPLES:
        return False
    objects = [item for item in items if isinstance(item, Mapping)]
    return not any((item.get("sampling") or {}).get("grammar") or has_template(item) for item in objects)


def num_samples(items: Sequence[Any]) -> int:
    """Returns how many texts are generated for items. An invalid item, or one of another task, counts once."""
    counts = ((item.get("sampling") or {}).get("n") if isinstance(item, Mapping) else 1 for item in items)
    return sum(n if isinstance(n, int) and n > 1 else 1 for n in counts)


def has_images(item: Any) -> bool:
    """Returns whether images have to be decoded for an item, which may take long."""
    return isinstance(item, Mapping) and (bool(item.get("images")) or chat_of(item.get("messages")) is not None)


def has_template(item: Any) -> bool:
    """Returns whether an item has or names a chat template."""
    return isinstance(item, Mapping) and item.get("chat_template") is not None


def are_short(results: Iterable[Sequence[Any]]) -> bool:
    """Returns whether making and writing answers from the engine's results is short work. A result is a Result or a
    list of Generated."""
    answers = [result for group in results for result in group]
    texts = [text for result in answers if isinstance(result, list) for text in result]
    return len(answers) <= SHORT_RESULTS and sum(map(_length, texts)) <= SHORT_TOKENS


def _length(text: Generated) -> int:
    return len(text.tokens) * (1 if text.logprobs is None else TOKENS_A_LOGPROB)


def has_slow_grammar(item: Any) -> bool:
    """Return whether a grammar may take long to compile for an item."""
    grammar = (item.get("sampling") or {}).get("grammar") if isinstance(item, Mapping) else None
    parts = grammar.items() if isinstance(grammar, Mapping) else ()
    return not all(
        is_quick(str(kind), part if isinstance(part, str) else json_of(part).decode()) for kind, part in parts
    )
