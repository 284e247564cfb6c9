"""Chat templates in Jinja's sandbox: what they may do, and that whatever they raise is an InputError."""

from __future__ import annotations

import pytest

from prefold.errors import InputError
from prefold.text import ChatTemplates
from prefold.text.sandbox import compile_template

USER = {"role": "user", "content": "hi"}
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
    ("{{ missing(99) }}", "undefined"),
    ("{{ 'a' * 10 ** 18 }}", "it needs more memory than there is"),
    ("{{ namespace(__call__=1) }}", "may not do: .*__call__"),
    ("{{ dict.update(messages[0], role='x') }}", "no attribute 'update'"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
]


def render(template, **options):
    return ChatTemplates({}, {}).render([USER], template=template, **options)


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
        "{{ loop(x) if x is not number }}{% endfor %}{{ dict(a=1) }}{{ dict.fromkeys('b') }}"
        "{% for i in [3, 1, 2] if i > 1 %}{{ i }}{% else %}-{% endfor %}"
    )
    assert made == "abababx-00042   71024a51[1, 2, 3]a1ba--b31True11False12{'a': 1}{'b': None}32"


def test_what_a_template_looks_up():
    _, names = compile_template(
        "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ messages[0].x }}{# documents #}"
    )
    assert names == {"custom_tools", "tools", "messages"}
