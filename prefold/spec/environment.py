"""The environment variables of prefold. Only this file reads them.

PREFOLD_CACHE         folder for the built-in model and compiled kernels (default: ~/.cache/prefold)
PREFOLD_KERNELS       0: run or install without compiled kernels; native: compile them even if the wheel has kernels
PREFOLD_COMPILER      zig: compile the kernels with the package ziglang; an installation then fetches the package
PREFOLD_ISA           instruction set of the kernels, a name in `kernels.compile.VARIANTS`
PREFOLD_TRITON        0: do not use Triton kernels on a GPU
PREFOLD_TRANSFORMERS  all: run every model through the modules of transformers
PREFOLD_PLUGINS       modules and .py files to import, separated as in PATH; `--plugin` adds to it
PREFOLD_API_KEY       API key that is sent to servers (`--url`)
PREFOLD_SERVE_OPTION  an option of `prefold serve`, such as PREFOLD_SERVE_MAX_BODY_BYTES for --max-body-bytes
PREFOLD_WHEEL         1, at installation: compile the kernels for every CPU of this architecture, not only for this CPU
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

TRANSFORMERS, PLUGINS, API_KEY = "PREFOLD_TRANSFORMERS", "PREFOLD_PLUGINS", "PREFOLD_API_KEY"
SERVE = "PREFOLD_SERVE_"


def cache_folder() -> Path:
    """Return the folder for compiled kernels and downloads."""
    return Path(os.environ.get("PREFOLD_CACHE") or "~/.cache/prefold").expanduser()


def kernels() -> str:
    """Return PREFOLD_KERNELS (default: "1")."""
    return os.environ.get("PREFOLD_KERNELS", "1")


def compiler() -> str | None:
    """Return PREFOLD_COMPILER, or None if it is unset or empty."""
    return os.environ.get("PREFOLD_COMPILER") or None


def makes_wheel() -> bool:
    """Return whether an installation compiles the kernels for every CPU of this architecture."""
    return os.environ.get("PREFOLD_WHEEL") == "1"


def instruction_set() -> str | None:
    """Return PREFOLD_ISA, or None if it is unset or empty."""
    return os.environ.get("PREFOLD_ISA") or None


def allows_triton() -> bool:
    """Return whether Triton kernels may run."""
    return os.environ.get("PREFOLD_TRITON") != "0"


def wants_transformers() -> bool:
    """Return whether every model must run through the modules of transformers."""
    return os.environ.get(TRANSFORMERS) == "all"


def plugins() -> list[str]:
    """Return the plugins of this process and of the processes that it starts."""
    return [name for name in os.environ.get(PLUGINS, "").split(os.pathsep) if name]


def add_plugins(names: Sequence[str]) -> None:
    """Add plugins to this process and to the processes that it starts from now on."""
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys((*plugins(), *names)))


def api_key() -> str:
    """Return the API key for servers, or ""."""
    return os.environ.get(API_KEY, "")


def server_variable(option: str) -> str:
    """Return the variable of an option of `prefold serve`: PREFOLD_SERVE_DATA_DIR for "data-dir"."""
    return SERVE + option.replace("-", "_").upper()


def server_settings() -> dict[str, str]:
    """Return {option: value} of the variables PREFOLD_SERVE_*. A variable with an empty value counts as not set."""
    names = {name: name.removeprefix(SERVE).lower().replace("_", "-") for name in os.environ if name.startswith(SERVE)}
    return {option: os.environ[name] for name, option in names.items() if os.environ[name]}
