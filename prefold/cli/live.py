"""Shows generated text on a terminal as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


class InOrder:
    """Shows answers one below the other, although they are made at the same time.

    The first answer that is not done is shown as it comes; text of later answers is kept until it is their turn.

    start, piece, end   called with an answer's place; `piece` also with some of its text, `end` also with its result
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], None],
        piece: Callable[[int, str], None],
        end: Callable[[int, Any], None],
    ):
        self._waiting: list[list[str]] = [[] for _ in range(count)]
        self._results: dict[int, Any] = {}
        self._start, self._piece, self._end = start, piece, end
        self._shown: int | None = None  # the last answer of which something was shown
        self._turn = 0

    def add(self, place: int, text: str) -> None:
        """Takes in some text of the answer at `place`."""
        self._waiting[place].append(text)
        self._show()

    def done(self, place: int, result: Any) -> None:
        """Takes in that the answer at `place` is whole."""
        self._results[place] = result
        self._show()

    def _show(self) -> None:
        while self._turn < len(self._waiting):
            place, texts = self._turn, self._waiting[self._turn]
            done = place in self._results
            if self._shown != place and (texts or done):
                self._shown = place
                self._start(place)
            for text in texts:
                self._piece(place, text)
            texts.clear()
            if not done:
                return
            self._end(place, self._results.pop(place))
            self._turn += 1


def generate_live(engine: Any, task: Any, works: Sequence[Any], seed: int | None) -> Iterator[tuple[int, Any]]:
    """Yields (number of the work, (sample, piece of its text)) as pieces come, and (number, answer) at its end.

    An answer is a list of Generated, or the InputError that says what is wrong. Seeds are those of `run_works`, so the
    texts are those that it gives. Where the generator is closed early, what is not done is cancelled.
    """
    from ..tasks.run import draw_seed, with_seed

    seed = draw_seed() if seed is None else seed
    requests = [with_seed(work.requests[0], seed, number, 0) for number, work in enumerate(works)]
    return engine.stream(requests, task.inputs.tokenizer)
