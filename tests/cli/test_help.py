"""What the command line promises before it does anything: help, speed, no torch where none is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from prefold.cli import main
from prefold.cli.options import TASKS, Command, Option, help_line
from prefold.spec.fields import HELP_GROUPS

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def sections():
    """The text under each `## prefold NAME` heading of docs/cli.md, and that before the first."""
    parts = re.split(r"^## (?:`prefold (\w+)`|.*)$", DOCS.read_text(encoding="utf-8"), flags=re.M)
    return {name or f"other {i}": text for i, (name, text) in enumerate(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_every_option_is_documented(name):
    text = sections()
    assert name in text, f"docs/cli.md has no section `## prefold {name}`"
    # Commands that look at a job, or run a part of it, have options of the tasks.
    own = {name, *(TASKS if name in ("run", "plan", "verify", "bench") else ())}
    everywhere = "".join(part for other, part in text.items() if other in own or other.startswith("other"))
    for parameter in main.commands[name].params:
        if isinstance(parameter, click.Option):
            for option in [*parameter.opts, *parameter.secondary_opts]:
                assert f"`{option}`" in everywhere, f"docs/cli.md does not say what {option} of prefold {name} does"


def test_nothing_is_documented_that_is_not_there():
    known = {option for c in main.commands.values() for p in c.params for option in (*p.opts, *p.secondary_opts)}
    documented = set(re.findall(r"`(--[a-z-]+)`", DOCS.read_text(encoding="utf-8")))
    assert documented <= known | {"--help", "--help-all", "--version"}


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_option_has_a_help_text_and_every_command_a_summary(name):
    command = main.commands[name]
    assert command.help and command.short_help and len(command.short_help) < 60
    assert all(p.help for p in command.params if isinstance(p, click.Option))


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_shows_the_common_options_by_group_and_help_all_shows_every_option(name, prefold):
    common, everything = prefold(name, "--help").stdout, prefold(name, "--help-all").stdout
    options = [p for p in main.commands[name].params if isinstance(p, click.Option)]
    for option in options:
        flag, is_common = max(option.opts, key=len), getattr(option, "common", True)
        assert re.search(rf"{flag}\b(?!-)", everything), f"--help-all of {name} lacks {flag}"
        assert bool(re.search(rf"^  (-\w, )?{flag}\b(?!-)", common, re.M)) == is_common, flag
    rare = sum(not getattr(option, "common", True) for option in options)
    assert (f"{rare} more options: " in common) == (rare > 0) and "more options" not in everything
    for text in (common, everything):
        headings = re.findall(r"^([A-Z][\w ]+):$", text, re.M)
        assert headings == [group for group in ("Options", *HELP_GROUPS) if group in headings]


def test_commands_without_rare_options_have_no_help_all():
    assert "--help-all" not in Command("x").get_help(click.Context(Command("x")))


@pytest.mark.parametrize("name", sorted(main.commands))
def test_the_help_of_an_option_is_one_line_at_120_columns(name):
    for option in [p for p in main.commands[name].params if isinstance(p, Option)]:
        line = help_line(option)
        if line.startswith(tuple(f"{task}: " for task in TASKS)):  # one meaning per task
            continue
        assert line.endswith(".") and line.count("(default") <= 1, line
        assert len(line) <= 88, f"{option.opts}: {len(line)} characters"


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(columns):
    assert main.context_settings["max_content_width"] == 120
    for name in ("generate", "serve"):
        context = click.Context(main.commands[name], info_name=name, terminal_width=columns)
        lines = main.commands[name].get_help(context).partition("Options:")[2].splitlines()
        assert columns - 20 < max(map(len, lines)) <= columns


def test_the_default_of_an_option_is_in_its_help():
    lines = {p.name: help_line(p) for name in ("generate", "serve") for p in main.commands[name].params[1:]}
    assert lines["port"] == "Port to listen on (0: any free port; default: 8000)."
    assert lines["max_body_bytes"] == "Maximum size of a request body (default: 16MiB)."
    assert lines["top_k"] == "Sample from the K most likely tokens (default 0: all)."
    assert lines["presence_penalty"].endswith("already generated (default 0: off).")
    assert lines["stop_id"] == "Token id that ends the answer (repeatable)."
    assert lines["backend"].endswith("(default: prefold).") and lines["dtype"].count("default") == 1


@pytest.mark.parametrize("name", TASKS)
def test_the_help_of_a_task_speaks_of_that_task_alone(name):
    told = [p.help for p in main.commands[name].params if isinstance(p, click.Option)]
    assert not [text for text in told if any(text.startswith(f"{task}: ") for task in TASKS)]
    everything = {p.name: p.help for p in main.commands["run"].params if isinstance(p, click.Option)}
    assert everything["template"].startswith("rerank: ") and "classify: " in everything["template"]


@pytest.mark.parametrize(
    ("commands", "allowed"),
    [
        ([["--version"]], {"click"}),
        ([["--help"], *([name, "--help"] for name in main.commands)], {"click"}),
        ([["nonsense"], ["rerank"], ["serve", "--port", "x"]], {"click"}),  # wrong usage
        ([["models"]], {"click", "numpy", "ml_dtypes", "safetensors"}),
        ([["answers", "nothing"]], {"click", "numpy", "ml_dtypes", "safetensors", "msgspec", "typing_extensions"}),
    ],
    ids=["version", "help", "usage", "models", "answers"],
)
def test_a_command_that_computes_nothing_imports_little_and_loads_no_kernels(environment, commands, allowed):
    """Each list of commands runs in one new process."""
    code = f"""
import sys
before = {{*sys.modules}}
from prefold.cli import main
for command in {commands!r}:
    try:
        main(command, prog_name="prefold")
    except SystemExit:
        pass
others = {{name.partition(".")[0] for name in {{*sys.modules}} - before}} - {{*sys.stdlib_module_names, "prefold"}}
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(*sorted(others), *(["kernels"] if "/kernels-" in maps else []))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "Traceback" not in done.stderr
    found = {*done.stdout.splitlines()[-1].split()}
    assert "click" in found and found <= allowed


def test_a_command_imports_no_other_command(environment):
    code = "import sys; from prefold.cli import main; main.commands['models']; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    loaded = {name.removeprefix("prefold.cli.") for name in done.stdout.split() if name.startswith("prefold.cli.")}
    assert loaded == {"models", "options", "process"}


@pytest.mark.parametrize(
    "arguments",
    [["--gflops", "9"], ["--gflops", "9", "--report", "page.html"], ["--json"]],
)
def test_a_plan_that_measures_nothing_never_imports_torch(tmp_path, model, environment, arguments):
    (tmp_path / "in.jsonl").write_text('{"query": "q", "document": "a"}\n{"query": "q", "document": "b"}\n')
    arguments = ["plan", "in.jsonl", "--task", "rerank", *arguments]
    code = (
        f"import sys, atexit; sys.argv[:] = ['prefold', *{arguments!r}, '-m', {model!r}]\n"
        "atexit.register(lambda: print('torch' in sys.modules, flush=True))\n"
        "from prefold.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert done.stdout.endswith("False\n")
    assert "2 records, 2 prompts" in done.stdout or json.loads(done.stdout.splitlines()[0])["requests"] == 2
