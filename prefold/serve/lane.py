"""The lane of batches: an engine, as a job sees it, of a server whose live requests go first.

Texts are generated and numbers read beside those of live requests, in the same steps. The policy of admission and the
pace see to it that they give way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from ..engine.calls import serve
from ..engine.engine import Engine
from ..engine.requests import together
from ..errors import InputError
from ..stream import Window
from ..text import Tokenizer
from ..types import Owner, Readout, Request, Result, Sharing


class Lane:
    """An engine for one job: `run` and `generate` as `Engine` has them, called from the job's thread.

    owner  for whom the job is run
    """

    def __init__(self, engine: Engine, owner: Owner):
        self._engine, self._owner = engine, owner

    @property
    def engine(self) -> Lane:
        """Returns this: a job asks what it loads for an engine."""
        return self

    @property
    def sharing(self) -> Sharing:
        return self._engine.sharing

    def generate(
        self,
        windows: Iterable[Window],
        tokenizer: Tokenizer | None,
        *,
        stopping: Callable[[], bool],
        on_step: Any = None,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, a Generated a sample) of every request, as they end; (tag, InputError) for one that cannot run.
        A request whose step fails is (tag, InputError) too. Raises what no request is at fault for: RankError and
        OutOfMemoryError."""
        upcoming = ((window, i) for window in windows for i in range(window.num_requests))
        return self._in_slots(upcoming, tokenizer, stopping)

    def _in_slots(
        self,
        upcoming: Iterator[tuple[Window, int]],
        tokenizer: Tokenizer | None,
        stopping: Callable[[], bool],
        readout: Readout | None = None,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields what becomes of requests in the slots of the KV store: of their texts, or of what is read of them."""
        answers = serve(
            self._engine,
            self._counted(upcoming),
            tokenizer,
            most=self._engine.options.generation.max_running,
            stopping=stopping,
            is_again=lambda place: bool(place[0].twins[place[1]]),
            readout=readout,
            owner=self._owner,
            failed=_internal_error,
        )
        with closing(answers):  # type: ignore[type-var]
            for (window, number), answer in answers:
                yield window.tags[number], answer

    def _counted(self, upcoming: Iterator[tuple[Window, int]]) -> Iterator[list[tuple[tuple[Window, int], Request]]]:
        for window, number in upcoming:
            self._engine.meter.add(requests=int(not window.twins[number]))
            yield [((window, number), window.request(number))]

    def run(
        self, windows: Iterable[Window], readout: Readout, *, stopping: Callable[[], bool], on_step: Any = None
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Yields (tag, result) of every request, as the steps that end them come in; (tag, InputError) of one that
        cannot be read, or that steps fail for. Raises what no request is at fault for."""
        left = iter(windows)
        first = next(left, None)
        if first is None:
            return iter(())
        readout = together(readout, np.diff(first.target_offsets))
        upcoming = ((window, i) for window in itertools.chain([first], left) for i in range(window.num_requests))
        return self._in_slots(upcoming, None, stopping, readout)


def _internal_error(error: Exception) -> InputError:
    return InputError(f"the step failed: {error}", remedy="send it again", code="internal_error")
