"""Prompts of the tasks: reranking, instructed embedding, few-shot classification. A template is a text with {fields};
nothing else in it has a meaning, and braces in the values of fields stay as they are."""

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
# Texts without content, whose label probabilities show the prompt's own bias. Zhao et al. 2021.
CONTENT_FREE = ("N/A", "", "[MASK]")

_FIELD = re.compile(r"\{(\w+)\}")


def fields_of(template: str) -> list[str]:
    """Returns the names of the {fields} of a template, in order."""
    return _FIELD.findall(template)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Returns the template with each {field} that is in `values` replaced by its value. Fields in a value are not
    replaced."""
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), template)


def instructed_query(instruction: str, query: str) -> str:
    """Returns a query with its instruction, as Qwen3-Embedding reads it; documents are embedded without one."""
    return f"Instruct: {instruction}\nQuery:{query}"


@dataclass(frozen=True)
class RerankPrompt:
    """The prompt of a (query, document) pair in three parts, which are encoded apart.

    Attributes:
        body: the part with the fields {query}, {document} and, if wanted, {instruction}
        special: whether the tokenizer's own special tokens (BOS) come before the prompt; None: unless it begins with
            the BOS
    """

    prefix: str
    body: str
    suffix: str
    special: bool | None = False

    @classmethod
    def from_template(cls, template: str, special: bool | None = None) -> RerankPrompt:
        """Return a whole prompt, which is encoded as one text, so that tokens may reach over the borders of its fields.

        Documents share what stands before {document}, queries what stands before {query}. Raises InputError unless
        the template has both once.
        """
        names = fields_of(template)
        fields = {"instruction", "query", "document"}
        if set(names) - fields or names.count("query") != 1 or names.count("document") != 1:
            raise InputError(
                f"the fields of the rerank template are {', '.join(names) or '(none)'}",
                field="template",
                remedy="write {query} and {document} once each, in any order, and {instruction} if it is wanted",
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
    """Returns Qwen3-Reranker's prompt, with its empty thought if the tokenizer has the token <think>. A tokenizer
    without the ChatML tokens encodes <|im_start|> as plain text."""
    thinks = tokenizer.token_id("<think>") is not None and tokenizer.token_id("<|im_start|>") is not None
    return RerankPrompt(_JUDGE, _BODY, _ANSWER + (_NO_THOUGHT if thinks else ""))


@dataclass(frozen=True)
class FewShotPrompt:
    """A FewShotPrompt is instructions, examples, and the text to classify, up to where its label goes.

    instructions   a text, followed by `separator`; left out when empty
    examples       (text, label) pairs, each written as `template`, followed by `separator`
    template       has {text} once, then {label} once and last; spaces before {label} belong to the label
    """

    instructions: str = ""
    examples: Sequence[tuple[str, str]] = ()
    template: str = "Text: {text}\nLabel: {label}"
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if fields_of(self.template) != ["text", "label"]:
            raise InputError(
                f"the template {self.template!r} does not have {{text}} once and then {{label}} once",
                field="template",
                remedy="write {text} once and {label} once, after it",
            )

    @cached_property
    def head(self) -> str:
        """Returns the beginning of every prompt: instructions, examples, and the template up to {text}."""
        shots = [fill(self.template, {"text": text, "label": label}) for text, label in self.examples]
        parts = [self.instructions, *shots] if self.instructions else shots
        return "".join(part + self.separator for part in parts) + self.template[: self.template.index("{text}")]

    @cached_property
    def tail(self) -> str:
        """Returns the part of the template between the text and its label."""
        return self.template[self.template.index("{text}") + len("{text}") : self.template.index("{label}")]

    def render(self, text: str) -> str:
        """Returns the prompt of one text, up to where its label goes."""
        return self.head + text + self.tail


def readable(decode: Callable[[np.ndarray], str]) -> Callable[[np.ndarray], str]:
    """Returns a function that returns the text of token ids, as `decode` does, with "[image]" for the rows of an
    image."""

    def read(tokens: np.ndarray) -> str:
        tokens = np.asarray(tokens)
        if not len(tokens) or tokens.max() < MEDIA_BASE:
            return decode(tokens)
        # Ids of one image's rows go up by one; between spans one is unused.
        kind = (tokens >= MEDIA_BASE).astype(int) + (tokens >= SPAN_BASE)
        edges = (kind[1:] != kind[:-1]) | ((kind[1:] > 0) & (tokens[1:] != tokens[:-1] + 1))
        parts = np.split(tokens, np.flatnonzero(edges) + 1)
        return "".join("[image]" if part[0] >= MEDIA_BASE else decode(part) for part in parts)

    return read


class FilledTemplate(str):
    """A FilledTemplate is a text made from a template: a str, in which truncate=True cuts the longest column.

    parts   (text, whether it is a column) pairs that make up the whole
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> FilledTemplate:
        parts = tuple(parts)
        text_of_parts = super().__new__(cls, "".join(text for text, _ in parts))
        text_of_parts.parts = parts
        return text_of_parts

    @classmethod
    def of(cls, template: str, **columns: str) -> FilledTemplate:
        """Returns the template with each {column} replaced by its value. Raises InputError for a column of the
        template without a value, and for a value without a column."""
        pieces = _FIELD.split(template)
        names = pieces[1::2]
        for name in {*names} ^ {*columns}:
            fault = "is missing" if name in names else "is not in the template"
            raise InputError(f"the column {name!r} {fault}", field=name, remedy=f"the template has {', '.join(names)}")
        return cls((columns[text], True) if i % 2 else (text, False) for i, text in enumerate(pieces))

    @property
    def columns(self) -> list[str]:
        """Returns the texts of the columns, in order."""
        return [text for text, is_column in self.parts if is_column]

    def refilled(self, columns: Sequence[str]) -> str:
        """Returns the text with other columns, in order."""
        remaining = iter(columns)
        return "".join(next(remaining) if is_column else text for text, is_column in self.parts)

    def __reduce__(self) -> tuple[type[FilledTemplate], tuple[tuple[tuple[str, bool], ...]]]:
        return FilledTemplate, (self.parts,)
