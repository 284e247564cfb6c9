"""The measured effect of reuse at other positions on results, the bound on it, and the file with both.

`prefold verify --reuse shifted` writes the file. A model starts with reuse at other positions only with such a file: it
uses the measured settings. A file of another model, or whose bound was not met, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ...engine.cache import CacheOptions
from ...errors import InputError, JobError
from ...spec.files import read_text
from .options import ShiftedReuse

FORMAT = "prefold drift 1"
T = TypeVar("T", "Bound", "Drift", ShiftedReuse)


@dataclass(frozen=True, slots=True)
class Bound:
    """How far results may move."""

    logprob: float  # largest allowed change of the log-probability of a likely first token
    changed: float  # largest share (0 to 1) of prompts with another likeliest first token


@dataclass(frozen=True, slots=True)
class Drift:
    """How far results have moved, on the prompts with reused chunks."""

    prompts: int  # prompts that were run
    shifted: int  # prompts with reused chunks; all further fields are about these
    tokens: int  # their tokens
    approximate_tokens: int  # tokens with copied K/V
    logprob: float  # largest change of a log-probability, among the likeliest first tokens of the exact run
    mean_logprob: float  # mean change of the log-probability of each prompt's likeliest first token
    changed: int  # prompts with another likeliest first token

    def unmet(self, bound: Bound) -> str | None:
        """Return why a bound is not met, or None if it is. A run without reuse meets no bound."""
        if not self.approximate_tokens:
            return f"no chunk of the {self.prompts:,} prompts was met elsewhere, so no drift was measured"
        if not self.logprob <= bound.logprob:
            return f"a log-probability changed by {self.logprob:.3g}, more than {bound.logprob:.3g}"
        if self.changed > bound.changed * self.shifted:
            most = f"more than the share {bound.changed:.3g}"
            return f"{self.changed:,} of {self.shifted:,} first choices changed, {most}"
        return None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The content of the file."""

    model: Mapping[str, Any]  # the measured model: its identity, dtype and adapters
    settings: ShiftedReuse
    bound: Bound
    drift: Drift

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file."""
        settings = asdict(self.settings)
        del settings["trial"]
        content = {"format": FORMAT, "model": self.model, "settings": settings, "bound": asdict(self.bound)}
        Path(path).write_text(json.dumps(content | {"drift": asdict(self.drift)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Measurement:
        """Return the content of a file. Raise InputError if it cannot be read or has another format."""
        try:
            content = json.loads(read_text(path))
        except (JobError, ValueError) as error:
            raise _refused(f"{path} cannot be read ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _refused(f"{path} was not written by this version of `prefold verify --reuse shifted`")
        kinds = {"settings": ShiftedReuse, "bound": Bound, "drift": Drift}
        try:
            parts = {name: _made(kind, content.get(name)) for name, kind in kinds.items()}
        except (TypeError, InputError) as error:
            raise _refused(f"{path} is damaged: {error}") from None
        return cls(dict(content.get("model") or {}), **parts)  # type: ignore[arg-type]


def permitted(cache: CacheOptions | None, model: Mapping[str, Any]) -> CacheOptions | None:
    """Return the cache options, with the settings of the file that `CacheOptions.shifted` names.

    Raise InputError if the file is of another model, if its bound was not met, or if there is no file and the reuse is
    not a trial.

    Args:
        model: The running model, as in Measurement.
    """
    if cache is None or cache.shifted is None:
        return cache
    if isinstance(cache.shifted, ShiftedReuse):
        if not cache.shifted.trial:
            raise _refused("reuse at other positions needs a file with its measured effect on results")
        return cache
    measured = Measurement.read(cache.shifted)
    for name in ("model", "dtype", "adapters"):
        was, now = measured.model.get(name), model.get(name)
        if was != now:
            raise _refused(f"{cache.shifted} was measured with the {name} {_short(was)}, but this is {_short(now)}")
    reason = measured.drift.unmet(measured.bound)
    if reason is not None:
        raise _refused(f"{cache.shifted} does not meet its bound: {reason}")
    return replace(cache, shifted=measured.settings)


def _made(kind: type[T], values: Any) -> T:
    names = {field.name for field in fields(kind)} - {"trial"}
    if not isinstance(values, dict) or set(values) != names:
        raise TypeError(f"it must have {', '.join(sorted(names))}")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        raise TypeError("it must have numbers")
    return kind(**values)


def _short(value: Any) -> str:
    return json.dumps(value) if value else "none"


def _refused(message: str) -> InputError:
    remedy = "run `prefold verify --reuse shifted` on prompts like yours, and give the file that it writes"
    return InputError(message, field="cache_reuse_shifted", remedy=remedy, code="drift")
