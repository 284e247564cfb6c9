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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint import Checkpoint, read_object
from ..errors import CheckpointError, InputError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

MARK, SPLIT = "<|mark|>", "<|split|>"
CONFIG, TEMPLATE = "decision.json", "decision_template.jinja"
LETTERS = tuple(string.ascii_uppercase)
# They stand around a control token that a request holds. A request's own letters of this kind are dropped.
_BEGIN, _END = "\U000f0000", "\U000f0001"


@dataclass(frozen=True)
class DecisionSettings:
    """How a model's decisions are asked for and read.

    Attributes:
        labels: {kind of question: its labels, one token each}; by default Yes and No, or A to Z
        temperature: {kind of question: what the logits of its labels are divided by}
        template: a Jinja template in place of the default prompt
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

    Instructions and descriptions that are no texts are written as Python writes them.
    """
    texts = ["" if said is None else str(said) for said in (instructions, *descriptions)]
    lines = [f"Question: {texts[0]}"] if texts[0] else []
    for label, option, said in zip(labels, options, texts[1:], strict=True):
        if kind == "choice":
            lines.append(f"{label}: {option} - {said}" if said else f"{label}: {option}")
        else:
            lines.append(f"{label}: {said}" if said or kind == "score" else label)
    what = {"noul": "yes or no", "score": "the number of one level"}.get(kind, "the letter of one option")
    question = "\n".join([*lines, f"Answer with {what} only."])
    return f"{written(state)}\n\n{question}" if first == "state" else f"{question}\n\n{written(state)}"


class DecisionEncoder:
    """A DecisionEncoder renders prompts of decisions and encodes them.

    Control tokens of a request are encoded as plain text, each apart from the text around it, as transformers does it.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DecisionSettings):
        self.tokenizer = tokenizer
        self.settings = settings
        templates = tokenizer.chat_templates.templates
        own = templates.get("default") or next(iter(templates.values()), "")
        self.source = own if settings.template is None else settings.template

    @cached_property
    def takes_all(self) -> bool:
        """Return whether the template renders all questions of a state in one prompt."""
        if self.settings.template is None:
            return False
        from .sandbox import compile_template

        return "questions" in compile_template(self.settings.template)[1]

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

    def message(self, text: str) -> str:
        """Return the prompt of a user's message, in the chat template, up to where the assistant's answer begins."""
        shown = self.shielded(text) if self.settings.escapes else text.replace(MARK, "").replace(SPLIT, "")
        return self.tokenizer.render_chat(
            [{"role": "user", "content": shown}], add_generation_prompt=True, enable_thinking=False
        )

    def templated(self, **values: object) -> str:
        """Return the text of the checkpoint's own template."""
        from .sandbox import write

        assert self.settings.template is not None
        if self.settings.escapes:
            values = {name: self.shielded(value) for name, value in values.items()}
        else:
            values = {name: _without_sentinels(value) for name, value in values.items()}
        chat = {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": True, "enable_thinking": False}
        return write(TEMPLATE, self.settings.template, {**self.tokenizer.special_tokens, **chat, **values})

    def is_plain(self, text: str) -> bool:
        """Return whether the tokenizer alone encodes a rendered text: it holds no shielded token and no sentinel."""
        return _BEGIN not in text and _END not in text and MARK not in text and SPLIT not in text

    def encode(self, text: str) -> tuple[np.ndarray, list[int]]:
        """Return (the ids of a rendered text, int32 [n]; the places before which answers are read)."""
        ids = np.asarray(self._encode_marked(text), dtype=np.int32)
        mark, split = self._sentinels
        keep = (ids != mark) & (ids != split)
        marks = keep.cumsum()[ids == mark].tolist()
        rest = ids[keep]
        return rest, marks or [rest.size]

    def _encode_marked(self, text: str) -> list[int]:
        pieces = self._marked.split(text)
        ids = self._plain(pieces[0])
        for i, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._behind_line(piece, self._bare if i % 2 else self._plain)
        return ids

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
