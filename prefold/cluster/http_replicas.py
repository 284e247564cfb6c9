"""Replicas that are servers: any that speaks OpenAI's API (vLLM, SGLang, prefold serve, ...), or TEI.

Generated text comes from /v1/completions or /v1/chat/completions, embeddings from /v1/embeddings or TEI's /embed, and
log-probabilities of targets from /v1/completions as vLLM has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError
from ..text import Tokenizer
from .backends import Backend
from .http_host import API_KEY, HttpHost, ServedModel, httpx
from .local_replicas import LocalReplicas
from .remote_model import context_of, is_of_bytes

_HUNG = "it has answered nothing for too long; where an answer takes longer, give more --patience"


class HttpReplicas(LocalReplicas):
    """Servers, each a replica.

    urls     of the servers, with or without /v1
    options  further ones of `ServedModel`

    A key is taken from the environment variable PREFOLD_API_KEY, and sent as a bearer token. A server that is given up
    again and again, and has answered nothing since, does not come back. Raises InputError for what is no URL, and no
    key.
    """

    def __init__(self, urls: Sequence[str], model: str, tokenizer: Tokenizer | None, **options: Any):
        for url in urls:
            _check_url(url)
        _check_key()
        served = ServedModel(model, tokenizer, **options)
        names = [url.rstrip("/").removesuffix("/v1") for url in urls]
        super().__init__(
            {name: partial(HttpHost, name, served, lambda: self.is_closed) for name in names}, killed=_HUNG
        )


def _check_url(url: str) -> None:
    """Raises InputError for what is not the URL of a server."""
    name: str | None = None
    try:
        parts = urlsplit(url)
        name = parts.hostname
        is_one = parts.scheme in ("http", "https") and name and not parts.username and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # such as a port that is none
        is_one = False
    if not is_one:
        remedy = f"write http://HOST:PORT; a key belongs into the environment, as {API_KEY}"
        raise InputError(f"{name or url!r} is not the URL of a server", field="url", remedy=remedy)


def _check_key() -> None:
    """Raises InputError for a key that no header can hold; it does not say it."""
    key = os.environ.get(API_KEY, "")
    if not (key.isascii() and key.isprintable()):
        remedy = "set it to the key alone, without line ends"
        raise InputError(f"{API_KEY} holds letters that no key has", field=API_KEY, remedy=remedy)


class _Servers(Backend):
    """The backend whose replicas are the servers of --url."""

    where = "over HTTP"
    takes = frozenset({"tokenizer"})
    on_ray = False

    def refusal(self, o: Mapping[str, Any]) -> str:
        pooling = "--pooling cannot be asked of a server, which pools as its model does; leave it out"
        return pooling if o.get("pooling") else ""

    def options(self, o: Mapping[str, Any], llm: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        return {} if o.get("max_running") is None else {"most": o["max_running"]}

    def replicas(
        self,
        o: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        checkpoint: Any,
        tokenizer: Any,
        notify: Callable[[str], None],
    ) -> HttpReplicas:
        how = {"takes_ids": not is_of_bytes(tokenizer), "context": context_of(checkpoint), "patience": o["patience"]}
        return HttpReplicas(o["url"], o["model"], tokenizer, notify=notify, **how, **options)


SERVERS = _Servers()
