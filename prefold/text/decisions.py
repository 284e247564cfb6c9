"""Prompts of decisions: a state and a typed question become the token ids before which the answer is read.

The default prompt, the settings files and the treatment of control tokens are those of transformers
5.24: `decision.json` and `decision_template.jinja` beside the weights. A template renders one `question`, or all
`questions` of a state, writes `<|mark|>` where an answer is read, and `<|split|>` where two texts are encoded apart. A
prompt without a mark is read at its end.
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
# vLLM's labels (0.32), by kind of question, and its last lines.
VLLM_LABELS = {"noul": ("yes", "no"), "choice": LETTERS, "score": tuple(string.digits)}
_VLLM_CLOSINGS = {
    "noul": "Answer with yes or no only.",
    "choice": "Answer with the letter of one option only.",
    "score": "Answer with the number of one level only.",
}
# They stand around a control token that a request holds. A request's own letters of this kind are dropped.
_BEGIN, _END = "\U000f0000", "\U000f0001"
_NAME = "\U000f0002"  # begins the name of an image
_HIDDEN = re.compile(f"{_BEGIN}([0-9]+){_END}")


class ShownQuestion(TypedDict):
    """A question as templates see it, with its options in the order of the prompt."""

    name: str
    type: str
    instructions: object
    options: list[str]
    labels: list[str]
    descriptions: list[object]


class Token(str):
    """A piece of a prompt in which control tokens are control tokens."""


@dataclass(frozen=True)
class DecisionSettings:
    """How a model's decisions are asked for and read.

    Attributes:
        labels: {kind of question: its labels, one token each}; by default Yes and No, or A to Z
        temperature: {kind of question: what the logits of its labels are divided by}
        template: a Jinja template in place of the default prompt
        write: write(state, questions) returns the pieces of the prompt, in place of a template; control tokens are
            control tokens only in the pieces that are Token
        joint: whether `write` takes all questions of a state at once
        tokens: the control tokens that `write` writes
        noul_options: in which order a prompt has the options of a yes/no question
        escapes: whether control tokens in a request stay text
        adapter: the folder, beside the weights, of a LoRA adapter that has to be loaded
    """

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    temperature: Mapping[str, float] = field(default_factory=dict)
    template: str | None = None
    noul_options: tuple[str, ...] = ("true", "false")
    escapes: bool = True
    adapter: str | None = None
    write: Callable[[object, Sequence[ShownQuestion]], Sequence[str]] | None = None
    joint: bool = False
    tokens: str = ""

    @property
    def is_own(self) -> bool:
        """Return whether the model has a prompt of its own, in place of one in the chat template."""
        return self.template is not None or self.write is not None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> DecisionSettings:
        """Return the settings of a checkpoint. Raise CheckpointError if decision.json is not as it should be."""
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
    """Raise CheckpointError for labels of decision.json that are not distinct single tokens."""
    encoder = DecisionEncoder(tokenizer, settings)
    for kind, labels in settings.labels.items():
        ids = [encoder.label_id(label) for label in labels]
        wrong = [label for i, label in enumerate(labels) if ids[i] is None or ids[i] in ids[:i]]
        if wrong:
            used = ", ".join(map(repr, wrong[:5]))
            raise CheckpointError(
                f"{checkpoint.name}: labels of {CONFIG} has for {kind} questions {used}, which the tokenizer does not "
                "encode as a token of its own; give each option a label that is one token"
            )


def is_temperature(value: object) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def written(value: object) -> str:
    """Return a text as it is, nothing for None, and any other JSON value as JSON."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def default_prompt(
    state: object, kind: str, instructions: object, options: Sequence[str], labels: Sequence[str],
    descriptions: Sequence[object], first: str = "state",
) -> str:  # fmt: skip
    """Return the user's message of the default prompt: the state, an empty line, the question with its options.

    With first="question" the question stands first, and the state behind an empty line.
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
    """Return the user's message of vLLM's prompt (0.32): the state, the question, an option a line, what to answer.

    vLLM writes instructions and descriptions that are not texts as Python does, not as JSON.
    """
    lines = [f"Question: {_as_vllm(instructions)}"] if _as_vllm(instructions) else []
    for label, option, description in zip(labels, options, descriptions, strict=True):
        said = _as_vllm(description)
        if kind == "choice":
            lines.append(f"{label}: {option} - {said}" if said else f"{label}: {option}")
        else:  # a level is its description; yes and no stand alone without one
            lines.append(f"{label}: {said}" if said or kind == "score" else label)
    question = "\n".join([*lines, _VLLM_CLOSINGS[kind]])
    return f"{written(state)}\n\n{question}" if first == "state" else f"{question}\n\n{written(state)}"


def _as_vllm(value: object) -> str:
    return "" if value is None else str(value)


Encode = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Rendered:
    """A Rendered is the text of a prompt.

    Attributes:
        text: with shielded control tokens, and the model's placeholder for each image
        shown: the names of these images, in order
    """

    text: str
    shown: Sequence[str] = ()


class Named(str):
    """The name of an image, in a text."""


class ImageNames:
    """Makes texts that may stand for images in a JSON value: none of them occurs in it.

    A name has the field of its image in it, which errors show.
    """

    def __init__(self, beside: object):
        text, self._begin = json.dumps(beside, ensure_ascii=False), _NAME
        while self._begin in text:
            self._begin += _NAME

    def of(self, field: str) -> str:
        return f"{self._begin}{field}{_END}"


def image_field(name: str) -> str:
    """Return the field of an image by its name."""
    made = name.startswith(_NAME) and name.endswith(_END)
    return name.strip(_NAME + _END) if made else f"images[{name!r:.100}]"


def _pieces(text: str, names: Sequence[str]) -> list[str | Named]:
    """Return a text in pieces. Pieces that stand for images are Named. No piece is empty; an empty text is."""
    if not names:
        return [text]
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    pieces = [Named(part) if i % 2 else part for i, part in enumerate(parts) if part]
    return pieces or [text]


class DecisionEncoder:
    """A DecisionEncoder renders prompts of decisions and encodes them.

    Control tokens of a request are encoded as plain text, each apart from the text around it, as transformers does it.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DecisionSettings):
        self.tokenizer = tokenizer
        self.settings = settings
        templates = tokenizer.chat_templates.templates
        own = templates.get("default") or next(iter(templates.values()), "")
        self.source = settings.tokens if settings.write is not None else settings.template or own

    @cached_property
    def takes_all(self) -> bool:
        """Return whether all questions of a state are in one prompt."""
        return self.settings.joint if self.settings.template is None else "questions" in self._names

    @cached_property
    def _names(self) -> Collection[str]:
        """Return the names that the template looks up."""
        from .sandbox import compile_template

        assert self.settings.template is not None
        return compile_template(self.settings.template)[1]

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Match the control tokens: special ones, the sentinels, and added ones that the template writes."""
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
        """Return a JSON value in whose texts each control token stands between the two letters."""
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
        """Return the prompt of a user's message, in the chat template, up to where the assistant's answer begins.

        names: the texts that stand for images; parts: whether the content is a list of parts, as it is for a model that
        sees images; system: the text of a message before; variables: further ones of the chat template
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
        """Return a piece of a text as a part of a message, in which control tokens are shielded."""
        return {"type": "image"} if isinstance(piece, Named) else {"type": "text", "text": self._plain_text(piece)}

    def _plain_text(self, text: str) -> object:
        return self.shielded(text) if self.settings.escapes else text.replace(MARK, "").replace(SPLIT, "")

    def templated(self, names: Sequence[str] = (), **values: object) -> Rendered:
        """Return the text of the checkpoint's own template. names: the texts that stand for images"""
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
        """Return a JSON value in which a text with an image is a list of parts, as transformers gives it to templates.

        found: a list to which the images' names are added, in order
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
        """Return the text of the prompt that the settings' own function writes."""
        assert self.settings.write is not None
        pieces = self.settings.write(state, questions)
        texts = [piece if isinstance(piece, Token) else self.shielded(piece) for piece in pieces]
        return Rendered("".join(map(str, texts)))

    def is_plain(self, text: str) -> bool:
        """Return whether the tokenizer alone encodes a rendered text: it holds no shielded token and no sentinel."""
        return _BEGIN not in text and _END not in text and MARK not in text and SPLIT not in text

    def encode(
        self, text: str, expand: Callable[[str, Encode], np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Return (the ids of a rendered text, int32 [n]; the places before which answers are read).

        expand(text, encode) puts the rows of images into a text in which shielded tokens are hidden, and returns the
        ids that `encode` makes of it; None: there are no images
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
        """Return the ids of a piece from within a text: SentencePiece would put a space before a text's first word."""
        line = self._plain("\n")
        ids = encode("\n" + piece)
        return ids[len(line) :] if ids[: len(line)] == line else encode(piece)

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _bare(self, text: str) -> list[int]:
        """Return the ids of a text in which no added token is recognised."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that knows the sentinels."""
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
        """Return the id of a label that is one known token; None for any other."""
        ids = self.tokenizer.encode(label, special=False).tolist()
        unknown = self.tokenizer.special_tokens.get("unk_token")
        return ids[0] if len(ids) == 1 and ids[0] != (unknown and self.tokenizer.token_id(unknown)) else None


def _without_sentinels(value: object) -> object:
    text = json.dumps(value, ensure_ascii=False).replace(MARK, "").replace(SPLIT, "")
    plain: object = json.loads(text)
    return plain


def check_template(source: str) -> None:
    """Raise InputError unless a template looks up `question` or `questions`, and `state`."""
    from .sandbox import compile_template

    names = compile_template(source)[1]
    if "state" not in names or not {"question", "questions"} & names:
        message = f"the template looks up {', '.join(sorted(names)) or 'nothing'}"
        remedy = "write a Jinja template with state, and with question or questions"
        raise InputError(message, field="template", remedy=remedy)
