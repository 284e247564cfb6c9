"""Enter the decision models JevForDecision of transformers (5.24) in the tables of the core. No torch.

config.json has the config of the model under `text_config`. The head is `proj`, [num_verbalizers, hidden] with a bias.
The rows from the offset of a question's kind on score its options. Published checkpoints that keep the head in a file
of its own beside an adapter (judge_config.json, head.safetensors) are not read: none was at hand to test with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...checkpoint import Checkpoint
from ...checkpoint.settings import Settings
from ...errors import UnsupportedModelError
from ...model.config import ModelConfig
from ...model.families import HFConfig, add_families, config_from
from ...spec.requests import Readout
from ...tasks.decide import HEADS, Reader, too_many_options
from ...tasks.questions import KINDS, Question
from ...text.decisions import DecisionSettings

OFFSETS = {"noul": 0, "score": 2, "choice": 8}
ROWS = 24


def jev(hf: HFConfig) -> ModelConfig:
    """A decision model: a language model whose head scores labels instead of tokens."""
    settings = Settings.of(hf)
    settings.number("softcap", None)  # which JevReader applies
    config = config_from(dict(settings.settings("text_config")))
    # transformers 5.24 saves proj.weight as "weight", the name that it has in head.safetensors.
    head = {"proj": ("score",), "weight": ("score.weight",), "bias": ("score.bias",)}
    names = replace(config.names, parts={**config.names.parts, **head})
    rows = settings.size("num_verbalizers", ROWS)
    return replace(config, lm_head=False, num_labels=rows, head_bias=True, names=names)


class JevReader(Reader):
    """A JevReader reads the rows of the head that belong to a question's kind."""

    def __init__(self, checkpoint: Checkpoint):
        settings = Settings.of(checkpoint.config)
        self.settings = DecisionSettings.of(checkpoint)
        self.readout = Readout("head")
        self._cap = settings.number("softcap", None)
        offsets = checkpoint.config.get("offsets") or OFFSETS
        self._rows = settings.size("num_verbalizers", ROWS)
        if offsets.keys() != {*KINDS} or not all(type(o) is int and 0 <= o < self._rows for o in offsets.values()):
            raise UnsupportedModelError(f"{checkpoint.name}: offsets of config.json is {offsets!r:.80}")
        self._offsets = offsets

    def check(self, question: Question) -> None:
        most = self._rows - self._offsets[question.kind]
        if len(question.options) > most:
            raise too_many_options(question, most)

    def scores(self, question: Question, values: Sequence[np.ndarray]) -> tuple[np.ndarray, None, None]:
        first, (read,) = self._offsets[question.kind], values
        scores = read[first : first + len(question.options)]
        return scores if self._cap is None else self._cap * np.tanh(scores / self._cap), None, None


add_families({"JevForDecision": jev}, model_types={"jev": "JevForDecision"})
HEADS["JevForDecision"] = JevReader
