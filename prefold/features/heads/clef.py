"""The joint schema head of Clef models: a small transformer over the hidden states of one prompt with all questions.

The head is in joint_head.safetensors and joint_head_config.json beside the weights. Each option attends to the prompt.
The questions attend to each other and to the prompt, so an answer depends on the other questions about its state. The
LM head's rows for an option's tokens tell the head what the option means. Images, audio and video are not read. Tested
with random weights against the formula, because no published checkpoint was available.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint, read_object
from ...checkpoint.settings import MOST_LAYERS, Settings
from ...errors import CheckpointError
from ...spec.requests import Readout
from ...tasks.classify import softmax
from ...tasks.questions import Question
from ...tasks.readers import HEADS, Reader
from ...text.decisions import MARK, SPLIT, DecisionSettings, ShownQuestion, Token
from .tensors import HeadTensors, StoredRows, gelu, linear, normed

CONFIG, TENSORS = "joint_head_config.json", "joint_head.safetensors"
_MARKED, _APART = Token(MARK), Token(SPLIT)
_SYSTEM = (
    "Read the complete state and schema. Decide every field jointly. Each answer must be exactly one of that field's "
    "allowed options."
)
_BEFORE = Token(f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\nSTATE:\n")
_AFTER = Token("\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:")
_NOUL = {
    "true": "The proposition is true or the answer is yes.",
    "false": "The proposition is false or the answer is no.",
}
_TYPES = {"noul": 0, "choice": 1, "score": 2}
_MOST_SCALE = float(np.log(100.0))


def _text(value: object) -> str:
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    )


def _order(kind: str, options: Sequence[str]) -> list[int]:
    """Return the order of a question's options in the prompt, as indices. Only a choice is sorted (by name)."""
    places = range(len(options))
    return sorted(places, key=lambda i: options[i]) if kind == "choice" else list(places)


def write(state: object, questions: Sequence[ShownQuestion]) -> list[str]:
    """Return the pieces of the prompt for all questions, with a mark before and after each instruction and option."""
    pieces: list[str] = [_BEFORE, _APART, _text(state), _APART, "\n\nSCHEMA FIELDS:\n", _APART]
    for number, question in enumerate(questions, start=1):
        asked = question["instructions"]
        asked = question["name"] if asked in (None, "") else _text(asked)
        pieces += [f"\nFIELD {number}\nID: {question['name']}\nTYPE: {question['type']}\nINSTRUCTION: "]
        pieces += [_MARKED, asked, _MARKED, "\nALLOWED OPTIONS:\n", _APART]
        for place, i in enumerate(_order(question["type"], question["options"]), start=1):
            option, said = question["options"][i], question["descriptions"][i]
            if question["type"] == "noul" and said is None:
                said = _NOUL[option]
            meaning = {"option_id": option} | ({} if said is None else {"description": said})
            pieces += [f"OPTION {place}: ", _MARKED, _text(meaning), _MARKED, "\n", _APART]
        pieces += ["END FIELD\n", _APART]
    return [*pieces, _AFTER]


