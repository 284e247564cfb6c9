"""Prompts of tasks: reranking, instructed embedding, few-shot classification.

A template is a text with {fields}. Nothing else in it has a special meaning, and braces in field values stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from ..trie import MEDIA_BASE, SPAN_BASE

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

EMBED_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_INSTRUCTION = EMBED_INSTRUCTION
# Texts without content. Their label probabilities show the prompt's own bias (Zhao et al. 2021).
CONTENT_FREE = ("N/A", "", "[MASK]")

_FIELD = re.compile(r"\{(\w+)\}")


def fields_of(template: str) -> list[str]:
    """Return the names of the {fields} of a template, in order."""
    return _FIELD.findall(template)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each {field} in `values` replaced by its value.

    Fields inside a value are not replaced.
    """
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)


def instructed_query(instruction: str, query: str) -> str:
    """Return a query with its instruction, in the format of Qwen3-Embedding. Documents have no instruction."""
    return f"Instruct: {instruction}\nQuery:{query}"


@dataclass(frozen=True)
class RerankPrompt:
    """The prompt of a (query, document) pair in three parts, which are encoded separately."""

    prefix: str
    body: str  # has the fields {query}, {document} and, optionally, {instruction}
    suffix: str
    special: bool | None = False  # special tokens (BOS) come first; None: unless the prompt starts with BOS

    @classmethod
    def from_template(cls, template: str, special: bool | None = None) -> RerankPrompt:
        """Return a prompt that is encoded as one text, so that tokens may span the borders of its fields.

        Documents share the text before {document}, queries the text before {query}. Raise InputError unless the
        template contains each of the two exactly once.
        """
        names = fields_of(template)
        fields = {"instruction", "query", "document"}
        if set(names) - fields or names.count("query") != 1 or names.count("document") != 1:
            raise InputError(
                f"the fields of the rerank template are {', '.join(names) or '(none)'}",
                field="template",
                remedy="write {query} and {document} once each, in any order, and {instruction} if wanted",
            )
        return cls("", template, "", special)


_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BODY = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"


def rerank_prompt(tokenizer: Tokenizer) -> RerankPrompt:
    """Return Qwen3-Reranker's prompt.

    The prompt ends with an empty thought if the tokenizer has the token <think>. A tokenizer without the ChatML tokens
    encodes <|im_start|> as plain text.
    """
    thinks = tokenizer.token_id("<think>") is not None and tokenizer.token_id("<|im_start|>") is not None
    return RerankPrompt(_JUDGE, _BODY, _ANSWER + (_NO_THOUGHT if thinks else ""))


@dataclass(frozen=True)
class FewShotPrompt:
    """Instructions, examples, and the text to classify, up to the place of its label."""

    instructions: str = ""  # comes first, then `separator`; both are left out if it is empty
    examples: Sequence[tuple[str, str]] = ()  # (text, label) pairs, each written with `template`, then `separator`
    template: str = "Text: {text}\nLabel: {label}"  # {label} is last; spaces before it belong to the label
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if fields_of(self.template) != ["text", "label"]:
            raise InputError(
                f"the template {self.template!r} must have {{text}} once, then {{label}} once",
                field="template",
                remedy="write {text} once and {label} once after it",
            )

    @cached_property
    def head(self) -> str:
        """The start of every prompt: instructions, examples, and the template up to {text}."""
        shots = [fill(self.template, {"text": text, "label": label}) for text, label in self.examples]
        parts = [self.instructions, *shots] if self.instructions else shots
        return "".join(part + self.separator for part in parts) + self.template[: self.template.index("{text}")]

    @cached_property
    def tail(self) -> str:
        """The part of the template between the text and its label."""
        return self.template[self.template.index("{text}") + len("{text}") : self.template.index("{label}")]

    def render(self, text: str) -> str:
        """Return the prompt of one text, up to the place of its label."""
        return self.head + text + self.tail


def readable(decode: Callable[[np.ndarray], str]) -> Callable[[np.ndarray], str]:
    """Return a function like `decode` that writes "[image]" for the rows of an image."""

    def read(tokens: np.ndarray) -> str:
        tokens = np.asarray(tokens)
        if not len(tokens) or tokens.max() < MEDIA_BASE:
            return decode(tokens)
        # The ids of one image's rows are consecutive; between two spans, an id is unused.
        kind = (tokens >= MEDIA_BASE).astype(int) + (tokens >= SPAN_BASE)
        edges = (kind[1:] != kind[:-1]) | ((kind[1:] > 0) & (tokens[1:] != tokens[:-1] + 1))
        parts = np.split(tokens, np.flatnonzero(edges) + 1)
        return "".join("[image]" if part[0] >= MEDIA_BASE else decode(part) for part in parts)

    return read


class FilledTemplate(str):
    """A text made from a template: a str for which truncate=True cuts the longest column, not the end.

    Attributes:
        parts: (text, is_column) pairs; their texts joined are the whole text.

    Example:
        prompt = FilledTemplate.of("Title: {title} Text: {body}", title="A", body=long_text)
        llm.embed([prompt], truncate=True)
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> FilledTemplate:
        parts = tuple(parts)
        text_of_parts = super().__new__(cls, "".join(text for text, _ in parts))
        text_of_parts.parts = parts
        return text_of_parts

    @classmethod
    def of(cls, template: str, **columns: str) -> FilledTemplate:
        """Return the template with each {column} replaced by its value.

        Args:
            template: The text with {column} fields.
            columns: The value of each column.

        Raises:
            InputError: A column has no value, or a value has no column.
        """
        pieces = _FIELD.split(template)
        names = pieces[1::2]
        for name in {*names} ^ {*columns}:
            fault = "is missing" if name in names else "is not in the template"
            raise InputError(f"the column {name!r} {fault}", field=name, remedy=f"the template has {', '.join(names)}")
        return cls((columns[text], True) if i % 2 else (text, False) for i, text in enumerate(pieces))

    @property
    def columns(self) -> list[str]:
        """The texts of the columns, in order."""
        return [text for text, is_column in self.parts if is_column]

    def refilled(self, columns: Sequence[str]) -> str:
        """Return the text with these columns in place of its own, in order."""
        remaining = iter(columns)
        return "".join(next(remaining) if is_column else text for text, is_column in self.parts)

    def __reduce__(self) -> tuple[type[FilledTemplate], tuple[tuple[tuple[str, bool], ...]]]:
        return FilledTemplate, (self.parts,)
