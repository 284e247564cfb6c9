"""Classification: choose a label by the likelihood of each label, or by the checkpoint's classification head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from ..errors import InputError, warn_caller
from ..spec.requests import Readout, Request, Result
from ..spec.task import ClassifyOptions, Truncate
from ..text import FewShotPrompt, FilledTemplate
from ..text.media import Picture, notes_in
from ..text.prompts import CONTENT_FREE
from ..text.valid import check_said, valid_text
from .base import Inputs, Task, Text, TextBatch, Work, cut_end, level, sigmoid, work_of
from .results import Classification
from .score import PairOfIds, add_joint, add_pair, leading_ids

MUCH_LONGER = 4  # labels that differ by this many tokens cause a warning


@dataclass(frozen=True)
class ClassifyItem:
    """One text to classify."""

    text: Any  # a text or token ids; for a classification head also a pair of texts
    adapter: str | None = None  # LoRA adapter; None: the task's


class ClassifyTask(Task):
    """Classification by the likelihood of each label after the prompt.

    Items are ClassifyItem, a mapping with its fields, or a bare text. The answer is a Classification with `logprobs`.
    Probabilities are the softmax of the labels' summed log-likelihoods. With `normalization`, each sum is divided by
    the tokens or bytes of its label.

    Contextual calibration divides each probability by the mean probability for texts without content, and scales the
    sum back to 1 (Zhao et al. 2021, "Calibrate Before Use": W = diag(1 / p_cf), b = 0). With the option `calibrate`
    these texts must run first:

        if items := task.calibration_items():
            task = task.with_calibration([the answer to each of the items])
    """

    name = "classify"
    item_type = ClassifyItem

    def __init__(self, inputs: Inputs, options: ClassifyOptions):
        """Raise InputError for labels with equal tokens, and for wrong examples."""
        self.inputs = inputs
        self.labels, self.words, described = _labels(options.labels)
        words = dict(zip(self.labels, self.words, strict=True))
        shots = [_example(example, i, words) for i, example in enumerate(options.examples)]
        template = FewShotPrompt.template if options.template is None else options.template
        separator = valid_text(options.separator, "separator")
        instructions = separator.join(filter(None, (valid_text(options.instructions, "instructions"), described)))
        parts = {"instructions": instructions, "template": template, "separator": separator}
        self.prompt = FewShotPrompt(examples=shots, **{name: valid_text(text, name) for name, text in parts.items()})
        self.normalization = options.normalization
        self.calibrate = options.calibrate
        self.calibration: np.ndarray | None = None
        self.truncate = options.truncate  # a truncated text is encoded without the prompt around it
        self.readout = Readout("logprobs")
        self._check_label_tokens()

    def _check_label_tokens(self) -> None:
        """Raise InputError for labels that have the same token ids, or none."""
        batch = TextBatch(self.inputs.tokenizer)
        pairs = self._add_pairs(batch, self.prompt.render("x"))
        batch.encode()
        label_of: dict[tuple[int, ...], str] = {}
        for label, pair in zip(self.labels, pairs, strict=True):
            ids = tuple(pair()[1].tolist())
            if not ids or ids in label_of:
                problem = f"encodes like {label_of[ids]!r}" if ids else "has no tokens of its own"
                message = f"the label {label!r} {problem} in this model's vocabulary"
                raise InputError(message, field="labels", remedy="write it differently: {label: text}")
            label_of[ids] = label
        if self.normalization is None and not self.calibrate:
            _warn_of_lengths({label: len(ids) for ids, label in label_of.items()})

    def _add_pairs(self, batch: TextBatch, prompt: Text) -> list[PairOfIds]:
        return [add_pair(batch, self.inputs, prompt, label) for label in self.words]

    def calibration_items(self) -> list[ClassifyItem]:
        """Return the texts without content that calibrate the task.

        Return none without the option `calibrate`, and none if the task is calibrated already.
        """
        is_wanted = self.calibrate and self.calibration is None
        return [ClassifyItem(text) for text in CONTENT_FREE] if is_wanted else []

    def with_calibration(self, outputs: Sequence[Classification] | np.ndarray) -> ClassifyTask:
        """Return a calibrated copy of the task.

        Args:
            outputs: The answers to `calibration_items()`, or probabilities, float [labels] or [texts, labels].

        Raise InputError for another shape, and for values that are not probabilities.
        """
        rows = [[*o.probabilities.values()] if isinstance(o, Classification) else o for o in outputs]
        mean = np.asarray(rows, dtype=np.float64)
        mean = mean.mean(axis=0) if mean.ndim == 2 else mean
        if mean.shape != (len(self.labels),) or not np.isfinite(mean).all() or (mean < 0).any():
            message = f"calibration has the shape {mean.shape} for {len(self.labels)} labels, or is not probabilities"
            raise InputError(message, field="calibration", remedy="give a probability for each label")
        task = copy.copy(self)
        task.calibration = mean
        return task

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        if self.calibrate and item.adapter not in (None, self.inputs.adapter):
            message = f"the labels were calibrated with {self.inputs.adapter or 'no adapter'}, not {item.adapter!r}"
            raise InputError(message, field="adapter", remedy="calibrate with one adapter for all texts")
        pictures: list[Picture] = []
        is_free = self.calibrate and self.calibration is None  # this is a text without content
        text = (self.inputs.text if is_free else self.inputs.content)(item.text, "text", pictures)
        text = self.inputs.bounded(text, "text", self.truncate, left=self.truncate == "left")
        if isinstance(text, str):
            return partial(self._work, text, self._add_pairs(batch, self.prompt.render(text)))
        return partial(self._work_of_ids, text, pictures)

    def _work(self, text: str, pairs: list[PairOfIds]) -> Work:
        ids = [pair() for pair in pairs]
        if not self.truncate or not self._over(ids):
            return self._finish_work(ids)
        assert self.inputs.tokenizer is not None
        encode = partial(self.inputs.tokenizer.encode, special=False)
        whole = encode(text)
        over = self._over(self._pairs_around(whole))
        if self.truncate is True and over and isinstance(text, FilledTemplate):
            whole = self.inputs.cut(text, encode, whole.size - over, whole)
        return self._work_of_ids(whole)

    def _work_of_ids(self, text: np.ndarray, pictures: Sequence[Picture] = ()) -> Work:
        """Return the Work of a text in token ids, cut if it is too long.

        The parts of the prompt around the text are encoded separately.

        Args:
            pictures: The text's images.
        """
        ids = self._pairs_around(text)
        over = self._over(ids)
        if over and self.truncate and over < text.size:
            ids = self._pairs_around(cut_end(text, over, "text", left=self.truncate == "left"))
        return self._finish_work(ids, pictures)

    @cached_property
    def _around(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Return (the ids of the prompt before a text, the ids after the text for each label).

        The ids for a label are (ids between text and label, ids of the label).
        """
        batch = TextBatch(self.inputs.tokenizer)
        head = batch.add(self.prompt.head)
        tails = [add_joint(batch, self.prompt.tail, label) for label in self.words]
        batch.encode()
        # If nothing precedes the text, the prompt begins with the text: "x" stands for any text that is not empty.
        before = leading_ids(self.inputs.tokenizer, self.prompt.head or "x")
        return np.concatenate((before, head())), [tail() for tail in tails]

    def _pairs_around(self, text: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        before, tails = self._around
        return [(np.concatenate((before, text, between)), label) for between, label in tails]

    def _over(self, ids: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        return max(self.inputs.over(prompt.size + label.size - 1) for prompt, label in ids)

    def _finish_work(self, ids: Sequence[tuple[np.ndarray, np.ndarray]], pictures: Sequence[Picture] = ()) -> Work:
        requests = []
        for name, (prompt, label) in zip(self.labels, ids, strict=True):
            if label.size == 0:
                message = f"the label {name!r} has no token of its own: its letters are part of the prompt's last token"
                raise InputError(message, field="text", remedy="end the template's text before {label} differently")
            tokens = prompt if label.size == 1 else np.concatenate((prompt, label[:-1]))
            requests.append(self.inputs.request(tokens, "text", label))
        return work_of(requests, pictures)

    @property
    def example(self) -> Classification:
        zeros = dict.fromkeys(self.labels, 0.0)
        return Classification("", zeros, logprobs=zeros)

    def finish(self, note: Any, results: Sequence[Result]) -> Classification:
        sums = np.array([np.asarray(result.values, dtype=np.float64).sum() for result in results])
        scores = sums / self._lengths(results)
        if self.calibration is not None:
            # softmax(score - log p_cf) equals p / p_cf, scaled to sum to 1
            scores = scores - np.log(np.maximum(self.calibration, 1e-300))
        probabilities = softmax(scores)
        return Classification(
            self.labels[int(np.argmax(scores))],
            dict(zip(self.labels, probabilities.tolist(), strict=True)),
            logprobs=dict(zip(self.labels, sums.tolist(), strict=True)),
            num_tokens=note["tokens"],
            image_notes=notes_in(note),
        )

    def _lengths(self, results: Sequence[Result]) -> np.ndarray:
        if self.normalization == "tokens":
            return np.array([result.values.size for result in results], dtype=np.float64)
        if self.normalization == "bytes":
            return np.array([len(label.encode()) for label in self.words], dtype=np.float64)
        return np.ones(len(results))


# values of `problem_type` in config.json
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class ClassifyHeadTask(Task):
    """Classification by the checkpoint's classification head.

    Items are ClassifyItem, a mapping with its fields, or a bare text. A text is encoded without a prompt around it. The
    answer is a Classification with `logits`.

    As in transformers' pipeline, `problem_type` of config.json decides how logits become probabilities:

    - "regression": the logits themselves
    - one label, or "multi_label_classification": the sigmoid of each logit
    - otherwise: the softmax of the logits
    """

    name = "classify"
    item_type = ClassifyItem

    def __init__(
        self,
        inputs: Inputs,
        labels: Sequence[str],
        *,
        problem: ProblemType | None = None,
        truncate: Truncate = False,
    ):
        self.inputs = inputs
        self.labels = list(labels)
        is_multi = problem == "multi_label_classification" or len(self.labels) == 1
        self.activation = np.array if problem == "regression" else sigmoid if is_multi else softmax
        self.truncate = truncate
        self.readout = Readout("head")

    def _plan(self, item: Any, batch: TextBatch) -> Any:
        pictures: list[Picture] = []
        if isinstance(item.text, (tuple, list)) and [*map(type, item.text)] == [str, str]:
            maker = self._plan_pair(item.text, batch)
        else:
            maker = self.inputs.plan_whole(item.text, "text", batch, pictures, truncate=self.truncate)

        return lambda: work_of([maker()], pictures)

    def _plan_pair(self, pair: Sequence[str], batch: TextBatch) -> Callable[[], Request]:
        """Return a function that makes the request of two texts, with the special tokens of a pair.

        Call the function after the batch is encoded. Truncation cuts the longer text first.
        """
        tokenizer = self.inputs.tokenizer
        left = self.truncate == "left" or (
            self.truncate is True and tokenizer is not None and tokenizer.truncation_side == "left"
        )
        texts = (self.inputs.bounded(valid_text(text, "text"), "text", self.truncate, left=left) for text in pair)
        gets = [batch.add(text) for text in texts]
        assert tokenizer is not None  # `batch.add` raises without one
        before, between, after = tokenizer.pair_ids()

        def make() -> Request:
            first, second = (get() for get in gets)
            around = before.size + between.size + after.size
            over = self.inputs.over(around + first.size + second.size)
            keep = first.size + second.size - over
            if over and self.truncate and keep > 0:
                sizes = level([first.size, second.size], keep)
                first, second = (
                    ids[ids.size - size :] if left else ids[:size]
                    for ids, size in zip((first, second), sizes, strict=True)
                )
            return self.inputs.request(np.concatenate((before, first, between, second, after)), "text")

        return make

    @property
    def example(self) -> Classification:
        zeros = dict.fromkeys(self.labels, 0.0)
        return Classification("", zeros, logits=zeros)

    def finish(self, note: Any, results: Sequence[Result]) -> Classification:
        logits = np.asarray(results[0].values, dtype=np.float64)
        probabilities = self.activation(logits)
        return Classification(
            self.labels[int(np.argmax(logits))],
            dict(zip(self.labels, probabilities.tolist(), strict=True)),
            logits=dict(zip(self.labels, logits.tolist(), strict=True)),
            num_tokens=note["tokens"],
            image_notes=notes_in(note),
        )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    z = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


def _warn_of_lengths(tokens: Mapping[str, int]) -> None:
    """Warn if labels differ much in length, because each further token makes a label less likely.

    Args:
        tokens: The number of tokens of each label in the prompt.
    """
    short, long = min(tokens, key=tokens.__getitem__), max(tokens, key=tokens.__getitem__)
    if tokens[long] >= max(2 * tokens[short], tokens[short] + MUCH_LONGER):
        warn_caller(
            f"labels differ much in length, and a longer label counts as less likely: {short!r} has"
            f' {tokens[short]} tokens, {long!r} has {tokens[long]}. Give normalization="tokens" (--normalization'
            ' tokens), or keep labels short and describe them: {"label": {"description": "..."}}'
        )


_PARTS = ("description", "text")  # keys of a label's mapping


def _labels(labels: Any) -> tuple[list[str], list[str], str]:
    """Return (the labels, the text of each in the prompt, one text that describes the labels).

    Raise InputError for fewer than two labels, and for empty or equal ones.
    """
    if isinstance(labels, str) or not isinstance(labels, (Sequence, Mapping)) or len(labels) < 2:
        kind = f"{labels!r:.80}" if isinstance(labels, (str, list, tuple, dict)) else f"of type {type(labels).__name__}"
        message = f"labels is {kind}"
        raise InputError(message, field="labels", remedy="give a list of two labels or more, or {label: text}")
    names = list(labels)
    forms = list(labels.values()) if isinstance(labels, Mapping) else names
    words, descriptions = list[Any](), list[Any]()
    for name, form in zip(names, forms, strict=True):
        parts = form if isinstance(form, Mapping) else {"text": form}
        for part in parts.keys() - {*_PARTS}:
            remedy = 'give {"description": what the label means, "text": how it is written}'
            raise InputError(f"the label {name!r} has {part!r}", field=f"labels[{name!r}]", remedy=remedy)
        words.append(parts.get("text", name))
        descriptions.append(parts.get("description"))
    for kind, texts in (("label", names), ("text of a label", words)):
        for i, text in enumerate(texts):
            valid_text(text, f"labels[{i}]")
            if not text.strip():
                raise InputError(
                    f"a {kind} is empty", field=f"labels[{i}]", remedy="give a text that is not empty", code="empty"
                )
            if text in texts[:i]:
                message = f"the {kind} {text!r} is given twice"
                raise InputError(message, field=f"labels[{i}]", remedy="give each once", code="duplicate")
    for name, description in zip(names, descriptions, strict=True):
        if description is not None:
            check_said(valid_text(description, f"the description of {name!r}"), f"the description of {name!r}")
    return names, words, _described(words, descriptions)


def _described(words: Sequence[str], descriptions: Sequence[str | None]) -> str:
    """Return the part of the prompt that describes the labels. It is empty if no label is described."""
    if not any(descriptions):
        return ""
    pairs = zip(words, descriptions, strict=True)
    return "\n".join(["Labels:", *(word if said is None else f"{word}: {said}" for word, said in pairs)])


def _example(example: Any, index: int, words: Mapping[str, str]) -> tuple[str, str]:
    """Return (the text, the label's text in the prompt) of an example. Raise InputError for a wrong example."""
    field = f"examples[{index}]"
    if isinstance(example, Mapping):
        pair: Any = (example.get("text"), example.get("label"))
    else:
        pair = example
    if isinstance(pair, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
        message = f"{field!r} is not a pair"
        raise InputError(message, field=field, remedy='write (text, label) or {"text": ..., "label": ...}')
    text, label = valid_text(pair[0], f"{field}.text"), valid_text(pair[1], f"{field}.label")
    if label not in words:
        message = f"the label {label!r} of {field!r} is not one of the labels"
        raise InputError(message, field=f"{field}.label", remedy=f"the labels are {', '.join(words)}")
    return text, words[label]
