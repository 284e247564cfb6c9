"""Parts what a model that thinks writes into its reasoning, between <think> and </think>, and its answer."""

from __future__ import annotations

from ..text.chat import THINK

_OPEN, _CLOSE = THINK


class Parting:
    """A Parting parts a text that grows into reasoning and answer, without white space around the reasoning.

    A text holds reasoning where it begins with <think>, or its prompt ends with that.
    """

    def __init__(self, opened: bool):
        """opened: whether the prompt ends with <think>."""
        self._held = ""  # what it cannot be said of yet whether, and where, it belongs
        self._is_open: bool | None = opened or None  # None: the text has not said yet whether it holds reasoning
        self._has_thought = self._has_answer = False

    def add(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and the answer that can be given out now that the text goes on with `text`."""
        held, thought = self._held + text, ""
        if self._is_open is None:
            begun = held.lstrip()
            if len(begun) < len(_OPEN) and _OPEN.startswith(begun):
                self._held = held
                return "", ""
            self._is_open, self._has_answer = begun.startswith(_OPEN), not begun.startswith(_OPEN)
            held = begun[len(_OPEN) :] if self._is_open else held
        if self._is_open:
            thought, close, after = held.partition(_CLOSE)
            self._is_open = not close
            if self._is_open:
                cut = next((n for n in range(len(_CLOSE) - 1, 0, -1) if held.endswith(_CLOSE[:n])), 0)
                after = held[len(held[: len(held) - cut].rstrip()) :]
            thought = held[: len(held) - len(after) - len(close)].rstrip()
            thought = thought if self._has_thought else thought.lstrip()
            self._has_thought = self._has_thought or bool(thought)
            held = after
        if self._is_open:
            self._held = held
            return thought, ""
        held = held if self._has_answer else held.lstrip()
        self._has_answer, self._held = self._has_answer or bool(held), ""
        return thought, held

    def rest(self) -> tuple[str, str]:
        """Returns what is left to give out of a text that has ended."""
        if not self._is_open:
            return "", self._held
        return (self._held if self._has_thought else self._held.lstrip()).rstrip(), ""


def parted(text: str, opened: bool) -> tuple[str, str]:
    """Returns the reasoning and the answer of a whole text. opened: whether its prompt ends with <think>."""
    parting = Parting(opened)
    begun, rest = parting.add(text), parting.rest()
    return begun[0] + rest[0], begun[1] + rest[1]
