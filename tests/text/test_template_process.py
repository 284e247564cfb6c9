"""Templates of strangers are rendered in a process of its own, which bounds their time and memory."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from prefold.errors import InputError
from prefold.text import ChatTemplates, template_process
from prefold.text.subprocesses import Subprocess
from prefold.text.template_process import TemplateProcess

USER = {"role": "user", "content": "Grüße"}
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}"
WRONG = [
    ("{{ 1 / 0 }}", {}),
    ("{% if %}", {}),
    ("{{ raise_exception('no\\ud800') }}", {}),
    ("{{ '\\ud800' }}", {}),
    ("no documents {{ 1 }}", {"documents": [{"a": 1}]}),
    ("{{ messages[0].__class__.x }}", {}),
]
BIG = "{% set x = 'a' * 9999999 %}"
MORE = "{% set ns = namespace(s='ab', n=3, t=()) %}{% for i in range(99999) %}"
LONG = [  # they end after the seconds that they may take, compiled code too
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) if range(99999) | list | sort | length < 0 %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ ('a' * 10 ** 7).rfind('ab' ~ 'a' * 10 ** 6) }}",
    "{{ ('<!---->' * (3 * 10 ** 6)) | striptags }}",
]
LARGE = [  # they get no more memory
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    MORE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    BIG + "{{ x.replace('a', x) }}",
    BIG + "{{ [[x] * 99, {'a': [x] * 99}] | tojson }}",
    BIG + "{% for i in range(99999) %}{{ x ~ i }}{% endfor %}",
    BIG + "{% set y %}{% for i in range(99) %}{{ x }}{% endfor %}{% endset %}",
    "{{ 'a' * 70000000 }}",  # what is written has a limit besides
]


@pytest.fixture(scope="module")
def templates():
    made = ChatTemplates({"default": CHAT}, {"bos_token": "<s>"})
    yield made
    made.process.subprocess.end()


@pytest.fixture
def holed():
    made = ChatTemplates({}, {})
    made.process.subprocess = Subprocess("holed", [str(1 << 30)])
    yield made
    made.process.subprocess.end()


@pytest.fixture(scope="module")
def small():
    made = ChatTemplates({}, {}, process=TemplateProcess(300 << 20))
    yield made
    made.process.subprocess.end()


def test_a_template_of_a_stranger_writes_the_same(templates):
    for x in ("", "東京", 1.5, None, [True, {"a": "\n"}]):
        found = templates.render([USER], template=CHAT, x=x, in_subprocess=True)
        assert found == templates.render([USER], template=CHAT, x=x) == templates.render([USER], x=x)
    assert templates.render([USER], template="{{ '' }}", in_subprocess=True) == ""
    tools = {"template": "{{ messages[0].content }}", "tools": [{"a": 1}]}
    assert '{"a": 1}' in templates.render([USER], **tools, in_subprocess=True) == templates.render([USER], **tools)
    more = {"continue_final_message": True, "in_subprocess": True}
    assert templates.render([USER], template="{{ messages[0].content }}.", **more) == "Grüße"


@pytest.mark.parametrize(("template", "options"), WRONG)
def test_errors_are_the_same(templates, template, options):
    with pytest.raises(InputError) as expected:
        templates.render([USER], template=template, **options)
    with pytest.raises(InputError) as caught:
        templates.render([USER], template=template, in_subprocess=True, **options)
    for name in ("message", "field", "remedy", "code"):
        assert getattr(caught.value, name) == getattr(expected.value, name)


@pytest.mark.parametrize("template", LONG + LARGE)
def test_a_template_that_takes_too_much_is_stopped_and_harms_no_other(small, template):
    with pytest.raises(InputError, match="the chat template that was given was stopped: it ") as caught:
        small.render([USER], template=template, in_subprocess=True, template_seconds=0.1 if template in LONG else 60)
    assert (caught.value.field, caught.value.code) == ("chat_template", "template_limit")
    assert ("ran for more than 0.1 s" in str(caught.value)) == (template in LONG)
    assert small.render([USER], template="{{ messages[0].content }}", in_subprocess=True) == "Grüße"


def test_a_template_that_writes_too_much_is_stopped_while_it_writes():
    """It is not begun again: neither for want of memory, nor because a message has no content."""
    calls = []
    values = {"messages": [USER, {"role": "assistant"}], "piece": lambda: calls.append(1) or "abc"}
    source = "{% for i in range(1000) %}{{ piece() }}{% endfor %}"
    with pytest.raises(InputError, match="the chat template x was stopped: it writes more than 10 letters") as caught:
        template_process.written(longest=10, name="x", source=source, values=values)
    assert (caught.value.field, caught.value.code) == ("chat_template", "template_limit")
    assert len(calls) == 4


def test_nothing_but_the_process_breaks_where_lists_are_nested_deep(small):
    """Python's hash of a tuple goes as deep as it is, past the end of the stack."""
    with pytest.raises(InputError):
        small.render([USER], template=MORE + "{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}", in_subprocess=True)
    assert small.render([USER], template="{{ 'a' }}", in_subprocess=True) == "a"