class ClefReader(Reader):
    """Scores for all options of all questions, from the hidden states of every row of the prompt."""

    def __init__(self, checkpoint: Checkpoint):
        self.readout = Readout("last")
        self.settings = DecisionSettings(write=write, joint=True, tokens=_BEFORE + _AFTER)
        config = Settings(read_object(checkpoint, CONFIG, keys=""), str(checkpoint.file(CONFIG)))
        hidden, width, self._heads = (config.size(name) for name in ("hidden_size", "width", "heads"))
        self._routing, self._layers = (config.size(name, most=MOST_LAYERS) for name in ("routing_layers", "layers"))
        if width % self._heads:
            raise CheckpointError(f"{config.file}: {self._heads} heads cannot share a width of {width} evenly")
        shapes = _shapes(hidden, width, config.size("feedforward"), self._routing, self._layers)
        self._tensors = HeadTensors(checkpoint, TENSORS, shapes)
        self._rows_of = StoredRows(checkpoint)

    def marks(self, question: Question) -> int:
        return 2 + 2 * len(question.options)

    def places(self, marks: Sequence[int], size: int) -> Sequence[int]:
        return range(1, size + 1)

    def note(self, ids: np.ndarray, marks: Sequence[int]) -> object:
        return [list(marks), [ids[first:end].tolist() for first, end in _pairs(marks)]]

    def all_scores(
        self, questions: Sequence[Question], values: Sequence[np.ndarray], note: Any
    ) -> Sequence[tuple[np.ndarray, None, None]]:
        """Return the scores of each question's options, in the question's order. Clef has no label probabilities."""
        marks, ids = note
        spans, tensors = _pairs(marks), self._tensors
        states = normed(np.stack(values), tensors, "hidden_norm")
        memory, last = linear(states, tensors, "memory_projection"), states[-1]
        first, asked, owner = 0, list[int](), list[int]()
        own: list[int] = []
        for number, question in enumerate(questions):
            asked.append(first)
            own += range(first + 1, first + 1 + len(question.options))
            owner += [number] * len(question.options)
            first += 1 + len(question.options)
        means = np.stack([states[start:end].mean(0) for start, end in spans])
        fields, of = means[asked], np.asarray(owner)
        lexical = np.stack([self._rows_of(np.asarray(ids[i])).mean(0) for i in own])
        options = linear(means[own], tensors, "option_context_projection")
        options += linear(lexical, tensors, "option_lexical_projection")
        options += linear(fields, tensors, "option_question_projection")[of]
        for i in range(self._routing):
            part = f"evidence_layers.{i}"
            seen = normed(memory, tensors, f"{part}.memory_norm")
            options = options + self._attend(normed(options, tensors, f"{part}.query_norm"), seen, f"{part}.attention")
            fed = linear(normed(options, tensors, f"{part}.feedforward_norm"), tensors, f"{part}.feedforward.0")
            options = options + linear(gelu(fed), tensors, f"{part}.feedforward.3")
        base = linear(fields, tensors, "question_projection")
        summaries = []
        for number in range(len(questions)):
            rows = options[of == number]
            summaries.append(softmax(rows @ base[number] / rows.shape[1] ** 0.5) @ rows)
        x = base + normed(np.stack(summaries), tensors, "option_summary_norm")
        x = x + linear(last, tensors, "global_projection")
        x = x + tensors["type_embedding.weight"][[_TYPES[question.kind] for question in questions]]
        for i in range(self._layers):
            part = f"layers.{i}"
            looked = normed(x, tensors, f"{part}.norm1")
            x = x + self._attend(looked, looked, f"{part}.self_attn")
            x = x + self._attend(normed(x, tensors, f"{part}.norm2"), memory, f"{part}.multihead_attn")
            fed = gelu(linear(normed(x, tensors, f"{part}.norm3"), tensors, f"{part}.linear1"))
            x = x + linear(fed, tensors, f"{part}.linear2")
        x, options = normed(x, tensors, "field_norm")[of], normed(options, tensors, "option_norm")
        prior = (_unit(lexical) * _unit(fields + last)[of]).sum(-1)
        features = np.concatenate([x, options, x * options, np.abs(x - options)], axis=-1)
        joint = linear(gelu(linear(features, tensors, "residual_scorer.0")), tensors, "residual_scorer.3")[:, 0]
        joint = joint + self._scale("joint_logit_scale") * (_unit(x, 1e-8) * _unit(options, 1e-8)).sum(-1)
        gate = 1.0 / (1.0 + np.exp(-float(tensors["residual_gate"])))
        scores = self._scale("prior_logit_scale") * prior + gate * joint
        found = []
        for number, question in enumerate(questions):
            in_order = np.empty(len(question.options))
            in_order[_order(question.kind, question.words)] = scores[of == number]
            found.append((in_order, None, None))
        return found

    def _scale(self, name: str) -> float:
        return float(np.exp(min(float(self._tensors[name]), _MOST_SCALE)))

    def _attend(self, queries: np.ndarray, keys: np.ndarray, part: str) -> np.ndarray:
        """Return the attention of `queries` over `keys`, which are also the values, float64 [queries, width]."""
        weight, bias = self._tensors[f"{part}.in_proj_weight"], self._tensors[f"{part}.in_proj_bias"]
        q, k, v = (
            (rows @ w.T + b).reshape(len(rows), self._heads, -1).swapaxes(0, 1)
            for rows, w, b in zip((queries, keys, keys), np.split(weight, 3), np.split(bias, 3), strict=True)
        )
        weights = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return linear((weights @ v).swapaxes(0, 1).reshape(len(queries), -1), self._tensors, f"{part}.out_proj")


def _pairs(marks: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(marks[::2], marks[1::2], strict=True))


def _unit(rows: np.ndarray, least: float = 1e-12) -> np.ndarray:
    out: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), least)
    return out


def _shapes(hidden: int, width: int, feedforward: int, routing: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the head, by name."""
    names = ("memory", "question", "option_question", "global", "option_context", "option_lexical")
    shapes: dict[str, tuple[int, ...]] = {f"{name}_projection.weight": (width, hidden) for name in names}
    shapes |= {"type_embedding.weight": (len(_TYPES), width)}
    shapes |= {name: () for name in ("prior_logit_scale", "joint_logit_scale", "residual_gate")}
    linears = {"residual_scorer.0": (width, 4 * width), "residual_scorer.3": (1, width)}
    norms = {"hidden_norm": hidden, "option_summary_norm": width, "field_norm": width, "option_norm": width}
    attentions = []
    for i in range(routing):
        part = f"evidence_layers.{i}"
        attentions.append(f"{part}.attention")
        norms |= {f"{part}.{name}_norm": width for name in ("query", "memory", "feedforward")}
        linears |= {f"{part}.feedforward.0": (feedforward, width), f"{part}.feedforward.3": (width, feedforward)}
    for i in range(layers):
        part = f"layers.{i}"
        attentions += [f"{part}.self_attn", f"{part}.multihead_attn"]
        norms |= {f"{part}.norm{number}": width for number in (1, 2, 3)}
        linears |= {f"{part}.linear1": (feedforward, width), f"{part}.linear2": (width, feedforward)}
    for part in attentions:
        shapes |= {f"{part}.in_proj_weight": (3 * width, width), f"{part}.in_proj_bias": (3 * width,)}
        linears[f"{part}.out_proj"] = (width, width)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, size in norms.items():
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return shapes


HEADS[CONFIG] = ClefReader
