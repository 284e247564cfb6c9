"""What one operation of a template makes or looks at is taken before: however little it may take, no more is held."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import pytest
from counts import most_bytes

from prefold.errors import InputError
from prefold.text import ChatTemplates, allowance
from prefold.text.allowance import allowed, size_of

USER = {"role": "user", "content": "hi"}
LONG = "{% set a = 'ab' * 10000 %}"
LINES = "{% set a = 'a\\n\\t' * 5000 %}"
# Lists of lists, each there twice in the next: small to hold, and twice as large to write or to compare.
DOUBLED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(LEVELS) %}{% set ns.a = [ns.a, ns.a] %}"
DOUBLED += "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
LARGE = [
    LONG + "{{ (a ~ a ~ a ~ a ~ a ~ a) | length }}",
    LONG + "{{ (a + a + a + a) | length }}",
    LONG + "{{ ('b' | replace('b', a * 3)) }}",
    LONG + "{{ a.replace('', 'x' * 99) }}",
    LONG + "{{ a.upper().lower().upper().lower() }}",
    LONG + "{{ a | list | length }}",
    LONG + "{{ a | title }}",
    LONG + "{{ ('' | safe).join(['&' * 9999] | map('string')) }}",
    LONG + "{{ a.split('b') | length }}",
    LONG + "{{ (a * 2) | escape }}",
    LONG + "{{ ('<' | safe) + '<' * 40000 }}",
    LONG + "{{ (', ' * 300).join((messages * 300) | map('string')) }}",
    LONG + "{{ a.join(['', '', '', '', '']) }}",
    LONG + "{{ [1] * 20000 }}",
    LONG + "{{ [a, a, a] | tojson }}",
    LONG + "{{ {'b': [a, a, a]} | string }}",
    LONG + "{{ {'b': [a, a, a]}.items() }}",
    LONG + "{{ namespace(b=[a, a, a])['b'] }}",
    LONG + "{{ '%s%s%s%s' % (a, a, a, a) }}",
    LONG + "{{ '{0}{0}{0}{0}'.format(a) }}",
    LONG + "{{ '{0!r}'.format('\\x00' * 20000) }}",
    LONG + "{{ ('{0:999}' * 99).format(1) }}",
    LONG + "{{ ('%999d' * 99) | format(*range(99)) }}",
    LONG + "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = [ns.l, a ~ i] %}{% endfor %}",
    LONG + "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = [ns.l, a[i:]] %}{% endfor %}",
    LONG + "{% macro m() %}{% for i in range(99) %}{{ a ~ i }}{% endfor %}{% endmacro %}{% set b = m() %}",
    LONG + "{% for i in range(99) %}{{ a }}{% endfor %}",
    LONG + "{% for c in a %}" + "x" * 99 + "{% endfor %}",
    LINES + "{{ a | indent(65536) }}",
    LINES + "{{ a | indent(a[:50], true, true) }}",
    LINES + "{{ a.splitlines() }}",
    LINES + "{{ a.center(70000) }}",
    LINES + "{{ a | center(70000) }}",
    "{{ [[[[1] * 9] * 9] * 9] | tojson(indent=99) }}",
    "{{ ([1] * 999) | tojson(separators=[',' * 99, ':']) }}",
    "{{ range(9) | slice(9999) | list }}",
    "{{ range(9) | batch(9999, 0) | list }}",
    "{{ range(9999) | batch(1) | list | length }}",
    "{{ range(9999) | map('string') | list | length }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, {}] %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{{ loop.length }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set b = (1, 2, 3, 4, 5, 6, 7, 8) %}{% endfor %}",
    DOUBLED.replace("LEVELS", "16") + "{{ ns.a }}",
    DOUBLED.replace("LEVELS", "16") + "{{ ns.a | tojson }}",
    DOUBLED.replace("LEVELS", "16") + "{{ ns.a ~ '' }}",
    DOUBLED.replace("LEVELS", "16") + "{{ raise_exception(ns.a) }}",
]
UNKNOWN = [
    ("{{ 'a'.encode() * 10 ** 10 }}", "unsafe"),
    ("{{ (1).to_bytes(99, 'big') }}", "unsafe"),
    ("{{ 'a'.translate({97: 'b'}) }}", "unsafe"),
    ("{{ 'a\\t'.expandtabs(65536) }}", "unsafe"),
    ("{{ {}.fromkeys('a') }}", "unsafe"),
    ("{{ ({'a': 1}.keys() - {}) | list }}", "may not make sets"),
    ("{{ 'a' | pprint }}", "No filter named 'pprint'"),
    ("{% if messages is filter %}{% autoescape true %}{% endautoescape %}{% endif %}", "autoescape is not allowed"),
    ("{{ strftime_now('%A' * 999) }}", "it writes the time by a format"),
    ("{{ ('9' * 9999) | int }}", "it reads a number"),
    ("{{ 'a' * 999999 }}" + " " * 999999, "it has more than 262,144 letters"),
]
SLOW = [
    DOUBLED.replace("LEVELS", "24") + "{{ ns.a == ns.b }}",
    DOUBLED.replace("LEVELS", "24") + "{{ ns.a < ns.b }}",
    DOUBLED.replace("LEVELS", "24") + "{{ ns.a in [ns.b] }}",
    DOUBLED.replace("LEVELS", "24") + "{{ [ns.a] | select('in', [ns.b]) | list }}",
    DOUBLED.replace("LEVELS", "24") + "{{ ns.a is eq ns.b }}",
    DOUBLED.replace("LEVELS", "24") + "{{ [ns.b].index(ns.a) }}",
    DOUBLED.replace("LEVELS", "24") + "{{ [ns.a, ns.b] | sort | length }}",
    DOUBLED.replace("LEVELS", "24") + "{{ [[ns.a], [ns.b]] | max(attribute=0) | length }}",
    DOUBLED.replace("LEVELS", "24") + "{% for i in [ns.a, ns.b] %}{{ loop.changed(i) }}{% endfor %}",
    DOUBLED.replace("LEVELS", "24") + "{{ messages[ns.a].x }}",
    DOUBLED.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("LEVELS", "24") + "{{ messages[0][ns.a] }}",
    DOUBLED.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("LEVELS", "24") + "{{ {(0, ns.a): 1} }}",
    DOUBLED.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("LEVELS", "24") + "{{ messages[0].get((0, ns.a)) }}",
    "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
    "{{ dict(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | batch(2)) | length }}",
    "{{ ('a' * 10 ** 8).count('a' * 40 ~ 'b' ~ 'a' * 40) }}",
    "{{ ('a' * 10 ** 6).rfind('ab' ~ 'a' * 10 ** 5) }}",
    "{{ ('ab' * 10 ** 6).strip('c' * 10 ** 6 ~ 'ab') | length }}",
]


def render(template, **options):
    return ChatTemplates({}, {}).render([USER], template=template, **options)


@pytest.mark.parametrize("template", LARGE)
def test_what_is_large_is_not_made(template, monkeypatch):
    monkeypatch.setattr(allowance, "LARGEST", 1 << 16)
    render("{{ messages }}")

    def refused():
        with pytest.raises(InputError, match="makes texts and lists of more than 65,536 letters and items") as caught:
            render(template)
        assert caught.value.code == "template_limit"

    assert most_bytes(refused) < 2 << 20


@pytest.mark.parametrize("template", SLOW)
def test_what_takes_long_is_not_begun(template, monkeypatch):
    looks = count()
    monkeypatch.setattr(allowance, "time", SimpleNamespace(thread_time=lambda: next(looks) * 1e-3))
    with pytest.raises(InputError, match=r"it (ran|would run) for more than 0\.05 s"):
        render(template, template_seconds=0.05)


def test_a_long_text_in_many_places_is_looked_at_once():
    looked = []

    class Text(str):
        def isprintable(self):
            looked.append(len(self))
            return super().isprintable()

    with allowed(10):
        assert size_of([Text("a" * 100_000)] * 999) >= 99_900_000
    assert sum(looked) <= 100_000


@pytest.mark.parametrize("template", ["{{ 1.5 | round(1500000, 'ceil') }}", "{{ 15 | round(-1500000) }}"])
def test_rounding(template):
    with pytest.raises(InputError, match="it rounds to more than 300 digits"):
        render(template)
    assert render("{{ 2.555 | round(2) }} {{ 1234 | round(-2, 'floor') }}") == "2.56 1200.0"


@pytest.mark.parametrize(("template", "what"), UNKNOWN)
def test_what_is_not_listed_is_refused(template, what):
    with pytest.raises(InputError, match=what) as caught:
        render(template)
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize("end", ["{{ ns.t == ns.t }}", "{{ messages[0][ns.t] }}", "{{ {ns.t: 1} }}", "{{ ns.t }}"])
def test_what_is_nested_deep(end):
    """Python's hash of a tuple goes as deep as it is, past the end of the stack."""
    deep = "{% set ns = namespace(t=()) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}"
    with pytest.raises(InputError, match="it nests lists more than 400 deep"):
        render(deep + end)


VALUES = ["", "aé\x00\U0001f600'\"\\", 5, 10**1000, -1.5e-300, None, True, [], {}, (), [1, [2, ["x" * 50]]], (1,)]
VALUES += [{"a": {"b": [None, "ü"]}, "c\n": 1e300}, {"a": 1}.items(), {"a": "\ud800"}.values()]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_sizes_are_never_below_the_texts(value):
    with allowed(5):
        assert size_of(value) >= len(str(value))
        assert size_of([value]) >= len(str([value]))
        if not isinstance(value, (type({}.items()), type({}.values()))):
            assert size_of([value]) >= len(json.dumps([value]))
            assert size_of([[value]], 2, 3) >= len(json.dumps([[value]], indent=3, separators=(",", ": ")))
