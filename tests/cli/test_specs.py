"""A parsed command becomes a frozen JobSpec in one place, and only that travels."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import click
import pytest

import prefold
from prefold import Calibration
from prefold.cli import main
from prefold.cli.specs import job_spec
from prefold.cluster.backends import backend_for
from prefold.spec.fields import SpecError
from prefold.spec.job import TASKS, JobSpec, job_parameters, task_parameters
from prefold.spec.model import model_fields

# Values of options that have a syntax of their own, or that name a file; of the others the type says one.
VALUES = {
    "logit_bias": ("42=-5",), "json_schema": "{}", "chat_template_kwargs": '{"a": 1}', "words": "Yes,No",
    "labels": "a,b", "labels_file": "labels.txt", "examples": "examples.jsonl", "route": (0, 1), "stop": ("x",),
    "stop_id": (3,), "choice": ("a", "b"), "keep": ("a",), "backend_option": ("a=1",), "allow_media_host": ("a.org",),
    "tools": "column", "arithmetic": "int8", "kv_dtype": "bfloat16", "exits": "save", "normalization": "bytes",
    "questions": '{"a": {"type": "noul"}}', "gold": ("a",), "calibration": "calibration.json",
}  # fmt: skip


def a_value(option):
    """A value of an option of the command line that is not its default."""
    if option.name in VALUES:
        return VALUES[option.name]
    if option.is_flag:
        return not option.secondary_opts
    if isinstance(option.type, click.Choice):
        return option.type.choices[-1]
    bounds = [bound for bound in (getattr(option.type, "min", None), getattr(option.type, "max", None), 7) if bound]
    return option.type_cast_value(
        click.Context(click.Command("x")), str(min(bounds)) if option.metavar in "NX" else "7"
    )


@pytest.mark.parametrize("task", TASKS)
def test_every_option_that_changes_a_result_changes_the_identity_of_a_job(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.txt").write_text("a\nb\n")
    (tmp_path / "examples.jsonl").write_text('{"text": "x", "label": "a"}\n')
    Calibration(questions={}, model="m", model_digest="d", prompt="p").save(tmp_path / "calibration.json")
    declared = job_parameters() | task_parameters(task) | model_fields()
    options = {option.name: option for option in main.commands[task].params if option.name in declared}
    alike = job_spec({}, task=task).identity()
    for name in (name for name in options if declared[name].metadata["journal"] and name != "adapter"):
        identity = job_spec({name: a_value(options[name])}, task=task).identity()
        assert {key for key in identity if identity[key] != alike.get(key)}, f"--{name} makes no other job"


def test_a_value_that_is_given_counts_even_if_it_is_the_default():
    """Batch lines and --recommended have defaults of their own."""
    zero, off = job_spec({"temperature": 0.0, "skip_special_tokens": False}), job_spec({"max_tokens": 0})
    assert zero.settings("generate", type(zero.tasks["generate"])) == {"temperature": 0.0, "skip_special_tokens": False}
    assert zero.identity().items() >= {"temperature": 0.0, "skip_special_tokens": False}.items()
    assert off.identity()["max_tokens"] == 0 and "max_tokens" not in job_spec({}).identity()


def test_texts_that_the_locale_did_not_decode_are_decoded():
    given = {"stop": ("\udcc3\udca9",), "labels": "a,\udcc3\udca9", "instruction": "\udcc3\udca9"}
    tasks = job_spec(given).tasks
    assert (tasks["generate"].stop, tasks["classify"].labels) == (("é",), ["a", "é"])
    assert tasks["embed"].instruction == tasks["rerank"].instruction == "é"
    assert job_spec({"choice": ("\udcc3\udca9",)}).tasks["generate"].grammar == {"choice": ("é",)}


def test_a_spec_is_frozen_and_has_its_defaults_without_a_command_line():
    spec = JobSpec()
    for part in (spec, spec.model, spec.input, spec.output, spec.fleet, spec.conversations):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)
    assert (spec.input.window, spec.fleet.patience, spec.model_name) == (1 << 20, 300.0, "smollm2-135m")
    assert job_spec({}, task="embed").model.cache is None and job_spec({"stream": True}).model.cache.policy == "lru"


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"replicas": 2}, "replicas", "--replicas needs --ray"),
        ({"url": ("http://x",), "ray": ""}, "ray", "--ray and --url exclude each other"),
        ({"tokenizer": "x"}, "tokenizer", r"--tokenizer is for jobs on servers \(--url\) or with --backend vllm"),
        ({"backend": "vllm", "backend_option": ("block_size",)}, "backend_option", "NAME=VALUE"),
    ],
)
def test_options_that_exclude_each_other_are_named(given, field, says):
    with pytest.raises(SpecError, match=says) as caught:
        backend_for(job_spec(given, task="generate"))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "task", "field", "says"),
    [
        ({"resume": True}, "embed", "output", "need an output file"),
        ({"output": "o", "resume": True, "overwrite": True}, "embed", "overwrite", "exclude each other"),
        ({"prompt": "a", "messages": "b"}, "generate", "messages", "--prompt and --messages exclude each other"),
        ({"system": "s"}, "embed", "system", "--system is for conversations; add --messages COLUMN"),
        ({"image": "i"}, "rerank", "image", "--image is for embed"),
        ({"json_columns": True}, None, "json_columns", "--task generate"),
        ({"json_columns": True, "json_object": True, "n": 2}, "generate", "json_columns", "--n exclude each other"),
        ({"max_tokens": 3}, "embed", "max_tokens", "--max-tokens is for generate, and not for embed"),
        ({"normalize": False}, "score", "normalize", "--normalize/--no-normalize is for embed, and not for score"),
    ],
)
def test_a_spec_refuses_what_no_input_could_allow(given, task, field, says):
    with pytest.raises(SpecError, match=says) as caught:
        job_spec(given, task=task).check()
    assert caught.value.field == field


def test_files_of_options_are_noted_and_read_once(tmp_path):
    (tmp_path / "p.txt").write_text("{text}!\n")
    spec = job_spec({"prompt": f"@{tmp_path / 'p.txt'}", "instruction": f"@{tmp_path / 'p.txt'}"}, task="embed")
    assert (spec.input.prompt, spec.tasks["embed"].instruction) == ("{text}!", "{text}!")
    assert spec.side_files == (("--prompt", str(tmp_path / "p.txt")),)


def test_no_options_travel_as_a_dict():
    """But for the simulator, which goes to the benchmarks."""
    package, found = Path(prefold.__file__).parent, []
    for path in sorted({*package.rglob("*.py")} - {package / "cli" / "simulate.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            arguments = node.args.args + node.args.kwonlyargs if isinstance(node, ast.FunctionDef) else []
            for one in arguments:
                typed = ast.unparse(one.annotation) if one.annotation else ""
                if one.arg == "o" and typed.startswith(("dict", "Mapping", "Options")):
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert found == []
