"""The pointer head of Kev models: compares the hidden state at the prompt's last token with each option's last token.

Two forms are read: head.safetensors with head.meta.json, as published for runtimes that open no pickles; and
head.safetensors with a config.json of the architecture KevModel, whose adapter is merged into the weights. head.pt is a
pickle and is never opened. Tested with random weights against the formula, because no published checkpoint was
available.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...checkpoint import Checkpoint, read_object
from ...checkpoint.settings import Settings
from ...errors import CheckpointError, UnsupportedModelError
from ...model.config import ModelConfig
from ...model.families import HFConfig, add_families, config_from
from ...spec.requests import Readout
from ...tasks.questions import KINDS, Question
from ...tasks.readers import HEADS, Reader
from ...text.decisions import MARK, DecisionSettings, ShownQuestion, Token
from .tensors import HeadTensors

TENSORS, META = "head.safetensors", "head.meta.json"
# Special tokens of Qwen: before the state, the question and each option, after each option, and at the end.
STATE, QUESTION, OPTION, CLOSE, DECIDE = (
    Token(f"<|{name}|>") for name in ("fim_prefix", "fim_middle", "box_start", "box_end", "fim_suffix")
)
_MARKED = Token(MARK)
_CONTROL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")


def kev(hf: HFConfig) -> ModelConfig:
    """A decision model: a language model without its head, whose hidden states a pointer head reads."""
    settings, own = Settings.of(hf), ("kev_head_dim", "kev_temperature")
    for key in own:
        settings.get(key)  # marks the key as read; KevReader applies it
    inner = settings.settings("text_config") or settings
    config = config_from({key: inner[key] for key in inner if key not in ("architectures", *own)})
    return replace(config, lm_head=False)


def flat(value: object, depth: int = 0) -> str:
    """Return a JSON value as labelled lines, the form that the head was trained with."""
    before = "  " * depth
    if isinstance(value, list):
        return "\n".join(f"{before}- {flat(part, depth + 1).lstrip()}" for part in value)
    if isinstance(value, dict):
        nested = {key: isinstance(part, (list, dict)) for key, part in value.items()}
        lines = [
            f"{before}{key}:\n{flat(part, depth + 1)}" if nested[key] else f"{before}{key}: {flat(part)}"
            for key, part in value.items()
        ]
        return "\n".join(lines)
    return "" if value is None else str(value)


def write(state: object, questions: Sequence[ShownQuestion]) -> list[str]:
    """Return the pieces of a question's prompt, with a mark after each option and at the end."""
    (question,) = questions
    pieces: list[str] = [STATE, _text(state), QUESTION, _text(question["instructions"])]
    for option, said in zip(question["options"], question["descriptions"], strict=True):
        if question["type"] == "score":
            text = flat(said)
        else:
            name = {"false": "no", "true": "yes"}[option] if question["type"] == "noul" else option
            text = name if said in (None, "") else f"{name}: {flat(said)}"
        pieces += [OPTION, _text(text), CLOSE, _MARKED]
    return [*pieces, DECIDE, _MARKED]


def _text(value: object) -> str:
    """Return a value as text, with a broken bar in place of the bar of anything that looks like a control token."""
    return _CONTROL.sub(r"<¦\1¦>", flat(value))


class KevReader(Reader):
    """Scores `key @ query / sqrt(head_dim)`, with a key from each option and the query from the prompt's end."""

    def __init__(self, checkpoint: Checkpoint):
        self.readout = Readout("last")
        config = Settings.of(checkpoint.config)
        hidden = Settings.of(config.settings("text_config") or config).size("hidden_size")
        found = read_object(checkpoint, META, keys="")
        meta = found.get("meta", found)
        if not isinstance(meta, dict):
            raise CheckpointError(f"{checkpoint.name}: meta of {META} is not an object")
        for name in ("option_isolation", "special_embeddings"):
            if meta.get(name):
                raise UnsupportedModelError(f"{checkpoint.name}: {name} of {META} is {meta[name]!r}; only false works")
        head = {"head_dim": config.get("kev_head_dim"), "temperature": config.get("kev_temperature"), **meta}
        head = {name: value for name, value in head.items() if value is not None}
        settings = Settings(head, str(checkpoint.file(META) or config.file))
        size = settings.size("head_dim", 256)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, hidden) for name in "qk"}
        self._tensors = HeadTensors(checkpoint, TENSORS, shapes | {f"{name}.bias": (size,) for name in "qk"})
        temperature = float(settings.number("temperature", 1.0))
        self.settings = DecisionSettings(
            temperature=dict.fromkeys(KINDS, temperature), noul_options=("false", "true"), write=write
        )

    def marks(self, question: Question) -> int:
        return len(question.options) + 1

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, None, None]:
        query, keys = (
            np.asarray(rows) @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"]
            for name, rows in (("q", values[-1]), ("k", values[:-1]))
        )
        return keys @ query / len(query) ** 0.5, None, None


add_families({"KevModel": kev}, model_types={"kev": "KevModel"})
HEADS["KevModel"] = HEADS[META] = KevReader
