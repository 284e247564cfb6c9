"""Prompts of decisions: a state and a typed question become token ids; the answer is read after them.

The default prompt, the settings files and the handling of control tokens follow transformers 5.24, with `decision.json`
and `decision_template.jinja` beside the weights. A template renders one `question`, or all `questions` of a state. It
writes `<|mark|>` at each place at which an answer is read, and `<|split|>` between two texts that are encoded
separately. A prompt without a mark is read at its end.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ..checkpoint import Checkpoint, read_object
from ..errors import CheckpointError, InputError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

MARK, SPLIT = "<|mark|>", "<|split|>"
CONFIG, TEMPLATE = "decision.json", "decision_template.jinja"
LETTERS = tuple(string.ascii_uppercase)
# Labels of vLLM 0.32 by kind of question; below, the last lines of its prompts.
VLLM_LABELS = {"noul": ("yes", "no"), "choice": LETTERS, "score": tuple(string.digits)}
_VLLM_CLOSINGS = {
    "noul": "Answer with yes or no only.",
    "choice": "Answer with the letter of one option only.",
    "score": "Answer with the number of one level only.",
}
# These characters enclose a control token of a request. They are dropped from the request's own text.
_BEGIN, _END = "\U000f0000", "\U000f0001"
_NAME = "\U000f0002"  # first character of an image's name
_HIDDEN = re.compile(f"{_BEGIN}([0-9]+){_END}")


class ShownQuestion(TypedDict):
    """A question as templates see it. The options are in the order of the prompt."""

    name: str
    type: str
    instructions: object
    options: list[str]
    labels: list[str]
    descriptions: list[object]


class Token(str):
    """A piece of a prompt in which control tokens are encoded as control tokens."""


@dataclass(frozen=True)
class DecisionSettings:
    """How to ask a model for decisions, and how to read them."""

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # kind of question -> labels of one token each
    temperature: Mapping[str, float] = field(default_factory=dict)  # kind of question -> divisor of the label logits
    template: str | None = None  # a Jinja template that replaces the default prompt
    noul_options: tuple[str, ...] = ("true", "false")  # order of the options of a yes/no question in the prompt
    escapes: bool = True  # encode control tokens in a request as plain text
    adapter: str | None = None  # folder beside the weights with a LoRA adapter that must be loaded
    # write(state, questions) returns the pieces of the prompt and replaces a template. Only pieces of type Token may
    # contain control tokens.
    write: Callable[[object, Sequence[ShownQuestion]], Sequence[str]] | None = None
    joint: bool = False  # `write` puts all questions of a state in one prompt
    tokens: str = ""  # the control tokens that `write` uses

    @property
    def is_own(self) -> bool:
        """Return True if the checkpoint defines its own prompt, so that the chat template is not used."""
        return self.template is not None or self.write is not None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> DecisionSettings:
        """Return the settings of a checkpoint. Raise CheckpointError for invalid values in decision.json."""
        values = read_object(checkpoint, CONFIG, keys="")
        path = checkpoint.file(TEMPLATE)
        template = None if path is None else path.read_text(encoding="utf-8")

        def wrong(name: str, expected: str) -> CheckpointError:
            return CheckpointError(f"{checkpoint.name}: {name} of {CONFIG} is {values[name]!r:.80}, not {expected}")

        labels, temperature = values.get("labels") or {}, values.get("temperature") or {}
        if not isinstance(labels, dict) or not all(
            isinstance(words, list) and all(isinstance(word, str) for word in words) for words in labels.values()
        ):
            raise wrong("labels", "{kind of question: list of texts}")
        if not isinstance(temperature, dict) or not all(is_temperature(value) for value in temperature.values()):
            raise wrong("temperature", "{kind of question: number above 0}")
        order = tuple(values.get("noul_options") or ("true", "false"))
        if sorted(order) != ["false", "true"]:
            raise wrong("noul_options", '"true" and "false" in some order')
        escapes = values.get("sanitize_control_tokens", True)
        if not isinstance(escapes, bool):
            raise wrong("sanitize_control_tokens", "true or false")
        adapter = values.get("adapter")
        if adapter is not None and not isinstance(adapter, str):
            raise wrong("adapter", "the name of a folder")
        return cls(labels, temperature, template, order, escapes, adapter)

    def labels_of(self, kind: str) -> Sequence[str]:
        """Return all labels that a kind of question may use, in order."""
        return self.labels.get(kind) or (("Yes", "No") if kind == "noul" else LETTERS)


def check_labels(checkpoint: Checkpoint, tokenizer: Tokenizer, settings: DecisionSettings) -> None:
    """Raise CheckpointError if labels of decision.json are not distinct single tokens."""
    encoder = DecisionEncoder(tokenizer, settings)
    for kind, labels in settings.labels.items():
        ids = [encoder.label_id(label) for label in labels]
        wrong = [label for i, label in enumerate(labels) if ids[i] is None or ids[i] in ids[:i]]
        if wrong:
            used = ", ".join(map(repr, wrong[:5]))
            raise CheckpointError(
                f"{checkpoint.name}: {CONFIG} has labels for {kind} questions that are repeated or not a single token: "
                f"{used}; give each option a different label of one token"
            )


def is_temperature(value: object) -> bool:
    """Return True for a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def written(value: object) -> str:
    """Return a text unchanged, "" for None, and any other JSON value as JSON."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def default_prompt(
    state: object, kind: str, instructions: object, options: Sequence[str], labels: Sequence[str],
    descriptions: Sequence[object], first: str = "state",
) -> str:  # fmt: skip
    """Return the user's message of the default prompt: the state, an empty line, the question with its options.

    With first="question", the question comes first, then an empty line and the state.
    """
    lines = [written(instructions)]
    for label, option, description in zip(labels, options, descriptions, strict=True):
        said = written(description)
        if kind == "noul":
            said = said or ("" if list(labels) == ["Yes", "No"] else option)
            lines.append(f"{label}: {said}" if said else "")
        else:
            lines.append(f"{label}. " + (f"{option}: {said}" if said and kind == "choice" else said or option))
    if kind == "noul":
        closing = f"Answer {labels[0]} or {labels[1]} only."
    else:
        word = "letter" if tuple(labels) == LETTERS[: len(labels)] else "label"
        what = "option" if kind == "choice" else "level"
        closing = f"Answer with the {word} of the {what} that fits best ({labels[0]} to {labels[-1]}) only."
    question = "\n".join(line for line in lines if line) + "\n" + closing
    return f"{written(state)}\n\n{question}" if first == "state" else f"{question}\n\n{written(state)}"


def vllm_prompt(
    state: object, kind: str, instructions: object, options: Sequence[str], labels: Sequence[str],
    descriptions: Sequence[object], first: str = "state",
) -> str:  # fmt: skip
    """Return the user's message of vLLM's prompt (0.32).

    The message has the state, the question, one option per line, and the instruction for the answer. vLLM writes
    instructions and descriptions that are not texts with Python's str(), not as JSON.
    """
    lines = [f"Question: {_as_vllm(instructions)}"] if _as_vllm(instructions) else []
    for label, option, description in zip(labels, options, descriptions, strict=True):
        said = _as_vllm(description)
        if kind == "choice":
            lines.append(f"{label}: {option} - {said}" if said else f"{label}: {option}")
        else:  # levels show their description; yes and no without a description show the label only
            lines.append(f"{label}: {said}" if said or kind == "score" else label)
    question = "\n".join([*lines, _VLLM_CLOSINGS[kind]])
    return f"{written(state)}\n\n{question}" if first == "state" else f"{question}\n\n{written(state)}"


def _as_vllm(value: object) -> str:
    return "" if value is None else str(value)


Encode = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Rendered:
    """The text of a prompt."""

    text: str  # control tokens of requests are shielded; each image is the model's placeholder
    shown: Sequence[str] = ()  # the names of the images, in order


class Named(str):
    """The name of an image in a text."""


class ImageNames:
    """Names for images in a JSON value; no name occurs in the value itself.

    Each name contains the field of its image, for error messages.
    """

    def __init__(self, beside: object):
        text, self._begin = json.dumps(beside, ensure_ascii=False), _NAME
        while self._begin in text:
            self._begin += _NAME

    def of(self, field: str) -> str:
        return f"{self._begin}{field}{_END}"


def image_field(name: str) -> str:
    """Return the field of an image, given its name."""
    made = name.startswith(_NAME) and name.endswith(_END)
    return name.strip(_NAME + _END) if made else f"images[{name!r:.100}]"


def _pieces(text: str, names: Sequence[str]) -> list[str | Named]:
    """Split a text at the names of images, which become Named pieces. No piece is empty, unless the text is."""
    if not names:
        return [text]
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    pieces = [Named(part) if i % 2 else part for i, part in enumerate(parts) if part]
    return pieces or [text]


class DecisionEncoder:
    """Renders and encodes prompts of decisions.

    Control tokens of a request are encoded as plain text, each separately from the text around it, like in
    transformers.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DecisionSettings):
        self.tokenizer = tokenizer
        self.settings = settings
        templates = tokenizer.chat_templates.templates
        own = templates.get("default") or next(iter(templates.values()), "")
        self.source = settings.tokens if settings.write is not None else settings.template or own

    @cached_property
    def takes_all(self) -> bool:
        """True if all questions of a state share one prompt."""
        return self.settings.joint if self.settings.template is None else "questions" in self._names

    @cached_property
    def _names(self) -> Collection[str]:
        """The names that the template looks up."""
        from .sandbox import compile_template

        assert self.settings.template is not None
        return compile_template(self.settings.template)[1]

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """The pattern of control tokens: special tokens, the sentinels, and added tokens that the template writes."""
        from .sandbox import literals

        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        text = literals(self.source)
        names = {t.content for t in added if t.special or (t.content in text and not t.content.isspace())}
        names |= {MARK, SPLIT}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    @cached_property
    def _marked(self) -> re.Pattern[str]:
        return re.compile(f"{_BEGIN}({self._control.pattern}){_END}|[{_BEGIN}{_END}]")

    def shielded(self, value: object) -> object:
        """Return a JSON value in which `_BEGIN` and `_END` enclose each control token."""
        if isinstance(value, str):
            bare = value.replace(_BEGIN, "").replace(_END, "")
            return self._control.sub(lambda match: _BEGIN + match[0] + _END, bare)
        if isinstance(value, dict):
            return {key: self.shielded(item) for key, item in value.items()}
        return [self.shielded(item) for item in value] if isinstance(value, list) else value

    def message(
        self, text: str, names: Sequence[str] = (), *, parts: bool = False, system: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Rendered:  # fmt: skip
        """Return the chat prompt of a user's message, up to the start of the assistant's answer.

        Args:
            names: The texts that stand for images.
            parts: Pass the content as a list of parts, as templates of models with image input expect.
            system: The text of a system message before the user's message.
            variables: Further variables of the chat template.
        """
        pieces = _pieces(text, names)
        content: Any = self._plain_text(text)
        if parts or any(isinstance(piece, Named) for piece in pieces):
            content = [self._part(piece) for piece in pieces]
        messages = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": self._plain_text(system)})
        rendered = self.tokenizer.render_chat(
            messages, add_generation_prompt=True, **{"enable_thinking": False, **(variables or {})}
        )
        return Rendered(rendered, [str(piece) for piece in pieces if isinstance(piece, Named)])

    def _part(self, piece: str | Named) -> dict[str, object]:
        """Return a piece of a text as a part of a message, with shielded control tokens."""
        return {"type": "image"} if isinstance(piece, Named) else {"type": "text", "text": self._plain_text(piece)}

    def _plain_text(self, text: str) -> object:
        return self.shielded(text) if self.settings.escapes else text.replace(MARK, "").replace(SPLIT, "")

    def templated(self, names: Sequence[str] = (), **values: object) -> Rendered:
        """Return the text of the checkpoint's own template. `names` are the texts that stand for images."""
        from .sandbox import write

        assert self.settings.template is not None
        if not self.settings.escapes:
            values = {name: _without_sentinels(value) for name, value in values.items()}
        used, found = self._names, list[str]()
        values = {name: self._inserted(value, names, found) for name, value in values.items() if name in used}
        chat = {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": True, "enable_thinking": False}
        text = write(TEMPLATE, self.settings.template, {**self.tokenizer.special_tokens, **chat, **values})
        return Rendered(text, found)

    def _inserted(self, value: object, names: Sequence[str], found: list[str]) -> object:
        """Return a JSON value in which each text with an image is a list of parts, as templates of transformers expect.

        The names of the images are appended to `found`, in order.
        """
        if isinstance(value, dict):
            return {key: self._inserted(item, names, found) for key, item in value.items()}
        if isinstance(value, list):
            return [self._inserted(item, names, found) for item in value]
        if not isinstance(value, str):
            return value
        pieces = _pieces(value, names)
        own = [piece for piece in pieces if isinstance(piece, Named)]
        found += own
        if own:
            return [self._part(piece) for piece in pieces]
        return self.shielded(value) if self.settings.escapes else value

    def written(self, state: object, questions: Sequence[ShownQuestion]) -> Rendered:
        """Return the text of the prompt that the settings' `write` function returns."""
        assert self.settings.write is not None
        pieces = self.settings.write(state, questions)
        texts = [piece if isinstance(piece, Token) else self.shielded(piece) for piece in pieces]
        return Rendered("".join(map(str, texts)))

    def is_plain(self, text: str) -> bool:
        """Return True if the tokenizer can encode a rendered text directly: no shielded tokens, no sentinels."""
        return _BEGIN not in text and _END not in text and MARK not in text and SPLIT not in text

    def encode(
        self, text: str, expand: Callable[[str, Encode], np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Return the ids of a rendered text, int32 [n], and the places before which answers are read.

        Args:
            text: The rendered text.
            expand: expand(text, encode) replaces image placeholders in a text with hidden shielded tokens, and returns
                the ids from `encode`. None for prompts without images.
        """
        if expand is None:
            ids = self._encode_marked(text)
        else:
            held: list[str] = []

            def hide(match: re.Match[str]) -> str:
                held.append(match[0])
                return f"{_BEGIN}{len(held) - 1}{_END}"

            def encode(expanded: str) -> np.ndarray:
                return self._encode_marked(_HIDDEN.sub(lambda match: held[int(match[1])], expanded))

            ids = expand(self._marked.sub(hide, text), encode)
        mark, split = self._sentinels
        keep = (ids != mark) & (ids != split)
        marks = keep.cumsum()[ids == mark].tolist()
        rest = ids[keep]
        return rest, marks or [rest.size]

    def _encode_marked(self, text: str) -> np.ndarray:
        pieces = self._marked.split(text)
        ids = self._plain(pieces[0])
        for i, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._behind_line(piece, self._bare if i % 2 else self._plain)
        return np.asarray(ids, dtype=np.int32)

    def _behind_line(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a piece inside a text.

        SentencePiece would put a space before the first word, so the piece is encoded behind a newline.
        """
        line = self._plain("\n")
        ids = encode("\n" + piece)
        return ids[len(line) :] if ids[: len(line)] == line else encode(piece)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _bare(self, text: str) -> list[int]:
        """Return the ids of a text without recognising added tokens."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer with the sentinels as special tokens."""
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        added = [tokenizers.AddedToken(token, special=True, normalized=False) for token in (MARK, SPLIT)]
        backend.add_special_tokens(added)
        return backend

    @cached_property
    def _sentinels(self) -> tuple[int, int]:
        ids = self._backend.get_vocab(with_added_tokens=True)
        return ids[MARK], ids[SPLIT]

    def label_id(self, label: str) -> int | None:
        """Return the id of a label that is one known token, else None."""
        ids = self.tokenizer.encode(label, special=False).tolist()
        unknown = self.tokenizer.special_tokens.get("unk_token")
        return ids[0] if len(ids) == 1 and ids[0] != (unknown and self.tokenizer.token_id(unknown)) else None


def _without_sentinels(value: object) -> object:
    text = json.dumps(value, ensure_ascii=False).replace(MARK, "").replace(SPLIT, "")
    plain: object = json.loads(text)
    return plain


def check_template(source: str) -> None:
    """Raise InputError unless a template looks up `state`, and `question` or `questions`."""
    from .sandbox import compile_template

    names = compile_template(source)[1]
    if "state" not in names or not {"question", "questions"} & names:
        message = f"the template looks up {', '.join(sorted(names)) or 'nothing'}"
        remedy = "write a Jinja template with state, and with question or questions"
        raise InputError(message, field="template", remedy=remedy)
