"""The environment variables that prefold reads. No other file reads one of them.

PREFOLD_CACHE         folder for the built-in model and compiled kernels (default: ~/.cache/prefold)
PREFOLD_KERNELS       0: run, or install, without compiled kernels; native: compile them even if a wheel holds some
PREFOLD_COMPILER      zig: compile the kernels by the package ziglang, and at installation fetch it for that
PREFOLD_ISA           the instruction set of the kernels, a name in `kernels.compile.VARIANTS`
PREFOLD_TRITON        0: run without Triton's kernels on a GPU
PREFOLD_TRANSFORMERS  all: run every model through the modules of transformers
PREFOLD_PLUGINS       modules and .py files to import, with the separator of PATH; `--plugin` adds to it
PREFOLD_API_KEY       the key that is sent to servers (`--url`)
PREFOLD_SERVE_OPTION  an option of `prefold serve`, such as PREFOLD_SERVE_MAX_BODY_BYTES for --max-body-bytes
PREFOLD_WHEEL         1, when prefold is installed: compile the kernels for every CPU of this kind, not for this one
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TRANSFORMERS, PLUGINS, API_KEY = "PREFOLD_TRANSFORMERS", "PREFOLD_PLUGINS", "PREFOLD_API_KEY"
SERVE = "PREFOLD_SERVE_"


def cache_folder() -> Path:
    """Return the folder in which prefold keeps what it made or downloaded."""
    return Path(os.environ.get("PREFOLD_CACHE") or "~/.cache/prefold").expanduser()


def kernels() -> str:
    """Return the value of PREFOLD_KERNELS; "1" if it is not set."""
    return os.environ.get("PREFOLD_KERNELS", "1")


def compiler() -> str | None:
    """Return the value of PREFOLD_COMPILER; None if it is not set or empty."""
    return os.environ.get("PREFOLD_COMPILER") or None


def makes_wheel() -> bool:
    """Return whether an installation compiles the kernels for every CPU of this kind."""
    return os.environ.get("PREFOLD_WHEEL") == "1"


def instruction_set() -> str | None:
    """Return the value of PREFOLD_ISA; None if it is not set or empty."""
    return os.environ.get("PREFOLD_ISA") or None


def allows_triton() -> bool:
    """Return whether Triton's kernels may run."""
    return os.environ.get("PREFOLD_TRITON") != "0"


def wants_transformers() -> bool:
    """Return whether every model runs through the modules of transformers."""
    return os.environ.get(TRANSFORMERS) == "all"


def plugins() -> list[str]:
    """Return the plugins of this process, and of the processes that it starts."""
    return [name for name in os.environ.get(PLUGINS, "").split(os.pathsep) if name]


def add_plugins(names: Sequence[str]) -> None:
    """Make these plugins of this process, and of the processes that it starts from now on."""
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys((*plugins(), *names)))


def api_key() -> str:
    """Return the key that is sent to servers; "" without one."""
    return os.environ.get(API_KEY, "")


def server_variable(option: str) -> str:
    """Return the variable of an option of `prefold serve`: PREFOLD_SERVE_DATA_DIR for "data-dir"."""
    return SERVE + option.replace("-", "_").upper()


def server_settings() -> dict[str, str]:
    """Return {option: value} of the variables PREFOLD_SERVE_*. A variable with an empty value counts as not set."""
    names = {name: name.removeprefix(SERVE).lower().replace("_", "-") for name in os.environ if name.startswith(SERVE)}
    return {option: os.environ[name] for name, option in names.items() if os.environ[name]}
