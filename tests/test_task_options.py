"""The options of the tasks: one dataclass a task, which everything else reads."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path

import click
import pytest
from msgspec.json import schema_components

import prefold
from prefold import CacheOptions, InputError, Sampling
from prefold.cli import main
from prefold.cli.specs import model_spec
from prefold.spec.fields import kind_of
from prefold.spec.fields import option as declare
from prefold.spec.job import job_parameters
from prefold.spec.model import ImageSettings, LoopedSettings, ModelSpec, model_fields, model_options
from prefold.spec.server import ServerSpec
from prefold.spec.task import (
    FILTERS,
    OPTIONS,
    EmbedOptions,
    SamplerOptions,
    cli_names,
    filters_of,
    http_names,
    option_of,
    options_of,
    penalties_of,
)
from prefold.tasks.sampling import sampling_from
from prefold.wire.completions import Completion


def test_what_is_made_of_the_table_is_up_to_date():
    """The generated files: keywords of the methods, pages of docs/reference/, and the C interface."""
    script = Path(__file__).parents[1] / "scripts" / "generate"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("task", OPTIONS)
def test_every_option_is_on_the_command_line_and_in_a_jobs_fingerprint(task):
    has = {p.name for p in main.commands[task].params if isinstance(p, click.Option)}
    for option, names in cli_names(task).items():
        assert set(names) <= has, f"{option} is made of {names}, which `prefold {task}` lacks"
        assert option_of(task, option).metadata["doc"]
        if option not in ("adapter", "template_seconds"):  # of the first a digest is kept
            assert option_of(task, option).metadata["journal"]


def test_defaults_of_what_is_sampled_with_are_those_of_the_options():
    """But for max_tokens, which only the task can make a number of."""
    defaults = {one.name: one.default for one in fields(OPTIONS["generate"])}
    assert {one.name for one in fields(Sampling) if one.default != defaults[one.name]} == {"max_tokens"}


def test_every_number_of_an_option_has_its_bounds_everywhere():
    """On the command line, in the schema of bodies, and where values are checked."""
    generate = {p.name: p for p in main.commands["generate"].params}
    for parameter, name in http_names().items():
        option = option_of("generate", name)
        least, most, above = (option.metadata[key] for key in ("least", "most", "above"))
        if kind_of(option) not in (int, float):
            continue
        schema = schema_components([Completion])[1]["Completion"]["properties"][parameter]
        assert (schema.get("exclusiveMinimum" if above else "minimum"), schema.get("maximum")) == (least, most)
        if name != "seed":  # that of a job is a number which JSON has everywhere
            kind = generate[name].type
            assert (getattr(kind, "min", None), getattr(kind, "max", None)) == (least, most), name
        for beyond in (least if above else least - 1, most and most * 1.1 + 1):
            if beyond is not None:
                with pytest.raises(InputError) as caught:
                    sampling_from({name: kind_of(option)(beyond)}, vocab_size=9, tokenizer=None)
                assert (caught.value.field, caught.value.code) == (name, "out_of_range")


def test_every_option_of_a_server_is_on_the_command_line_with_its_default():
    serve = main.commands["serve"]
    has, given = {p.name: p for p in serve.params}, serve.make_context("serve", []).params
    for one in fields(ServerSpec):
        if one.metadata["cli"] == (None,):
            assert one.name not in has
        else:
            assert (has[one.name].help, given[one.name]) == (one.metadata["doc"], one.default)
            assert getattr(has[one.name].type, "min", None) == one.metadata["least"]


def test_every_option_of_a_model_is_on_the_commands_that_it_names():
    commands = {"model": "demo", "machine": "bench", "engine": "embed", "threshold": "run", "text": "generate"}
    commands |= {"media": "plan", "serve": "serve", "answers": "decide"}
    for name, option in model_fields().items():
        kind = {p.name: p for p in main.commands[commands[option.metadata["on"]]].params}[name]
        assert kind.help == option.metadata["doc"] and kind.opts == [f"--{name.replace('_', '-')}"]
        assert getattr(kind.type, "min", None) == (option.metadata["least"] if kind.metavar != "BYTES" else None)


def test_what_the_command_line_sets_reaches_the_model():
    arguments = ["x.jsonl", "--exits", "save", "--media-memory", "1MB", "--allow-media-host", "a.org", "--max-running"]
    given = main.commands["generate"].make_context("generate", [*arguments, "3", "--kv-memory", "5kB"]).params
    options = model_spec(given)
    assert options.looped == LoopedSettings(exits="save") and (options.kv_memory, options.max_running) == (5000, 3)
    assert options.images == ImageSettings(media_memory=1_000_000, allow_media_host=("a.org",))
    assert options == model_options(options.keywords()) and options.cache is None


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"exits": "save"}, "exits", 'give looped={"exits": ...}'), ({"looped": {"exit": 1}}, "exit", "mean exits?"),
        ({"looped": {"exits": "leave"}}, "exits", "'read', 'save', 'project'"), ({"images": 3}, "images", "a mapping"),
        ({"looped": {"refill": False}}, "refill", "it has: exits"), ({"looped": {"group": "block"}}, "group", "exits"),
        ({"looped": {"step_visits": 2}}, "step_visits", "it has: exits"),
        ({"images": {"allow_media_host": "a.org"}}, "allow_media_host", "a list of hosts"),
        ({"images": {"media_memory": -1}}, "media_memory", "0 or more"), ({"threads": "4"}, "threads", "a whole"),
        ({"cache": "mru"}, "cache", "lru, lfu"), ({"dtyp": "float32"}, "dtyp", "mean dtype?"),
        ({"load_format": "gguf"}, "load_format", "'dummy'"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_a_model_is_named(given, field, says):
    with pytest.raises(InputError) as caught:
        model_options(given)
    assert caught.value.field == field and says in caught.value.remedy


@dataclass(frozen=True, kw_only=True)
class MadeUp(ModelSpec):
    share: float = declare(0.5, "A share.", least=0, most=1, above=True, on="engine")


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (0, "give a number, more than 0, at most 1"),
        (1.5, "at most 1"),
        (float("nan"), "at most 1"),
        ("1", "give a number"),
    ],
)
def test_a_new_option_of_a_model_is_checked_as_it_is_declared(given, remedy):
    assert MadeUp(share=1).share == 1
    with pytest.raises(InputError, match=f"share is {given!r}") as caught:
        MadeUp(share=given)
    assert remedy in caught.value.remedy


def test_a_model_takes_settings_as_mappings_and_as_objects():
    options = model_options({"looped": {"exits": "save"}, "images": False, "cache": "lfu"})
    assert options == model_options(
        {
            "looped": LoopedSettings(exits="save"),
            "images": ImageSettings(tower=False),
            "cache": CacheOptions(policy="lfu"),
        }
    )


DRAWS = {"worker/sampler.py", "worker/native/arrays.py", "kernels/operations.py"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        # It is a key of generation_config.json, too.
        ("min_p", {"checkpoint/keys.py", "spec/task.py", "worker/torch/draw_triton.py"} | DRAWS),
        ("top_n_sigma", {"spec/task.py", "worker/torch/draw_triton.py"} | DRAWS),
    ],
)
def test_an_option_stands_in_a_table_and_where_it_is_done(name, where):
    package = Path(prefold.__file__).parent
    files = {path for path in package.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))}
    assert {str(path.relative_to(package)) for path in files} == where | {"api/keywords.py"}  # which is generated


@pytest.mark.parametrize("name", FILTERS[1:])  # the temperature is the column before them
def test_both_draws_do_each_filter(name):
    """A filter that is declared and not done would be left out without a word. The tests of each draw turn it on."""
    root = Path(__file__).parents[1]
    for path in ("prefold/worker/sampler.py", "prefold/worker/torch/draw_triton.py"):
        assert f'"{name}"' in (root / path).read_text(encoding="utf-8"), f"{path} does nothing for {name}"
    for path in ("tests/worker/test_draw.py", "tests/worker/test_sampler.py"):
        assert f"{name}=" in (root / path).read_text(encoding="utf-8"), f"{path} has no Sampling with {name}"


def test_the_page_of_bodies_names_every_parameter_of_sampling():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    missing = [name for name in http_names(SamplerOptions) if f"`{name}`" not in page]
    assert missing == [], "bodies have a field for each option of sampling"


def test_the_sampler_gets_a_column_for_each_of_its_options():
    assert FILTERS[0] == "temperature"
    assert filters_of(Sampling(temperature=0.5, min_p=0.25))[FILTERS.index("min_p")] == 0.25
    assert penalties_of(Sampling()) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("task", "option", "value"),
    [
        ("embed", "pooling", "lats"), ("embed", "normalize", "no"), ("embed", "dimensions", True),
        ("embed", "dimensions", 1.5), ("embed", "prompt", 5), ("embed", "truncate", "middle"), ("embed", "truncate", 1),
        ("embed", "max_length", 0), ("embed", "max_length", "5"), ("rerank", "raw_scores", "no"),
        ("rerank", "instruction", 5), ("classify", "calibrate", 1), ("classify", "normalization", "words"),
        ("score", "prefix_token", "x"), ("generate", "system", 5), ("generate", "salt", None),
        ("generate", "adapter", 1),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(task, option, value):
    with pytest.raises(InputError, match=f"{option} is") as caught:
        options_of(task, {option: value})
    assert caught.value.field == option and caught.value.remedy


def test_options_cannot_be_changed():
    options = EmbedOptions(truncate="left")
    with pytest.raises(FrozenInstanceError):
        options.truncate = False
    with pytest.raises(InputError, match="did you mean pooling"):
        options_of("embed", {"poling": "mean"})


def code_of(*names, without=()):
    """The code of files and folders of the package."""
    package = Path(prefold.__file__).parent
    paths = {path for name in names for path in (package / name).rglob("*.py")} - {package / name for name in without}
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_every_option_of_a_model_or_a_server_is_read():
    code = code_of("", without=("spec/model.py", "api/keywords.py"))
    for kind in (ModelSpec, ImageSettings, LoopedSettings, CacheOptions, ServerSpec):
        for one in fields(kind):
            assert re.search(rf"\.{one.name}\b", code), f"no code reads {one.name} of {kind.__name__}"


def test_every_other_option_of_a_command_is_read():
    """Those of a job's spec, which are attributes, and those that a command takes itself, which are its parameters."""
    code = code_of("", without=("cli/options.py",))
    tables = {*model_fields(ModelSpec, ImageSettings, LoopedSettings, CacheOptions), *ServerSpec.__annotations__}
    attributes = {parameter: one.name for parameter, one in job_parameters().items()}
    tables |= {name for task in OPTIONS for names in cli_names(task).values() for name in names}
    reads = set(re.findall(r"\.(\w+)", code))
    named = set(re.findall(r"""["'](\w+)(?=["'])""", code)) | set(re.findall(r"\b(\w+):", code))
    for command, options in main.commands.items():
        for option in options.params:
            known = option.name in tables or not option.expose_value
            own = attributes.get(option.name)
            read = own in reads if own else option.name in named
            assert known or read, f"no code reads --{option.name} of {command}"
