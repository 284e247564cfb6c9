"""Read settings of a checkpoint (config.json, GGUF metadata), checking the type and bounds of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointError

# The largest sizes accepted: a hundred times the sizes of the largest existing models. A larger size means a damaged
# file, and is refused before anything of that size is allocated.
MOST_SIZE = 2**24
MOST_LAYERS = 4096
MOST_POSITIONS = 2**40
# The largest number accepted: float32 has no much larger numbers.
MOST_NUMBER = 1e38
# The config key for the user's limit on the tokens of a sequence.
CONTEXT = "prefold_context_length"
# The config key that says that the value heads of gated delta nets are in llama.cpp's order.
TILED = "prefold_tiled_heads"
REQUIRED: Any = object()
# Limit on the characters of a wrong value in an error.
SHOWN = 60


class Settings(dict[str, Any]):
    """The settings of a checkpoint as in its file, with a method to read each kind of value.

    A missing or null key gives the default. The methods raise CheckpointError if there is no default, or if a value has
    a wrong type or is out of bounds. The error names the file, the key and the valid values.

    Attributes:
        file: The file's name in errors.
        prefix: Text before a key in errors: the place of these settings in the file.
        reads: The keys read so far, with prefixes. Settings derived from these share the set.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str = "config.json", prefix: str = "", reads: set[str] | None = None
    ):
        super().__init__(values)
        self.file, self.prefix = file, prefix
        self.reads = set() if reads is None else reads

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Return the values if they are Settings already, else a new Settings."""
        return values if isinstance(values, Settings) else cls(values)

    def __or__(self, other: Any) -> Settings:
        return Settings({**dict(self.items()), **dict(other.items())}, self.file, self.prefix, self.reads)

    def __ror__(self, other: Any) -> Settings:
        return Settings({**dict(other.items()), **dict(self.items())}, self.file, self.prefix, self.reads)

    def __getitem__(self, key: str) -> Any:
        self.reads.add(self.prefix + key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.reads.add(self.prefix + key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys. This definition makes Python read copies such as {**settings} through `__getitem__`."""
        return super().__iter__()

    def size(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int = MOST_SIZE) -> Any:
        """Return the whole number `key`, in [least, most]."""
        value = self._given(key, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "a whole number")
        if not least <= value <= most:
            raise self.wrong(key, f"at least {least}" if value < least else f"at most {most:,}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, zero: bool = False, negative: bool = False) -> Any:
        """Return the finite number `key`: above 0, or at least 0 with `zero`, or any with `negative`."""
        value = self._given(key, default)
        if value is default:
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= MOST_NUMBER:
            raise self.wrong(key, f"a number, at most {MOST_NUMBER:g}")
        if not negative and (value < 0 or (value == 0 and not zero)):
            raise self.wrong(key, "0 or more" if zero else "more than 0")
        return value if abs(value) < 2**53 else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean `key`; 0 and 1 mean false and true."""
        value = self._given(key, default)
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise self.wrong(key, "true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        """Return the token id `key`, which may be outside the vocabulary (-1: no token); None if it is missing."""
        value = self._given(key, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "a whole number")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the string `key`."""
        value = self._given(key, default)
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the list of strings `key`."""
        value = self._given(key, default)
        if value is not default and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise self.wrong(key, "a list of strings")
        return value

    def numbers(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the list `key` of finite numbers greater than 0."""
        value = self._given(key, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(
            isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number <= MOST_NUMBER
            for number in value
        ):
            raise self.wrong(key, "a list of numbers above 0")
        return value

    def settings(self, key: str) -> Settings:
        """Return the settings inside `key`; empty if it is missing."""
        value = self._given(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Settings(value or {}, self.file, f"{self.prefix}{key}.", self.reads)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """Return the CheckpointError for a value that is not `wanted`."""
        value = self.get(key)
        # Python refuses to write a number with thousands of digits.
        is_long = isinstance(value, int) and abs(value) >= 10**50
        shown = f"a number of {value.bit_length()} bits" if is_long else repr(value)
        shown = shown if len(shown) <= SHOWN else shown[: SHOWN - 3] + "..."
        return CheckpointError(f"{self.file}: {self.prefix}{key} is {shown}; it must be {wanted}")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.file} has no {self.prefix}{key}")
        return default
