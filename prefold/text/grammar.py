"""Structured output: a grammar determines which tokens may come next, so that the text matches the grammar.

The library is llguidance. It reads JSON schemas, regular expressions and Lark grammars. It compiles a grammar in well
under 1 ms and computes a mask in about 10 microseconds, so nothing is prepared in advance. It is one wheel without
dependencies. (xgrammar depends on transformers and Triton. outlines-core supports only regular expressions, and builds
an index of the whole vocabulary for each.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, MissingExtraError, UnsupportedModelError
from ..spec.requests import Grammar
from .grammar_process import TOO_MUCH, GrammarProcess, fault_of
from .schemas import example_of, with_any_of, with_keywords
from .valid import valid_text

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Limit on cached compiled grammars. The prompts of a job mostly share one grammar, or each has its own.
CACHED = 256
# Limit on the cached states of a compiled expression, 1 to 2 KB each. A state is created when a text needs it. The
# library itself limits time: about 20 ms to compile an expression, and as much for a mask.
MOST_STATES = 50_000
# Limit on items of the library's parser at one place of a text. Each property that may come next needs four: a tool
# with 3,000 properties needs 12,000 items. A mask then takes about 10 ms, and the engine waits that long.
MOST_ITEMS = 16_000
# Letters. A grammar of at most this length is compiled in this process; a longer one is first checked in a subprocess.
QUICK = 4096
# Letters of a schema's example that are checked at compile time, to see if the schema needs more than MOST_ITEMS.
FOLLOWED = 100
# White space between the parts of a JSON text. If the grammar allows too much, a small model may generate blanks until
# its context is full, one step per blank.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
FREE = {"whitespace_pattern": r"[ \t\n\r]{0,64}"}
# Values of "format" in JSON schemas that the library enforces.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
ALLOW_ONE_OF = 'Put "x-guidance": {"coerce_one_of": true} in the schema'
SMALLER = "make it smaller: fewer patterns and alternatives, fewer levels"
REMEDIES = {
    "json_schema": "give a JSON schema; for the supported keywords see "
    "https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md",
    "json": "leave the text of the grammar empty",
    "regex": "give a regular expression in Rust's syntax, without look-around and backreferences",
    "choice": "give a list of texts, none of them empty",
    "lark": "see https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md",
}


_process = GrammarProcess()


class Matcher:
    """Follows the text of one sample through its grammar.

    `shows_special` is True for a choice that can be written with special tokens of the vocabulary.
    """

    def __init__(self, inner: Any, vocab_size: int, *, shows_special: bool = False):
        self._inner = inner
        self._vocab_size = vocab_size
        self.shows_special = shows_special

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next as bits, uint8 [ceil(vocabulary / 8)].

        Token i is bit i % 8 of byte i // 8. End-of-text is allowed if the text is complete.
        """
        return np.frombuffer(self._inner.compute_bitmask(), np.uint8)[: -(-self._vocab_size // 8)]

    def accept(self, token: int) -> None:
        """Advance by a token that the mask allows. Any other token makes the matcher fail, and it is then done."""
        self._inner.consume_token(token)

    @property
    def is_done(self) -> bool:
        """True if only end-of-text may follow."""
        return self._inner.is_stopped()

    @property
    def is_complete(self) -> bool:
        """True if the text so far matches the grammar."""
        return self._inner.is_accepting()

    @property
    def failed(self) -> str | None:
        """Why the matcher failed, or None. Causes: a token that the mask forbids, or a grammar that is too complex."""
        return self._inner.get_error() or None

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self._vocab_size, shows_special=self.shows_special)


class GrammarCompiler:
    """Compiles grammars into matchers for one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int] = (), *, most_items: int = MOST_ITEMS
    ):
        """Read the vocabulary of the tokenizer.

        Args:
            vocab_size: The number of the model's logits.
            eos_ids: The ids that may end a text; if empty, the tokenizer's own end-of-text.
            most_items: Limit on items in a row of the parser; a larger grammar is refused.

        Raises:
            MissingExtraError: llguidance is not installed.
            UnsupportedModelError: llguidance cannot read the tokenizer.
        """
        library = _library()
        try:
            self._tokenizer = library.LLTokenizer(
                tokenizer.backend.to_str(),
                n_vocab=max(vocab_size, tokenizer.vocab_size),
                eos_token=sorted(set(eos_ids)) or None,
            )
        except Exception as error:  # the library raises ValueError and its own panics
            raise UnsupportedModelError(f"grammars do not work with this tokenizer: {_one_line(error)}") from None
        self._vocab_size, self._most_items = vocab_size, most_items
        self._special = tokenizer.special_ids
        self._compiled = lru_cache(maxsize=CACHED)(self._compile)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of a text.

        Raise InputError if the grammar is invalid or no text can match it.
        """
        return self._compiled(grammar).copy()

    def _compile(self, grammar: Grammar) -> Matcher:
        check_grammar(grammar)
        library = _library()
        # Only for JSON schemas: ambiguous grammars need ever more items, and the library's own limit is lower.
        items = {"max_items_in_row": self._most_items} if grammar.kind == "json_schema" else {}
        limits = library.LLParserLimits(max_lexer_states=MOST_STATES, **items)
        source, special = _source(grammar), ""
        if grammar.kind == "choice":
            special = " | ".join(_in_tokens(json.loads(grammar.text), self._special))
            source = library.LLMatcher.grammar_from_lark(_choice(grammar.text, special))
        inner = library.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        matcher = Matcher(inner, self._vocab_size, shows_special=bool(special))
        if matcher.failed:
            raise _refused(grammar, matcher.failed)
        matcher.mask()  # the first mask shows if any text can start
        if matcher.is_done and not matcher.is_complete:
            raise _refused(grammar, "no text fits it")
        if grammar.kind == "json_schema":
            pieces = json.JSONEncoder(ensure_ascii=False).iterencode(example_of(json.loads(grammar.text)))
            example = "".join(islice(pieces, FOLLOWED))[:FOLLOWED]  # all of it may be 2^n times as long as the schema
            tokens, followed = self._tokenizer.tokenize_str(example), inner.deep_copy()
            # If there are too many items, the library fails at tokens that it calls valid.
            if not followed.consume_tokens(tokens[: inner.deep_copy().validate_tokens(tokens)]):
                raise _refused(grammar, f"it is too large: {followed.get_error().partition('<state>')[0]}", SMALLER)
        return matcher


def check_grammar(grammar: Grammar) -> None:
    """Raise InputError if a grammar is invalid or too slow to compile.

    Raise MissingExtraError if llguidance is missing. Only the GrammarCompiler of a tokenizer can detect a grammar that
    is too large.
    """
    if fault := _fault(grammar):
        raise _refused(grammar, fault, SMALLER if fault.startswith(TOO_MUCH) else None)


@lru_cache(maxsize=CACHED)
def _fault(grammar: Grammar) -> str:
    """Return the error message for a grammar; "" if the grammar is valid."""
    _library()
    source = _source(grammar)
    return fault_of(source) if is_quick(grammar.kind, grammar.text) else _process.fault(source)


def is_quick(kind: str, text: str) -> bool:
    """Return True if a grammar surely compiles in milliseconds. Schemas that combine patterns may take minutes."""
    combines = ("attern", "allOf", "\\u")  # matches patternProperties and escaped names too
    return len(text) <= QUICK and (kind != "json_schema" or not any(word in text for word in combines))


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", "grammar", "structured output") from None
    return llguidance


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's form."""
    make = _library().LLMatcher
    valid_text(grammar.text, "grammar")
    try:
        if grammar.kind in ("json_schema", "json"):
            schema = _known(grammar.text) if grammar.kind == "json_schema" else '{"type": "object"}'
            return make.grammar_from_json_schema(schema, defaults=COMPACT if grammar.compact else FREE)
        if grammar.kind == "choice":
            return make.grammar_from_lark(_choice(grammar.text))
    except ValueError as error:
        raise _refused(grammar, error) from None
    except RecursionError:
        raise _refused(grammar, "it is nested too deep", SMALLER) from None
    if grammar.kind == "regex":
        return make.grammar_from_regex(grammar.text)
    return make.grammar_from_lark(grammar.text)


def _known(schema: str) -> str:
    """Return a JSON schema in the form that the library supports.

    Unsupported formats are dropped, which JSON Schema allows. A oneOf becomes an anyOf if both mean the same. Raise
    ValueError for invalid JSON.
    """

    def known(keyword: str, text: str) -> str | None:
        return None if keyword == "format" and text not in FORMATS else text

    if '"format"' not in schema and '"oneOf"' not in schema:
        return schema
    value = json.loads(schema)
    value = with_keywords(value, known) if '"format"' in schema else value
    return json.dumps(with_any_of(value) if '"oneOf"' in schema else value, ensure_ascii=False)


def _choice(choices: str, special: str = "") -> str:
    """Return the Lark grammar of some choices. `special` is a Lark rule for choices with special tokens."""
    # All choices form one terminal, which compiles to an automaton. 50,000 rules would be too many.
    return f"start: CHOICE{' | ' * bool(special)}{special}\nCHOICE: " + " | ".join(_quoted(choices))


def _in_tokens(choices: Sequence[str], special: Mapping[str, int]) -> Iterator[str]:
    """Yield the choices with special tokens, as sequences of these tokens and of texts in Lark's syntax."""
    longest_first = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    for choice in choices if special else ():
        if re.search(longest_first, choice):
            parts = filter(None, re.split(f"({longest_first})", choice))
            yield " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p, ensure_ascii=False) for p in parts)


def _quoted(choices: str) -> list[str]:
    texts = json.loads(choices)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it is not a list of texts")
    return [json.dumps(valid_text(text, "grammar"), ensure_ascii=False) for text in texts]


def _refused(grammar: Grammar, why: object, remedy: str | None = None) -> InputError:
    reason = _one_line(why).replace("Enable 'coerce_one_of' option", ALLOW_ONE_OF)
    message = f"the grammar ({grammar.kind}) is refused: {reason}"
    return InputError(message, field="grammar", remedy=remedy or REMEDIES[grammar.kind], code="invalid_grammar")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:500]
