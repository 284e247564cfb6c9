"""prefold: batch inference over causal transformers that computes every shared prefix once."""

from __future__ import annotations

from importlib import import_module

# Type checkers treat a variable of this name as true. Importing `typing` for it would take most of the time of
# `import prefold`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .engine.cache import CacheOptions
    from .errors import (
        CheckpointError,
        FleetError,
        ForkedError,
        InputError,
        JobError,
        MissingExtraError,
        OutOfMemoryError,
        PrefoldError,
        RankError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .spec.calibration import Calibration
    from .spec.requests import Generated, GenerationStats, Grammar, Sampling, Stats, TokenLogprobs
    from .tasks.results import Classification, Decision, Piece, Ranking, Score
    from .text.media import TextWithImages
    from .text.prompts import FilledTemplate

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CacheOptions",
    "Calibration",
    "Checkpoint",
    "CheckpointError",
    "Classification",
    "Decision",
    "FilledTemplate",
    "FleetError",
    "ForkedError",
    "Generated",
    "GenerationStats",
    "Grammar",
    "InputError",
    "JobError",
    "MissingExtraError",
    "OutOfMemoryError",
    "Piece",
    "PrefoldError",
    "RankError",
    "Ranking",
    "Sampling",
    "Score",
    "Stats",
    "TextWithImages",
    "TokenLogprobs",
    "UnsupportedModelError",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "CacheOptions": "spec.model",
    "Calibration": "spec.calibration",
    "Checkpoint": "checkpoint",
    "FilledTemplate": "text.prompts",
}
_MODULES |= {"TextWithImages": "text.media", "Calibration": "spec.calibration"}
_MODULES |= dict.fromkeys(("Classification", "Decision", "Piece", "Ranking", "Score"), "tasks.results")
_MODULES |= dict.fromkeys(
    ("Generated", "GenerationStats", "Grammar", "Sampling", "Stats", "TokenLogprobs"), "spec.requests"
)


def __getattr__(name: str) -> object:
    # Public names are imported on first use, so that `import prefold` and the command line are fast.
    if name not in __all__:
        raise AttributeError(f"module 'prefold' has no attribute {name!r}")
    value: object = getattr(import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
