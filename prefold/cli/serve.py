"""Runs `prefold serve`, which answers HTTP requests with a model."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import Any

import click

from ..errors import JobError
from ..files import read_text
from ..spec.fields import near
from ..spec.server import ServerSpec
from .options import all_of, declared, generation_options, media_options, model_group, model_options


def read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Makes the options of a TOML file the defaults of the command. Raises JobError where one is unknown."""
    if value is None:
        return
    try:
        settings = tomllib.loads(read_text(value))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"--config {value} cannot be read: {error}") from None
    options = {flag.removeprefix("--"): option for option in ctx.command.params for flag in option.opts}
    for name, setting in settings.items():
        if name not in options or name in ("config", "help"):
            raise JobError(f"--config {value}: there is no option {name!r}; {near(name, options)}look up serve --help")
        if options[name].multiple and not isinstance(setting, list):
            setting = settings[name] = [setting]
        try:
            options[name].type_cast_value(ctx, setting)
        except click.BadParameter as error:
            raise JobError(f"--config {value}: {name} = {setting!r}: {error.message}") from None
    ctx.default_map = {options[name].name: setting for name, setting in settings.items()}


_SERVER = all_of(
    click.option("--config", metavar="FILE", is_eager=True, expose_value=False, callback=read_config,
                 help="Options in a TOML file, under the names of the command line: port = 8000."),
    model_options,
    *(
        declared(option.name, option, *(f"--{name.replace('_', '-')}" for name in option.metadata["cli"]))
        for option in fields(ServerSpec)
        if option.metadata["cli"] != (None,)
    ),
    click.option("--adapter", metavar="NAME=FOLDER", multiple=True,
                 help="A LoRA adapter (PEFT), which requests ask for by its name as the model. May be repeated."),
    model_group("serve", "machine", "engine"),
    media_options,
    generation_options,
)  # fmt: skip


@click.command(short_help="Answer HTTP requests: the APIs of OpenAI, vLLM and others.")
@_SERVER
def serve(**o: Any) -> None:
    """Answer HTTP requests with a model until told to end.

    The address is bound before the model is loaded; /health answers 503 until it is. SIGTERM takes no more requests,
    lets those that run end, and exits with status 0.

    \b
    prefold serve -m HuggingFaceTB/SmolLM2-135M-Instruct --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from ..checkpoint import BUILT_IN
    from .model import adapter_folders, find_model, image_reading, load_llm, open_model

    adapter_folders(o)
    if o["model"] not in BUILT_IN:  # whose file may have to be downloaded, while the server answers that it is loading
        find_model(o, weights=False)
    from ..serve import serve as run

    names = [name for name in ServerSpec.__dataclass_fields__ if name in o]
    options = ServerSpec(**{name: o[name] for name in names})

    def load() -> Any:
        llm = load_llm(o, *open_model(o))
        if llm.images is not None:
            llm.images = llm.images.with_reader(**image_reading(o))
        return llm

    run(load, options)
