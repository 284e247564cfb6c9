"""The options of the tasks: one dataclass a task, which everything else reads."""

from __future__ import annotations

import typing
from dataclasses import FrozenInstanceError, fields

import click
import pytest

from prefold import InputError, Sampling, types
from prefold.cli import main
from prefold.cli.fingerprint import RESULT_OPTIONS
from prefold.face import keywords
from prefold.options import OPTIONS, EmbedOptions, cli_names, doc_of, options_of

KEYWORDS = {
    "embed": keywords.EmbedKeywords,
    "rerank": keywords.RerankKeywords,
    "classify": keywords.ClassifyKeywords,
    "score": keywords.ScoreKeywords,
    "generate": keywords.GenerationKeywords,
}
OWN_PLACE = {"classify": {"labels"}, "generate": {"n", "adapter"}}  # parameters of the methods themselves
# What a command has that is no option of its task: the model, the input and output, how it runs.
OTHER = {"seed", "adapter", "adapter_column", "chat", "recommended"}


@pytest.mark.parametrize("task", OPTIONS)
def test_the_keywords_of_a_method_are_its_options(task):
    wanted = typing.get_type_hints(OPTIONS[task], localns=vars(types))
    wanted = {one.name: wanted[one.name] for one in fields(OPTIONS[task]) if one.name not in OWN_PLACE.get(task, ())}
    assert typing.get_type_hints(KEYWORDS[task]) == wanted


@pytest.mark.parametrize("task", OPTIONS)
def test_every_option_is_on_the_command_line_and_in_a_jobs_fingerprint(task):
    has = {p.name for p in main.commands[task].params if isinstance(p, click.Option)}
    for option, names in cli_names(task).items():
        assert set(names) <= has, f"{option} is made of {names}, which `prefold {task}` lacks"
        assert doc_of(task, option)
        if option not in ("adapter", "template_seconds"):  # of the first a digest is kept
            assert set(names) <= set(RESULT_OPTIONS)


def test_what_is_sampled_with_is_an_option():
    names = {one.name for one in fields(OPTIONS["generate"])}
    assert {one.name for one in fields(Sampling)} <= names
    for one in fields(Sampling):
        default = next(o.default for o in fields(OPTIONS["generate"]) if o.name == one.name)
        assert default == one.default or one.name == "max_tokens"


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
