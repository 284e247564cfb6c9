"""What requests want of their prompts: the text again, and the log-probabilities of its tokens, as OpenAI's completions
have them (`echo`) and vLLM's (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

Entry = dict[str, Any]


@dataclass(frozen=True)
class Echo:
    """An Echo is what a request wants of its prompts.

    text      whether each choice begins with the prompt
    logprobs  how many of the most likely tokens are listed for each token of the prompt, where a choice has
              log-probabilities; None: it has none
    listed    the same of `prompt_logprobs`, which is a field of its own
    is_all    whether nothing is generated
    """

    text: bool
    logprobs: int | None
    listed: int | None
    is_all: bool

    @property
    def top(self) -> int | None:
        """Returns how many of the most likely tokens are read at each token; None: the prompts are not scored."""
        asked = [count for count in (self.logprobs, self.listed) if count is not None]
        return max([1, *asked]) if asked or self.is_all else None


def read_echo(body: Any, *, most: int) -> Echo | None:
    """Returns what a request wants of its prompts; None: nothing. Raises InputError for values that are wrong.

    body  a Chat or a Completion; where nothing is to be generated, one token is, which is not made
    most  the most likely tokens that may be asked for
    """
    text, listed = getattr(body, "echo", False), body.prompt_logprobs
    logprobs = body.logprobs if text else None
    if not text and listed is None:
        return None
    for name, count in (("prompt_logprobs", listed), ("logprobs", logprobs)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most):
            message, remedy = f"{name!r} is {count!r:.100}", f"give a number from 0 to {most}"
            raise InputError(message, field=name, remedy=remedy, code="out_of_range")
    is_all = hasattr(body, "echo") and body.max_tokens == 0 and body.max_tokens is not False
    if is_all:
        body.max_tokens = 1
        if body.n not in (None, 1):
            message = "'n' is given where nothing is generated"
            raise InputError(message, field="n", remedy="leave it out, or give max_tokens above 0")
    for name in ("stream", "truncate_prompt_tokens"):
        if getattr(body, name):
            what = "echo" if text else "prompt_logprobs"
            message, remedy = f"{what} and {name} exclude each other", f"leave {name} out"
            raise InputError(message, field=what, remedy=remedy, code="unsupported")
    return Echo(text, logprobs, listed, is_all)


def prompt_logprobs(entries: Sequence[Mapping[str, Any]], count: int) -> list[Entry | None]:
    """Returns the log-probabilities of a prompt's tokens as vLLM has them: those of each token and of the most likely
    ones, by their ids; null for the first token, before which there is nothing."""
    found: list[Entry | None] = []
    for entry in entries:
        if entry["logprob"] is None:
            found.append(None)
            continue
        ranked = [*enumerate(entry["top"][:count], 1), (entry["rank"], entry)]
        found.append(
            {
                str(one["id"]): {"logprob": one["logprob"], "rank": rank, "decoded_token": one.get("token")}
                for rank, one in ranked
            }
        )
    return found
