"""Imports what adds to prefold's tables, in every process that loads models: its own rooms, and modules of a user's.

A room is a feature that most users never meet: a package whose module `attach` enters it in the tables of the core,
which names it nowhere else. Modules of a user's own add, for instance, model families. PREFOLD_PLUGINS lists them, each
the path of a .py file or the name of a module, with the separator of PATH. Processes that a process starts have its
environment, so that one option of the command line is enough for all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from typing import Any

from . import environment
from .errors import CheckpointError

ROOMS = ("experts", "hf", "hybrid", "images", "looped", "shifted")
# What `prefold verify --reuse NAME` measures, by its name: a package whose module `options` has the options of the
# command line and their `names`, and whose `verify` runs it. Help is printed without what a room imports, so the table
# is here.
MEASUREMENTS = {"shifted": "prefold.shifted"}
_loaded: set[str] = set()
_lock = RLock()  # a plugin may load a model itself


def add_plugins(names: Sequence[str]) -> None:
    """Makes these plugins, too, those of this process and of those it starts, and imports them."""
    added = [os.path.abspath(name) if name.endswith(".py") else name for name in names]
    environment.add_plugins(added)
    load_plugins()


def load_plugins() -> None:
    """Imports the rooms, and the plugins of this process that it has not imported. Raises CheckpointError, naming the
    plugin."""
    with _lock:
        for room in ROOMS:
            import_module(f".{room}.attach", __package__)
        for name in environment.plugins():
            if name not in _loaded and name.endswith(".py") and not os.path.isfile(name):
                raise CheckpointError(f"there is no plugin {name} (--plugin or {environment.PLUGINS}); check the path")
            if name not in _loaded:
                _loaded.add(name)
                try:
                    _import(name)
                except Exception as error:
                    _loaded.discard(name)
                    message = f"the plugin {name} (--plugin or {environment.PLUGINS}) cannot be imported"
                    raise CheckpointError(f"{message}: {type(error).__name__}: {error}") from error


def named_class(name: str) -> Any:
    """Returns the class that a table names as "module:Class", which is imported now."""
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)


def _import(name: str) -> None:
    if not name.endswith(".py"):
        import_module(name)
        return
    spec = spec_from_file_location(f"prefold_plugin_{Path(name).stem}", name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
