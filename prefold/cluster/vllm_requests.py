"""What is asked of vLLM, in its words, and what it gives, in ours. Nothing runs here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, MissingExtraError
from ..options import not_sent, sent_names
from ..types import Generated, Sampling, TokenLogprobs

# Fields of Sampling that vLLM calls by the same name.
_SAME = (*sent_names("openai", "vllm", "set"), "logprobs")
_GRAMMARS = {"json_schema": "json", "regex": "regex", "choice": "choice"}


def import_vllm() -> Any:
    """Returns the module. Raises MissingExtraError where it is not there."""
    # Threads are not bound to cores: several replicas, or this process, would be bound to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        import vllm.sampling_params
    except ImportError:
        raise MissingExtraError("vllm", "vllm", "vLLM as a replica") from None
    return vllm


def sampling_params(sampling: Sampling, with_text: bool, room: int) -> Any:
    """Returns vLLM's SamplingParams. room: tokens that fit behind the prompt.

    Raises InputError for what vLLM lacks, and for values that it refuses.
    """
    vllm = import_vllm()
    for name in not_sent(sampling):
        raise lacks(name)
    grammar, structured = sampling.grammar, None
    if grammar is not None:
        if not with_text:
            raise lacks("tokens without text, of a grammar")
        if grammar.kind == "json":
            given: dict[str, Any] = {"json_object": True}
        elif grammar.kind in _GRAMMARS:
            given = {_GRAMMARS[grammar.kind]: json.loads(grammar.text) if grammar.kind == "choice" else grammar.text}
        else:
            raise lacks("grammar")
        given |= {"disable_any_whitespace": True} if grammar.compact and grammar.kind.startswith("json") else {}
        structured = given
    values = {name: getattr(sampling, name) for name in _SAME}
    values["seed"] = None if sampling.seed is None else sampling.seed & ((1 << 63) - 1)
    try:
        return vllm.SamplingParams(
            **values,
            max_tokens=max(1, room) if sampling.max_tokens is None else sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_ids),
            logit_bias=dict(sampling.logit_bias) or None,
            structured_outputs=structured and vllm.sampling_params.StructuredOutputsParams(**structured),
            detokenize=with_text,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
    except ValueError as error:  # of its own rules: n above 1 at temperature 0, top_p 0, more tokens than there is room
        raise refused("how tokens are to be drawn", "sampling", error) from error


def generated(one: Any, with_text: bool, cached: int, num_logprobs: int) -> Generated:
    """Returns one sample of vLLM's as ours: without the token that ended it."""
    tokens = tuple(int(token) for token in one.token_ids)
    ended = one.finish_reason == "stop" and not isinstance(one.stop_reason, str)
    logprobs = None
    if one.logprobs is not None:
        logprobs = tuple(
            _logprobs(token, found, num_logprobs) for token, found in zip(tokens, one.logprobs, strict=False)
        )
    if ended:
        tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[: len(tokens) - 1]
    reason: Any = "stop" if one.finish_reason == "stop" else "length"
    return Generated(tokens, one.text if with_text else None, reason, one.stop_reason, cached, logprobs)


def _logprobs(token: int, found: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Returns them as ours. found: those of the `count` most likely tokens, and of the chosen one."""
    best = sorted((one.rank, other, one.logprob) for other, one in found.items() if one.rank <= count)
    return TokenLogprobs(float(found[token].logprob), tuple((int(other), float(value)) for _, other, value in best))


def refused(what: str, field: str, error: Exception) -> InputError:
    """Returns the error of a request of which vLLM refuses a part."""
    message = f"vLLM refused {what} ({type(error).__name__}: {error!s:.300})"
    return InputError(message, field=field, remedy="see what vLLM says", code="vllm")


def lacks(what: str) -> InputError:
    remedy = "leave it out, or run the model with prefold (without --backend vllm)"
    return InputError(f"vLLM cannot be asked for {what}", field=what, remedy=remedy, code="unsupported")
