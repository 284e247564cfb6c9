"""Hostile chat templates: whatever they do, it ends soon, and with an InputError."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from prefold.errors import InputError
from prefold.text import ChatTemplates, allowance
from prefold.text.allowance import allowed
from prefold.text.sandbox import compile_template

USER = {"role": "user", "content": "hi"}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = [
    LOOPS + "{% endfor %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(9999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    "{% for a in range(99999) if range(99999) | list | sort | length < 0 %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = ('a' * 999999).replace('a', 'bc') %}{% endfor %}",
]
BIG = "{% set x = 'a' * 9999999 %}"
HUGE = [
    "{{ 9 ** (9 ** 9) }}",
    "{{ 2 ** 99999999999 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ '%999999999d' | format(1) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set s = 'a' * 9999999 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 9999999 %}{{ s | replace('a', s) }}",
    "{{ [1] | tojson(indent=10 ** 10) }}",
    "{{ range(9) | slice(10 ** 10) | list }}",
    "{{ ('{' ~ ':' * 60000 ~ '1' * 6).format(1) }}",
    BIG + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    BIG + "{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ m() | length }}",
    BIG + "{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    BIG + "{{ ([x] * 9999) | join }}",
    BIG + "{{ ([x] * 9999) | map('string') | join }}",
    BIG + "{{ ''.join([x] * 9999) }}",
    BIG + "{{ ([[x] * 99] * 99) | tojson }}",
    BIG + "{{ [[x] * 99, {'a': [x] * 99}] | tojson }}",
    BIG + "{{ ([1] * 999) | join(x) }}",
    BIG + "{{ ('%s' * 999) | format(*([x] * 999)) }}",
    BIG + "{{ ('{0}' * 999).format(x) }}",
    BIG + "{{ ('%(a)s' * 999) % {'a': x} }}",
    BIG + "{{ '%s' % [[x] * 999] }}",
    BIG + "{{ ('{0}' * 999).format([x]) }}",
    BIG + "{{ [x] * 999 }}",
    BIG + "{{ {'a': [x] * 999} }}",
    BIG + "{{ ([x] * 999) | string }}",
    BIG + "{{ ([x] * 999) ~ 'a' }}",
    BIG + "{{ ('{a}' * 999).format_map({'a': x}) }}",
]
SQUARE = [
    "{{ ('<!---->' * 10 ** 6) | striptags }}",
    "{{ (('<!---->' * 10 ** 6) | safe).striptags() }}",
    "{{ ('a' * 10 ** 6) | wordwrap(1) }}",
    "{{ ('a.b/' ~ '(' * 10 ** 6 ~ '),' * 10 ** 6) | urlize }}",
    "{{ range(99999) | batch(1) | sum(start=[]) }}",
    "{{ range(99999) | batch(1) | sum(none, []) }}",
]
RAISING = [
    ("{% break %}", "SyntaxError"),
    ("{% for a in b %}" * 21 + "{% endfor %}" * 21, "SyntaxError"),
    ("{{ 'x' | truncate(-1) }}", "AssertionError"),
    ("{{ 1e400 | int }}", "OverflowError|NameError"),
    ("{{ '\\ud800' }}", "surrogate"),
    ("{{ messages | tojson(indent='\\ud800') }}", "surrogate"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
    ("{{ " + "-" * 3000 + "1 }}", "Error"),
    ("{{ raise_exception('\\ud800') }}", "ud800"),
    ("{% include 'x' %}", "TypeError|loader"),
    ("{{ lipsum(99) }}", "undefined"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
]


def render(template, **options):
    return ChatTemplates({}, {}).render([USER], template=template, **options)


TICK = 1e-3


@pytest.fixture
def looks(monkeypatch):
    """How often this thread has looked at the clock of templates, where TICK passes between two looks."""
    own = threading.local()

    def look():
        own.number = getattr(own, "number", 0) + 1
        return own.number * TICK

    monkeypatch.setattr(allowance, "time", SimpleNamespace(thread_time=look))
    return lambda: own.number


@pytest.mark.parametrize("template", ENDLESS)
def test_time_is_bounded(template, looks):
    with pytest.raises(InputError, match=r"stopped: it (ran|would run) for more than 0\.2 s.*template_s") as caught:
        render(template, template_seconds=0.2)
    assert looks() <= 0.2 / TICK + 2
    assert (caught.value.field, caught.value.code) == ("chat_template", "template_limit")


@pytest.mark.parametrize("template", HUGE)
def test_size_is_bounded(template):
    with pytest.raises(InputError, match="stopped: it") as caught:
        render(template)
    assert caught.value.code == "template_limit"


@pytest.mark.parametrize("template", SQUARE)
def test_what_takes_time_by_a_square_is_refused(template):
    with pytest.raises(InputError, match=r"stopped: it|No filter named|is unsafe") as caught:
        render(template)
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    "text", ["'{' ~ ':' * 2000000", "'{:a}' * 2000000", "'{' ~ ':1234 ' * 999999", "'{a' * 2000000"]
)
def test_formats_are_looked_at_in_linear_time(text):
    """A pattern that goes back from each of millions of colons does not end, and no clock is looked at meanwhile."""
    with pytest.raises(InputError):
        render("{{ (" + text + ").format() }}")


@pytest.mark.parametrize(("template", "what"), RAISING)
def test_whatever_a_template_raises_is_an_input_error(template, what):
    with pytest.raises(InputError, match=what) as caught:
        render(template)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    str(caught.value).encode()  # it can be written


def test_what_real_templates_do_is_allowed():
    made = render(
        "{{ 'ab' * 3 }}{{ '%s-%05d' % ('x', 42) }}{{ '{:>4}'.format(7) }}{{ 2 ** 10 }}{{ 'a' | indent(4) }}"
        "{{ messages | tojson(indent=2) | length }}{{ [1, 2] + [3] }}{{ 'a' ~ 1 ~ 'b' }}{{ 'aXb'.replace('X', '--') }}"
        "{{ [1, 2] | sum }}"
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}"
        "{{ loop.previtem is defined }}{% endfor %}{% for x in [[1, [2]]] recursive %}{{ x if x is number }}"
        "{{ loop(x) if x is not number }}{% endfor %}{% for i in [3, 1, 2] if i > 1 %}{{ i }}{% else %}-{% endfor %}"
    )
    assert made == "abababx-00042   71024a51[1, 2, 3]a1ba--b31True11False1232"


def test_threads_have_limits_of_their_own(looks):
    program, found = compile_template(ENDLESS[0]), {}

    def run(seconds):
        with pytest.raises(allowance.TemplateLimit), allowed(seconds):
            program.render({})
        found[seconds] = looks()

    threads = [threading.Thread(target=run, args=(seconds,)) for seconds in (0.05, 0.1, 0.3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(abs(number - seconds / TICK) <= 2 for seconds, number in found.items()) and len(found) == 3


def test_what_a_template_looks_up():
    names = compile_template(
        "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ messages[0].x }}{# documents #}"
    ).variables
    assert names == {"custom_tools", "tools", "messages"}