def test_memory_that_programs_of_other_templates_hold_is_free_for_a_template(small):
    for i in range(6):  # Jinja computes what is constant when it compiles a template
        template = "{{ 'a' * 20000000 }}" + str(i)
        assert len(small.render([USER], template=template, in_subprocess=True)) == 20000001
    template = "{% set x = messages[0].content * 24000000 %}{{ x | length }}"
    assert small.render([USER], template=template, in_subprocess=True) == "120000000"


def test_systems_that_do_not_limit_memory(templates, monkeypatch):
    monkeypatch.setattr(template_process.sys, "platform", "darwin")
    with pytest.raises(InputError, match="refused on darwin, which cannot limit their memory; name one") as caught:
        templates.render([USER], template=CHAT, in_subprocess=True)
    assert (caught.value.field, caught.value.code) == ("chat_template", "unsupported")
    assert (
        templates.render([USER], template=CHAT, x="")
        == templates.render([USER], in_subprocess=True, x="")
        == "<s>Grüße"
    )


def test_only_templates_that_are_given_as_texts():
    made = ChatTemplates({"default": CHAT}, {})
    assert (
        made.render([USER], in_subprocess=True)
        == made.render([USER], template="default", in_subprocess=True)
        == "Grüße"
    )
    assert made.process.subprocess.process is None


def test_a_number_that_python_does_not_write(templates):
    with pytest.raises(InputError, match="no JSON"):
        templates.render([USER], template=CHAT, x=10**5000, in_subprocess=True)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timers")
@pytest.mark.parametrize("call", ["spin()", "die()"])
def test_the_process_ends_in_compiled_code_too(holed, call):
    assert holed.render([USER], template="{{ 'a' }}", in_subprocess=True) == "a"
    process = holed.process.subprocess.process
    with pytest.raises(InputError, match=r"stopped: it ran for more than 0\.2 s, or ended its process") as caught:
        holed.render([USER], template="{{ " + call + " }}", template_seconds=0.2, in_subprocess=True)
    assert caught.value.code == "template_limit" and process.poll() is not None
    assert holed.render([USER], template="{{ 'b' }}", in_subprocess=True) == "b"


def test_memory_and_files_of_the_process(holed, tmp_path):
    pytest.importorskip("resource")
    with pytest.raises(InputError, match="it needs more memory than there is") as caught:
        holed.render([USER], template="{{ fill() }}", in_subprocess=True)
    assert caught.value.code == "template_limit"
    with pytest.raises(InputError):
        holed.render([USER], template="{{ open('" + str(tmp_path / "x") + "') }}", in_subprocess=True)
    assert not (tmp_path / "x").exists() or not (tmp_path / "x").read_text()
    assert holed.render([USER], template="{{ 'b' }}", in_subprocess=True) == "b"


def test_an_interrupted_answer_is_not_taken_for_the_next(templates, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    templates.render([USER], template="{{ 'a' }}", in_subprocess=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Subprocess, "receive", interrupted)
        templates.render([USER], template="{{ 'b' }}", in_subprocess=True)
    assert templates.render([USER], template="{{ 'c' }}", in_subprocess=True) == "c"


def test_a_process_that_was_killed_is_started_again(templates):
    templates.render([USER], template="{{ 'a' }}", in_subprocess=True)
    process = templates.process.subprocess.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert templates.render([USER], template="{{ 'a' }}", in_subprocess=True) == "a"


def test_threads_wait_for_each_other(templates):
    found = {}

    def render(i):
        found[i] = templates.render([USER], template="{{ '%d' % x }}", x=i, in_subprocess=True)

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}
