"""`prefold serve`: answer HTTP requests with a model."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from typing import Any

import click

from ..errors import JobError
from ..spec.fields import near
from ..spec.files import read_text
from ..spec.job import JobSpec
from ..spec.server import ServerSpec
from .options import Option, all_of, command, declared, generation_options, media_options, model_group, model_options
from .process import notice
from .specs import server_spec, takes_job


def read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Make the options in a TOML file the defaults of the command. Raise JobError for an unknown option."""
    if value is None:
        return
    try:
        settings = tomllib.loads(read_text(value))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"--config {value} cannot be read: {error}") from None
    options = {flag.removeprefix("--"): option for option in ctx.command.params for flag in option.opts}
    for name, setting in settings.items():
        if name not in options or name in ("config", "help"):
            raise JobError(f"--config {value}: there is no option {name!r}; {near(name, options)}see serve --help-all")
        if options[name].multiple and not isinstance(setting, list):
            setting = settings[name] = [setting]
        try:
            options[name].type_cast_value(ctx, setting)
        except click.BadParameter as error:
            raise JobError(f"--config {value}: {name} = {setting!r}: {error.message}") from None
    ctx.default_map = {options[name].name: setting for name, setting in settings.items()}


_OPTIONS = {option.name: option for option in fields(ServerSpec) if option.metadata["cli"] != (None,)}
_SERVER = all_of(
    click.option("--config", cls=Option, group="Server", metavar="FILE", is_eager=True, expose_value=False,
                 callback=read_config, help="TOML file with options, named as on the command line: port = 8000."),
    model_options,
    *(declared(name, option) for name, option in _OPTIONS.items()),
    click.option("--adapter", cls=Option, group="Model", metavar="NAME=FOLDER", multiple=True,
                 help="LoRA adapter (PEFT); requests select it by NAME as their model."),
    model_group("serve", "machine", "engine", "answers"),
    media_options,
    generation_options,
)  # fmt: skip


@command(short_help="Answer HTTP requests: the APIs of OpenAI, vLLM and others.")
@_SERVER
@takes_job(own=_OPTIONS)
def serve(spec: JobSpec, **options: Any) -> None:
    """Answer HTTP requests with a model, until Ctrl-C or SIGTERM.

    The server listens before the model is loaded; /health answers 503 until then. After SIGTERM, running requests
    finish, new requests are refused, and the exit status is 0.

    \b
    prefold serve -m HuggingFaceTB/SmolLM2-135M-Instruct --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from ..checkpoint import BUILT_IN
    from ..jobs.models import find_model, image_reading, load_llm
    from ..text import tokenizer_or_none

    if spec.model_name not in BUILT_IN:  # a built-in model may be downloaded later, while the server already answers
        find_model(spec.model_name, spec.model, notice, weights=False)
    from ..serve import serve as run

    if spec.model.layerwise == "on":
        raise JobError("--layerwise on is for jobs that generate no text; a server needs all weights in memory")
    model = replace(spec.model, layerwise="off")

    def load() -> Any:
        checkpoint = find_model(spec.model_name, spec.model, notice)
        llm = load_llm(model, checkpoint, tokenizer_or_none(checkpoint), is_job=False)
        if llm.images is not None:
            llm.images = llm.images.with_reader(**image_reading(spec))
        return llm

    run(load, server_spec(options))
