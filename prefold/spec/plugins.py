"""Import prefold's features and the user's plugins, in every process that loads models.

The module `attach` of a feature registers it in the tables of the core. The core names features nowhere else. A plugin
is a module of the user, with a model family for example. PREFOLD_PLUGINS lists the plugins, separated as in PATH; each
is the path of a .py file or the name of a module. Child processes inherit the variable, so one `--plugin` is enough for
all of them.
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
# {NAME of `prefold verify --reuse NAME`: package}. The package's module `options` has the command-line options and
# their `names`; its module `verify` runs the measurement. The table is here so that --help need not import the feature.
MEASUREMENTS = {"shifted": "prefold.features.shifted"}
loaded: set[str] = set()  # plugins that this process has imported
_lock = RLock()  # a plugin may load a model itself


def add_plugins(names: Sequence[str]) -> None:
    """Add plugins to this process and to the processes that it starts, and import them."""
    added = [os.path.abspath(name) if name.endswith(".py") else name for name in names]
    environment.add_plugins(added)
    load_plugins()


def load_plugins() -> None:
    """Import the features, and the plugins that this process has not imported yet.

    Raises:
        CheckpointError: A plugin cannot be imported. The message names it.
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
    """Import and return the class "module:Class"."""
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
