"""Reads what a request says about how its task is to run, beside its items."""

from __future__ import annotations

from typing import Any

from ..errors import InputError

__all__ = ["read_options"]


def read_options(task: str, body: dict[str, Any]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """Returns (options of the task, whether prompts may be shared with other requests, the rest of the body).

    `truncate_prompt_tokens` is vLLM's: -1 cuts a prompt to what the model takes, k to k tokens. `cache_prompt` is
    llama.cpp's: false keeps the prompt apart from what was computed before and what comes later. Raises InputError.
    """
    rest = {name: value for name, value in body.items() if name not in ("truncate_prompt_tokens", "cache_prompt")}
    share, limit = body.get("cache_prompt"), body.get("truncate_prompt_tokens")
    if not isinstance(share, bool | None):
        message = f"'cache_prompt' is {share!r:.100}"
        raise InputError(message, field="cache_prompt", remedy="give true or false", code="wrong_type")
    options: dict[str, Any] = {}
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < -1 or limit == 0:
            message = f"'truncate_prompt_tokens' is {limit!r:.100}"
            remedy = "give a number of tokens, or -1 for what the model takes"
            raise InputError(message, field="truncate_prompt_tokens", remedy=remedy, code="wrong_type")
        # A text goes on at its end, so that it is the beginning of its prompt that is left out.
        options = {"truncate": "left" if task == "generate" else True}
        if limit > 0:
            options["max_length"] = limit
    return options, share is not False, rest
