"""Stored answers for a server's requests: found before the engine gets the requests, and stored when they arrive.

A request's namespace includes its tenant's salt prefix, so a tenant never gets an answer of another tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..engine.protocol import Engine
from ..engine.requests import Answer
from ..spec.requests import Readout, Request
from ..tasks.base import Work
from ..tasks.kept import KeptAnswers
from ..tasks.run import as_known, same_prompt, tokens_of


class KnownAnswers:
    """The stored answers to some requests.

    Attributes:
        answers: the answer to each request; None: the request must be run
    """

    def __init__(self, kept: KeptAnswers, readout: Readout, requests: Sequence[Request], engine: Engine):
        self._reads = kept.of(readout)
        self._keyed = self._reads.find(requests, requests, has_seed=False)
        self.answers: list[Answer | None] = []
        before: Request | None = None
        for request, one in zip(requests, self._keyed, strict=True):
            size = request.tokens.size
            self.answers.append(None if one.answer is None else as_known(one.answer, size))
            if one.answer is not None and (before is None or not same_prompt(request, before)):
                engine.count(requests=1, tokens=tokens_of(one.answer, size), kept=1)
            before = None if request.sampling is not None else request

    @property
    def unknown(self) -> list[Request]:
        """Return the requests that must be run."""
        return [one.request for one in self._keyed if one.answer is None]

    def merged(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return the answers to all requests.

        Args:
            answers: the answers to the unknown requests, in order
        """
        computed = iter(answers)
        return [next(computed) if answer is None else answer for answer in self.answers]

    def keep(self, answers: Sequence[Answer]) -> None:
        """Store the answers to the unknown requests.

        Args:
            answers: the answers to all requests
        """
        for one, answer in zip(self._keyed, answers, strict=True):
            if one.answer is None:
                self._reads.keep(one.key, answer)


def groups_of(
    works: Sequence[Work], known: KnownAnswers | None, *, is_text: bool
) -> list[tuple[Sequence[Request], Answer | Sequence[Answer] | None]]:
    """Return (the requests to run, the known answer if there are none to run) for each reply.

    There is one reply per text, or a single reply for all read-out values.
    """
    if not is_text:
        unknown = list(chain.from_iterable(work.requests for work in works)) if known is None else known.unknown
        return [(unknown, None if unknown else [])]
    answers: Sequence[Answer | None] = [None] * len(works) if known is None else known.answers
    groups = zip(works, answers, strict=True)
    return [(work.requests, None) if answer is None else ([], answer) for work, answer in groups]
