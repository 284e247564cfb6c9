"""Import what adds to prefold's tables, in every process that loads models: prefold's own features, and plugins.

The module `attach` of a feature enters it in the tables of the core, and the core names it nowhere else. A plugin is a
module of the user, for instance with a model family. PREFOLD_PLUGINS lists the plugins, each the path of a .py file or
the name of a module, with the separator of PATH. Processes that a process starts have its environment, so that one
option of the command line is enough for all of them.
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

from ..errors import CheckpointError
from . import environment

FEATURES = ("heads", "hf", "hybrid", "images", "layerwise", "looped", "shifted")
# {NAME of `prefold verify --reuse NAME`: a package whose module `options` has the options of the command line and their
# `names`, and whose module `verify` runs it}. Help is printed without importing a feature, so the table is here.
MEASUREMENTS = {"shifted": "prefold.features.shifted"}
loaded: set[str] = set()
_lock = RLock()  # a plugin may load a model itself


def add_plugins(names: Sequence[str]) -> None:
    """Add these plugins to those of this process and of the processes it starts, and import them."""
    added = [os.path.abspath(name) if name.endswith(".py") else name for name in names]
    environment.add_plugins(added)
    load_plugins()


def load_plugins() -> None:
    """Import the features, and the plugins of this process that are not imported yet.

    Raises:
        CheckpointError: a plugin cannot be imported; the message names it.
    """
    with _lock:
        for feature in FEATURES:
            import_module(f"prefold.features.{feature}.attach")
        for name in environment.plugins():
            if name not in loaded and name.endswith(".py") and not os.path.isfile(name):
                raise CheckpointError(f"there is no plugin {name} (--plugin or {environment.PLUGINS}); check the path")
            if name not in loaded:
                loaded.add(name)
                try:
                    _import(name)
                except Exception as error:
                    loaded.discard(name)
                    message = f"the plugin {name} (--plugin or {environment.PLUGINS}) cannot be imported"
                    raise CheckpointError(f"{message}: {type(error).__name__}: {error}") from error


def named_class(name: str) -> Any:
    """Import and return the class that a table names as "module:Class"."""
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
