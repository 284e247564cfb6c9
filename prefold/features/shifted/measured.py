"""The measured effect on results of reuse at other positions, the bound on it, and the file of both.

`prefold verify --reuse shifted` writes the file, and a model starts with reuse at other positions by that file alone:
it has the settings that were measured, and is refused where it is of another model or the bound was not met.
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
    """A Bound is how far results may move.

    logprob  the most that the log-probability of a likely first token may change by
    changed  the part (0 to 1) of prompts whose likeliest first token may be another one
    """

    logprob: float
    changed: float


@dataclass(frozen=True, slots=True)
class Drift:
    """A Drift is how far results have moved, on the prompts of which chunks were reused.

    prompts             how many were run
    shifted             how many of these had chunks that were met elsewhere
    tokens              how many tokens these have
    approximate_tokens  how many of them had their K/V copied
    logprob             the largest change of a log-probability, of the first tokens that are likeliest with exact rows
    mean_logprob        the mean over prompts of the change of the likeliest of them
    changed             how many prompts have another likeliest first token
    """

    prompts: int
    shifted: int
    tokens: int
    approximate_tokens: int
    logprob: float
    mean_logprob: float
    changed: int

    def unmet(self, bound: Bound) -> str | None:
        """Returns why a bound is not met, in words; None where it is. A run without any reuse meets none."""
        if not self.approximate_tokens:
            return f"no chunk of the {self.prompts:,} prompts was met elsewhere, so no drift was measured"
        if not self.logprob <= bound.logprob:
            return f"a log-probability changed by {self.logprob:.3g}, more than {bound.logprob:.3g}"
        if self.changed > bound.changed * self.shifted:
            most = f"more than the part {bound.changed:.3g} of them"
            return f"{self.changed:,} of {self.shifted:,} first choices changed, {most}"
        return None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A Measurement is the content of the file.

    model     which model was measured: its identity, dtype and adapters
    settings  which chunks were reused
    bound     what was asked for
    drift     what was found
    """

    model: Mapping[str, Any]
    settings: ShiftedReuse
    bound: Bound
    drift: Drift

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the file."""
        settings = asdict(self.settings)
        del settings["trial"]
        content = {"format": FORMAT, "model": self.model, "settings": settings, "bound": asdict(self.bound)}
        Path(path).write_text(json.dumps(content | {"drift": asdict(self.drift)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Measurement:
        """Returns what a file says. Raises InputError where it cannot be read, or is no such file."""
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
    """Returns the options, with the settings of a file that `shifted.chunks` names. model: that of a Measurement.

    Raises InputError where the file is of another model, its bound was not met, or there is no file for reuse that is
    not a trial.
    """
    if cache is None or cache.shifted is None:
        return cache
    if isinstance(cache.shifted, ShiftedReuse):
        if not cache.shifted.trial:
            raise _refused("chunks are to be reused at other positions, and no file says what that does to results")
        return cache
    measured = Measurement.read(cache.shifted)
    for name in ("model", "dtype", "adapters"):
        was, now = measured.model.get(name), model.get(name)
        if was != now:
            raise _refused(f"{cache.shifted} was measured with the {name} {_short(was)}, and this is {_short(now)}")
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
