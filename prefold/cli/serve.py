"""`prefold serve`: answer HTTP requests with a model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import click

from ..errors import JobError
from ..spec import environment
from ..spec.fields import near
from ..spec.files import read_toml
from ..spec.job import JobSpec
from ..spec.server import ServerSpec
from .options import Option, all_of, command, declared, generation_options, media_options, model_group, model_options
from .process import notice
from .specs import server_spec, takes_job


def read_settings(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the TOML file and the PREFOLD_SERVE_* variables, which override it, the defaults of the options.

    Raise JobError for an unknown option and for a value that the option refuses. The message names the file or the
    variable.
    """
    variables = environment.server_settings()
    named = variables.pop("config", None)
    path = path or named
    options = {flag[2:]: option for option in ctx.command.params for flag in option.opts if flag.startswith("--")}
    for name in ("config", "help"):
        options.pop(name, None)
    defaults = ctx.default_map = {}
    for name, value in (read_toml(path) if path else {}).items():
        if name not in options:
            close = near(name, options)
            raise JobError(f"{path}: there is no option {name!r}; {close}prefold serve --help-all lists the options")
        listed = not options[name].multiple or isinstance(value, list)
        defaults[str(options[name].name)] = value if listed else [value]
        _check(ctx, options[name], f"{path}: {name} = ")
    for name, text in variables.items():
        variable = environment.server_variable(name)
        if name not in options:
            close = near(variable, map(environment.server_variable, options))
            raise JobError(f"{variable}: prefold serve has no option --{name}; {close}remove or rename the variable")
        defaults[str(options[name].name)] = text.split() if options[name].multiple else text
        _check(ctx, options[name], f"{variable}=")


def _check(ctx: click.Context, option: click.Parameter, place: str) -> None:
    """Raise JobError if the option refuses its value in the context's default map."""
    assert ctx.default_map is not None
    value = ctx.default_map[str(option.name)]
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise JobError(f"{place}{value!r}: {error.message}") from None


_OPTIONS = {option.name: option for option in fields(ServerSpec) if option.metadata["cli"] != (None,)}
_SERVER = all_of(
    click.option("--config", cls=Option, group="Server", metavar="FILE", is_eager=True, expose_value=False,
                 callback=read_settings,
                 help="TOML file of options, such as port = 8000; PREFOLD_SERVE_* variables override it."),
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
