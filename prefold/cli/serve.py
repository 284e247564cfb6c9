"""Runs `prefold serve`, which answers HTTP requests with a model."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import JobError
from ..serve.options import ServeOptions
from .kinds import Bytes
from .options import engine_options, generation_options, media_options, model_options, threshold_option

__all__ = ["serve"]

_DEFAULTS = ServeOptions()


def read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Makes the options of a TOML file the defaults of the command. Raises JobError where one is unknown."""
    if value is None:
        return
    try:
        found = tomllib.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobError(f"--config {value} cannot be read: {error}") from None
    known = {flag.removeprefix("--"): one for one in ctx.command.params for flag in one.opts}
    for name, setting in found.items():
        if name not in known or name in ("config", "help"):
            raise JobError(f"--config {value}: there is no option {name!r}; the names are those of the command line")
        if known[name].multiple and not isinstance(setting, list):
            setting = found[name] = [setting]
        try:
            known[name].type_cast_value(ctx, setting)
        except click.BadParameter as error:
            raise JobError(f"--config {value}: {name} = {setting!r}: {error.message}") from None
    ctx.default_map = {known[name].name: setting for name, setting in found.items()}  # type: ignore[misc]


def option(name: str, *more: str, **settings: Any) -> Any:
    """Returns the option for a field of ServeOptions, with that field's default."""
    default = getattr(_DEFAULTS, name)
    flag = "--" + name.replace("_", "-")
    return click.option(flag, *more, default=default, show_default=default is not None, **settings)


@click.command(short_help="Answer HTTP requests: the APIs of OpenAI, vLLM and others.")
@click.option(
    "--config",
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="Options in a TOML file, under the names of the command line: port = 8000.",
)
@model_options
@option("host", metavar="ADDRESS", help="Address to listen on.")
@option("port", type=click.IntRange(0, 65535), help="Port to listen on; 0: one that is free.")
@click.option(
    "--served-model-name",
    "served_names",
    multiple=True,
    metavar="NAME",
    help="A name that requests may ask for; the first stands in responses. May be repeated.",
)
@option("api_keys", metavar="FILE", help="Who may ask: keys and their tenants, in TOML. Read again on SIGHUP.")
@click.option(
    "--insecure", is_flag=True, help="Listen on an address that others reach, without keys, and be asked by any name."
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Without keys: a name by which the server may be asked, and whose pages may ask it. With --insecure: by no"
    " other than these and the machine's own. May be repeated.",
)
@option("data_dir", metavar="FOLDER", help="Where files and batches are kept; none without it.")
@option("max_file_bytes", type=Bytes(), help="Size of a file that is uploaded.")
@option("drain_seconds", type=click.FloatRange(0), help="How long requests may go on after SIGTERM.")
@option("max_waiting_requests", type=click.IntRange(1), help="Requests that may wait; others are refused with 429.")
@option("max_waiting_tokens", type=click.IntRange(1), help="Tokens that may wait.")
@option(
    "step_ms",
    type=click.FloatRange(0, min_open=True),
    metavar="MS",
    help="How long a step should take while live requests are there: rows are adjusted to the measured rate."
    "  [default: a batch lengthens live steps by a quarter, nothing else is bounded]",
)
@option(
    "batch_share",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="The part of the time that batches get while live requests never pause.",
)
@option("max_body_bytes", type=Bytes(), help="Size of a request's body.")
@option("max_receiving_bytes", type=Bytes(), help="Size of all bodies that are being received.")
@option("max_connections", type=click.IntRange(1), help="Connections at once.")
@option(
    "max_texts",
    type=click.IntRange(1),
    help="Texts, documents or prompts of one request, and samples of all its prompts.",
)
@option("max_n", type=click.IntRange(1), help="Samples of a prompt.")
@option("max_logprobs", type=click.IntRange(0), help="Most likely tokens that are listed.")
@option("max_grammar_bytes", type=Bytes(), help="Size of a schema, regular expression or grammar.")
@click.option("--allow-chat-template", is_flag=True, help="Requests may bring a chat template of their own.")
@click.option("--escape-special", is_flag=True, help="Special tokens in what messages hold stay text.")
@option(
    "reasoning_parser",
    type=click.Choice(["auto", "think", "none"]),
    help="Part answers of chats into reasoning, between <think> and </think>, and text. auto: where the model's chat"
    " template has <think>.",
)
@click.option("--access-log", is_flag=True, help="Log a line about each request: never prompts, answers or keys.")
@click.option(
    "--adapter",
    metavar="NAME=FOLDER",
    multiple=True,
    help="A LoRA adapter (PEFT), which requests ask for by its name as the model. May be repeated.",
)
@click.option(
    "--cache-reuse",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    metavar="N",
    help="Prefixes of fewer tokens are neither used nor kept.",
)
@click.option(
    "--cache-reuse-ttl",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="What is kept goes so long after its last use.  [default: never]",
)
@click.option(
    "--cache-reuse-max-tokens",
    type=click.IntRange(0),
    metavar="N",
    help="Rows kept beside those in use.  [default: what the memory holds]",
)
@click.option("--cache-prefill", is_flag=True, help="Embedding and reranking use and fill the cache of generation too.")
@engine_options
@threshold_option
@media_options
@generation_options
def serve(**o: Any) -> None:  # fmt: skip
    """Answer HTTP requests with a model until told to end.

    The address is bound before the model is loaded; /health answers 503 until it is. SIGTERM takes no more requests,
    lets those that run end, and exits with status 0.

    \b
    prefold serve -m HuggingFaceTB/SmolLM2-135M-Instruct --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from ..cache import CacheOptions
    from ..checkpoint import BUILT_IN
    from .build import adapter_folders, find_model, image_reader, load_llm, open_model

    adapter_folders(o)
    if o["model"] not in BUILT_IN:  # whose file may have to be downloaded, while the server answers that it is loading
        find_model(o, weights=False)
    from ..serve import serve as run

    names = [name for name in ServeOptions.__dataclass_fields__ if name in o]
    options = ServeOptions(**{name: o[name] for name in names})
    if o["cache"] != "off":
        ttl, most, least = o["cache_reuse_ttl"], o["cache_reuse_max_tokens"], o["cache_reuse"]
        how = {"ttl": ttl, "max_tokens": most, "min_overlap": least, "shifted": o["cache_reuse_shifted"]}
        o["cache"] = CacheOptions(policy=o["cache"] or "lru", **how)

    def load() -> Any:
        llm = load_llm(o, *open_model(o))
        if llm.images is not None:
            llm.images = replace(llm.images, reader=image_reader(o))
        return llm

    run(load, options)
