"""Read settings of a checkpoint (config.json, GGUF metadata), checking the type and bounds of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointError

# Limits on sizes: a hundred times the sizes of the largest existing models. A larger size means that the file is
# damaged. It is refused here, before any code allocates that much memory.
MOST_SIZE = 2**24
MOST_LAYERS = 4096
MOST_POSITIONS = 2**40
# Limit on numbers, just below the largest float32 (3.4e38).
MOST_NUMBER = 1e38
# Config key that prefold adds: the user's limit on the tokens of a sequence.
CONTEXT = "prefold_context_length"
# Config key that prefold adds: true if the value heads of gated delta nets are in llama.cpp's order.
TILED = "prefold_tiled_heads"
REQUIRED: Any = object()  # a default with this value means that the key must exist
# Maximum number of characters of a wrong value in an error.
SHOWN = 60


class Settings(dict[str, Any]):
    """The settings in a checkpoint's file: a dict, with one method for each kind of value.

    If a key is missing or null, the methods return the default. They raise CheckpointError if there is no default, or
    if a value has a wrong type or is out of bounds. The error names the file, the key and the valid values.

    Attributes:
        file: The file's name, for errors.
        prefix: The keys of the enclosing settings, each with a dot, such as "rope_scaling."; "": the top of the file.
        reads: The keys that were read, with prefixes. Nested settings and copies share this set.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str = "config.json", prefix: str = "", reads: set[str] | None = None
    ):
        super().__init__(values)
        self.file, self.prefix = file, prefix
        self.reads = set() if reads is None else reads

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Convert a mapping to Settings. Return Settings unchanged."""
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
        """Yield the keys. Without this definition, {**settings} would bypass `__getitem__`, and so `reads`."""
        return super().__iter__()

    def size(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int = MOST_SIZE) -> Any:
        """Return the value of `key`, a whole number in [least, most]."""
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
        """Return the value of `key`, a finite number greater than 0.

        Args:
            zero: Accept 0 too.
            negative: Accept 0 and negative numbers too.
        """
        value = self._given(key, default)
        if value is default:
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= MOST_NUMBER:
            raise self.wrong(key, f"a number, at most {MOST_NUMBER:g}")
        if not negative and (value < 0 or (value == 0 and not zero)):
            raise self.wrong(key, "0 or more" if zero else "more than 0")
        return value if abs(value) < 2**53 else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of `key`, a boolean. 0 and 1 are accepted as false and true."""
        value = self._given(key, default)
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise self.wrong(key, "true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        """Return the value of `key`, a token id, or None if it is missing.

        Some files use -1 or another id outside the vocabulary for "no token". The caller must check for this.
        """
        value = self._given(key, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "a whole number")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, a string."""
        value = self._given(key, default)
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, a list of strings."""
        value = self._given(key, default)
        if value is not default and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise self.wrong(key, "a list of strings")
        return value

    def numbers(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, a list of finite numbers greater than 0."""
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
        """Return the object at `key` as Settings; empty if it is missing."""
        value = self._given(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Settings(value or {}, self.file, f"{self.prefix}{key}.", self.reads)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """Return a CheckpointError with the value of `key` and the valid values.

        Args:
            wanted: The valid values, in words that follow "it must be".
        """
        value = self.get(key)
        # `repr` raises ValueError for an integer of more than 4,300 digits.
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
