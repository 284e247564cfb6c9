"""The head of Decision 2.0 models: a bilinear form and an MLP over the hidden states of the options and the end.

A package has its model in the folder `backbone`. Beside it are decision_head.safetensors, decision_config.json and
MODEL_MANIFEST.json, which names the files with temperatures and with offsets for score levels. Packages that are LoRA
adapters are not supported. Tested with random weights against the formula, because no published checkpoint was
available.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint, read_object
from ...checkpoint.checkpoint import BACKBONES
from ...checkpoint.settings import Settings
from ...errors import CheckpointError, UnsupportedModelError
from ...spec.requests import Readout
from ...tasks.questions import KINDS, Question
from ...tasks.readers import HEADS, Reader, too_many_options
from ...text.decisions import MARK, SPLIT, DecisionSettings, ShownQuestion, Token, is_temperature
from .tensors import HeadTensors, gelu, linear, normed

MANIFEST, CONFIG, TENSORS = "MODEL_MANIFEST.json", "decision_config.json", "decision_head.safetensors"
PROMPT = "decision2-segmented-options-global-query-v1"
_MARKED, _APART = Token(MARK), Token(SPLIT)
_END = "\n\nSelect the single option best supported by the context and instructions.\nDecision:"
_NOUL = {"false": "No", "true": "Yes"}


def canonical(value: object) -> str:
    """Return a value as compact JSON with sorted keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def write(state: object, questions: Sequence[ShownQuestion]) -> list[str]:
    """Return the pieces of a question's prompt, with a mark after each option and at the end.

    Options are encoded separately from the text around them.
    """
    (question,) = questions
    asked = f"Task type: {question['type']}\nQuestion:\n{_text(question['instructions'])}\nOptions:"
    pieces: list[str] = [f"Context:\n{_text(state)}\n\n{asked}", _APART]
    for option, said in zip(question["options"], question["descriptions"], strict=True):
        said = _NOUL[option] if question["type"] == "noul" and said is None else said
        described = canonical({"key": option, "description": said})
        pieces += [f"\n<option>\n{described}\n</option>", _MARKED]
    return [*pieces, _END, _MARKED]


def _text(value: object) -> str:
    return value if isinstance(value, str) else canonical(value)


class Decision2Reader(Reader):
    """Scores from the hidden state after each option and the hidden state at the end of the prompt."""

    def __init__(self, checkpoint: Checkpoint, config: Settings, manifest: Settings):
        self.readout = Readout("last")
        hidden, size = Settings.of(checkpoint.config).size("hidden_size"), config.size("head_dim")
        wide = {f"{name}.weight": (size, hidden) for name in ("key", "query", "candidate_mlp", "query_mlp")}
        norms = {f"{name}_norm.{part}": (hidden,) for name in ("candidate", "query") for part in ("weight", "bias")}
        rest = {"candidate_mlp.bias": (size,), "scalar.weight": (1, size)}
        self._tensors = HeadTensors(checkpoint, TENSORS, {**wide, **norms, **rest})
        self._most = config.size("max_options", 255)
        self.max_length = manifest.size("max_input_tokens", None)
        heat, offsets = (
            _named(checkpoint, manifest, *names)
            for names in (("calibration", "temperature_by_type"), ("score_bias", "offsets"))
        )
        if not all(is_temperature(value) for value in heat.values()):
            raise CheckpointError(f"{manifest.file}: the calibration is {heat!r:.80}, not {{kind: temperature}}")
        self._offsets = {str(count): np.asarray(values, np.float64) for count, values in offsets.items()}
        self.settings = DecisionSettings(
            temperature={kind: heat[kind] for kind in KINDS if kind in heat},
            noul_options=("false", "true"),
            write=write,
        )

    def check(self, question: Question) -> None:
        if len(question.options) > self._most:
            raise too_many_options(question, self._most)

    def marks(self, question: Question) -> int:
        return len(question.options) + 1

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, None, None]:
        tensors = self._tensors
        options = normed(np.asarray(values[:-1]), tensors, "candidate_norm")
        end = normed(np.asarray(values[-1:]), tensors, "query_norm")
        keys, query = linear(options, tensors, "key"), linear(end, tensors, "query")[0]
        mixed = gelu(linear(options, tensors, "candidate_mlp") + linear(end, tensors, "query_mlp"))
        scores = keys @ query / len(query) ** 0.5 + linear(mixed, tensors, "scalar")[:, 0]
        if question.kind == "score" and (offsets := self._offsets.get(str(len(scores)))) is not None:
            scores = scores + offsets
        return scores, None, None


def _named(checkpoint: Checkpoint, manifest: Settings, part: str, key: str) -> Mapping[str, Any]:
    """Return the object under `key` in the file that `part` of the manifest names, or {} without that part."""
    if not manifest.get(part):
        return {}
    name = manifest.settings(part).text("file")
    found = read_object(checkpoint, name, keys="").get(key)
    if not isinstance(found, dict):
        raise CheckpointError(f"{manifest.file} names {name} under {part}, but {key!r} in that file is not an object")
    return found


def _reader(checkpoint: Checkpoint) -> Decision2Reader | None:
    root = Settings(read_object(checkpoint, "config.json", keys=""), str(checkpoint.file("config.json")))
    if root.get("decision_format") != "vllm-sr-decision":
        return None
    manifest = Settings(read_object(checkpoint, MANIFEST, keys=""), str(checkpoint.file(MANIFEST)))
    config = Settings(read_object(checkpoint, CONFIG, keys=""), str(checkpoint.file(CONFIG)))
    works = [
        (root, "format_version", root.get("format_version"), 2),
        (manifest, "profile", manifest.get("profile"), "qwen-full"),
        (config, "prompt_version", config.get("prompt_version"), PROMPT),
        (config, "head_variant", config.get("head_variant", "shared"), "shared"),
        (config, "dec_residual", config.get("dec_residual"), None),
        (config, "readout", config.get("readout"), None),
    ]
    for settings, key, value, known in works:
        if value != known:
            raise UnsupportedModelError(f"{settings.file}: {key} is {value!r:.80}; only {known!r} works")
    return Decision2Reader(checkpoint, config, manifest)


BACKBONES["decision_format", "vllm-sr-decision"] = "backbone"
HEADS[MANIFEST] = _reader
