"""Read adapter_config.json of a PEFT folder. No torch.

Its regular expressions come from untrusted files. Matching takes polynomial time, never exponential time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..checkpoint import read_json
from ..checkpoint.settings import Settings
from ..errors import CheckpointError, UnsupportedModelError

MOST_CHARACTERS, MOST_GROUPS = 512, 32
# One character, an escape or a set. `re` matches each against one character of a text.
_ATOM = re.compile(r"\\[^0-9bBAZ]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\]*+?{}()|^$]")

# Maps a text and possible start positions to the possible end positions of a match.
Match = Callable[[str, frozenset[int]], frozenset[int]]


class Pattern:
    """A regular expression that matches module names as PEFT does: the whole name, or its end after a dot.

    It supports characters, escapes, sets, groups, `|`, `*`, `+`, `?`, `^` and `$`. A repeated group may not contain a
    repetition. The constructor raises ValueError for any other expression.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(pattern):,} characters, more than {MOST_CHARACTERS}")
        self._text, self._at, self._groups = pattern, 0, 0
        self._match, _ = self._alternatives()
        if self._at < len(self._text):
            raise self._unknown()

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name, or its end after a dot."""
        after_dots = (i + 1 for i, letter in enumerate(name) if letter == ".")
        return len(name) in self._match(name, frozenset((0, *after_dots)))

    def _alternatives(self) -> tuple[Match, bool]:
        """Parse up to a closing bracket. Return the matcher, and whether it contains a repetition."""
        ways = [self._sequence()]
        while self._next("|"):
            ways.append(self._sequence())
        matches = [match for match, _ in ways]
        return lambda name, at: frozenset().union(*(match(name, at) for match in matches)), any(r for _, r in ways)

    def _sequence(self) -> tuple[Match, bool]:
        matches, repeats = [], False
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            match, repeated = self._repeated()
            matches.append(match)
            repeats |= repeated

        def follow(name: str, at: frozenset[int]) -> frozenset[int]:
            for match in matches:
                at = match(name, at)
            return at

        return follow, repeats

    def _repeated(self) -> tuple[Match, bool]:
        match, repeats = self._one()
        if self._next("?"):
            return lambda name, at: at | match(name, at), repeats
        sign = self._next("*") or self._next("+")
        if not sign:
            return match, repeats
        if repeats:
            raise ValueError("a repeated group contains a repetition")

        def repeat(name: str, at: frozenset[int]) -> frozenset[int]:
            ends = new = at if sign == "*" else match(name, at)
            while new:
                new = match(name, new) - ends
                ends |= new
            return ends

        return repeat, True

    def _one(self) -> tuple[Match, bool]:
        if self._next("^"):
            return lambda name, at: at & {0}, False
        if self._next("$"):
            return lambda name, at: at & {len(name)}, False
        if self._next("("):
            self._next("?:")
            self._groups += 1
            if self._groups > MOST_GROUPS:
                raise ValueError(f"it has more than {MOST_GROUPS} groups")
            group = self._alternatives()
            if not self._next(")"):
                raise ValueError("a bracket is not closed")
            return group
        found = _ATOM.match(self._text, self._at)
        if found is None:
            raise self._unknown()
        self._at = found.end()
        try:
            fits = re.compile(found[0]).fullmatch
        except re.error as error:
            raise ValueError(str(error)) from None
        return lambda name, at: frozenset(i + 1 for i in at if i < len(name) and fits(name[i])), False

    def _next(self, sign: str) -> str:
        """Skip the sign and return it, if it comes next; otherwise return ""."""
        if not self._text.startswith(sign, self._at):
            return ""
        self._at += len(sign)
        return sign

    def _unknown(self) -> ValueError:
        return ValueError(f"{self._text[self._at : self._at + 8]!r} is not supported")


# Settings that change the model in other ways than by adding B A x, with a name for the error message.
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters outside linears",
    "layer_replication": "replicated layers",
    "lora_bias": "biases",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# Initializations after which the adapter fits only a changed copy of the model.
CHANGED_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
MOST_BYTES = 16 << 20
# Limit for patterns other than the end of a module's name. PEFT itself writes module names only.
MOST_EXPRESSIONS = 256
_NAME = re.compile(r"\^?[\w.]+\$?")


@dataclass(frozen=True, slots=True)
class ByModule:
    """A number per module (`rank_pattern`, `alpha_pattern`)."""

    default: float  # for modules that no pattern matches
    # By the module's name or the end of its name: the pattern's index in the file, and the number.
    names: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    # The other patterns, by index in the file.
    expressions: Mapping[int, tuple[Pattern, float]] = field(default_factory=dict)

    def of(self, module: str) -> float:
        """Return the number of a module. The first matching pattern in the file wins, as in PEFT."""
        parts = module.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]
        # "^name" matches only the whole name.
        hits = [self.names[end] for end in (f"^{module}", *ends) if end in self.names]
        first, number = min(hits, default=(len(self.names) + len(self.expressions), self.default))
        for place, (pattern, value) in self.expressions.items():
            if place < first and pattern.matches(module):
                return value
        return number


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of a LoRA adapter in adapter_config.json."""

    ranks: ByModule
    alphas: ByModule
    is_rank_stable: bool = False  # divide alpha by the square root of the rank (rsLoRA), not by the rank

    def scale(self, module: str) -> float:
        """Return the factor of B A x for a module."""
        rank = self.ranks.of(module)
        return self.alphas.of(module) / (math.sqrt(rank) if self.is_rank_stable else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a folder's adapter_config.json.

    Raise UnsupportedModelError for an adapter that is more than LoRA of linears. Raise CheckpointError for a file that
    is missing, broken, or has a value of a wrong type.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no adapter_config.json; give the folder of a PEFT adapter")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}; give the folder of a PEFT adapter")
    values = read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    settings = Settings(values, str(path))
    kind = settings.text("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder} is a PEFT adapter of type {kind!r:.200}; LORA is supported")
    for key, words in REFUSED.items():
        if settings.get(key):
            raise UnsupportedModelError(f"{folder} has {words} ({key}: {settings[key]!r:.60}), not supported")
    if (bias := settings.text("bias", "none")) != "none":
        raise UnsupportedModelError(f"{folder} has trained biases (bias: {bias!r:.200}), not supported")
    start = str(settings.get("init_lora_weights", ""))
    if start.lower().startswith(CHANGED_WEIGHTS):
        raise UnsupportedModelError(
            f"{folder} was trained with changed base weights (init_lora_weights: {start:.60}); convert it to a plain "
            "LoRA (in PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    for key in ("r", "lora_alpha"):
        if key in settings and settings[key] is None:
            raise settings.wrong(key, "a number")
    rank, alpha = settings.size("r", 8), settings.number("lora_alpha", 8, negative=True)
    return AdapterConfig(
        _by_module(settings, "rank_pattern", rank),
        _by_module(settings, "alpha_pattern", alpha),
        settings.flag("use_rslora"),
    )


def _by_module(settings: Settings, key: str, default: float) -> ByModule:
    patterns = settings.settings(key)
    names: dict[str, tuple[int, float]] = {}
    expressions: dict[int, tuple[Pattern, float]] = {}
    for place, pattern in enumerate(patterns):
        read = patterns.size if key == "rank_pattern" else partial(patterns.number, negative=True)
        value = read(pattern)
        if _NAME.fullmatch(pattern):
            names.setdefault(pattern.removesuffix("$"), (place, value))
            continue
        try:
            expressions[place] = Pattern(pattern), value
        except ValueError as error:
            raise CheckpointError(
                f"{settings.file}: {key} has the unsupported pattern {pattern!r:.60}: {error}; name the modules instead"
            ) from None
        if len(expressions) > MOST_EXPRESSIONS:
            raise CheckpointError(
                f"{settings.file}: {key} has more than {MOST_EXPRESSIONS} regular expressions; name the modules instead"
            )
    return ByModule(default, names, expressions)
