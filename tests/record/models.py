"""The models of a recording: tiny, random, by fixed seeds, each made when it is first needed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from adapters import write_adapter
from looped_dense import LOOPED, looped_checkpoint
from tiny import tiny_checkpoint
from tiny_vision import tiny_vision

__all__ = ["Models"]

# Before the conversation: the names of its tools.
TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
LABELS = {"id2label": {"0": "good", "1": "bad", "2": "neither"}, "label2id": {"good": 0, "bad": 1, "neither": 2}}
LOOP = LOOPED["loop"]


def _text(folder: Path) -> Path:
    model = tiny_checkpoint(folder, "llama")
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = TOOLS + settings["chat_template"].replace("['content']", "['content'] or ''")
    path.write_text(json.dumps(settings))
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "yes: "}}')
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    return model


# {name: what makes the model in a folder}
MODELS = {
    "text": _text,
    "labels": lambda folder: tiny_checkpoint(folder, "qwen3", head="classifier", num_labels=3, **LABELS),
    "ranker": lambda folder: tiny_checkpoint(folder, "llama", head="classifier", num_labels=1, seed=2),
    "sliding": lambda folder: tiny_checkpoint(folder, "gemma3", seed=3),
    "images": lambda folder: tiny_vision(folder, "smolvlm"),
    "ouro": lambda folder: looped_checkpoint(folder, "ouro"),
    "gated": lambda folder: looped_checkpoint(folder, "looped", loop=LOOP | {"gate": True}),
    "routed": lambda folder: looped_checkpoint(
        folder, "looped", loop=LOOP | {"router": {"kind": "hard", "threshold": 0.35}}, seed=3
    ),
}
# {name of an adapter of the model "text": its seed}
ADAPTERS = {"warm": 1, "cold": 2}


class Models:
    """Makes models and adapters in a folder, each once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Returns the folder of a model or an adapter."""
        with self._lock:
            place = self._folder / name
            if not place.exists():
                if name in ADAPTERS:
                    if not (self._folder / "text").exists():
                        _text(self._folder / "made").rename(self._folder / "text")
                    write_adapter(place, self._folder / "text", seed=ADAPTERS[name])
                else:
                    MODELS[name](self._folder / "made").rename(place)
            return place
