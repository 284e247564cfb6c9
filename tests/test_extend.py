"""The page of extension points: each one is listed, registers, and imports nothing before it is called."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

from prefold import extend
from prefold.cluster import backends
from prefold.model import program


def test_each_function_is_listed_with_a_signature_and_its_arguments():
    listed = re.findall(r"^    (register_\w+)", extend.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted(extend.__all__)
    for name in extend.__all__:
        function = getattr(extend, name)
        page = inspect.getdoc(function)
        assert "\nExample:\n    >>> " in page
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty and f"\n    {parameter.name}: " in page


def test_a_plugin_that_imports_the_page_imports_nothing_else():
    code = "import sys, prefold.extend; sys.exit(bool({'torch', 'numpy', 'click'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_backend_is_registered(keep):
    keep(backends.BACKENDS)
    own = backends.Backend()
    extend.register_backend("mine", own)
    assert backends.backend_named("mine") is own and "mine" in backends.backend_names()


def test_an_operation_is_registered(keep):
    keep(program.ADDED)

    class Own(program.Operation):
        pass

    def function(operation, weights, rows):
        pass

    extend.register_operation(Own, function)
    assert program.ADDED[Own] is function


def test_a_head_is_registered(keep):
    from prefold.tasks.readers import HEADS

    keep(HEADS)
    extend.register_head("own.json", own := lambda checkpoint: None)
    assert HEADS["own.json"] is own


def test_a_ranker_is_registered(keep):
    from prefold.tasks.listwise import RANKERS

    keep(RANKERS)
    extend.register_ranker("own.json", own := lambda checkpoint: None)
    assert RANKERS["own.json"] is own
