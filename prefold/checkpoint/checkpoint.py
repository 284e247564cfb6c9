"""Resolve a model's name to a Checkpoint: a set of files and a config. Loads no weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..spec.fields import near
from ..spec.plugins import load_plugins
from .builtin import BUILT_IN, fetch
from .gguf import GGUFFile
from .gguf_config import config_from_gguf
from .keys import check_keys
from .settings import CONTEXT, Settings

# {name: config of a well-known model, in the format of Hugging Face}, for random weights (`--load-format dummy`).
# examples/looped_model.py trains a model of the size of "looped-2x4".
GEOMETRIES: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("geometries.json").read_text())
# By architecture of a tower's GGUF file: creates the config of the model with a tower from the text model's config and
# the tower's file. Features add entries.
TOWERS: dict[str, Callable[[Settings, GGUFFile], Settings]] = {}
# {(key of a config.json that describes no model, its value): folder beside it with the model's config.json and
# weights}. Features add entries.
BACKBONES: dict[tuple[str, str], str] = {}
SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
# Some repositories store second copies of their weights in these places.
COPIES = ["original/*", "onnx/*", "openvino/*", "coreml/*", "consolidated*.safetensors"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """The files and the config of a model, without its weights.

    Attributes:
        name: The name as the user gave it.
        path: The folder or .gguf file; None for random weights without files.
        format: "folder" (Hugging Face, safetensors), "gguf", or "dummy" (random weights).
        config: The keys of Hugging Face's config.json; GGUF metadata is translated to them.
        mmproj: The GGUF file of the tower that belongs to a GGUF file, or None.
        inner: The folder in `path` with config and weights; "" for `path` itself.

    Example:
        llm = LLM(Checkpoint.dummy(config))  # a model with random weights
    """

    name: str
    path: Path | None
    format: Literal["folder", "gguf", "dummy"]
    config: dict[str, Any] = field(repr=False)
    mmproj: GGUFFile | None = field(default=None, repr=False)
    inner: str = field(default="", repr=False)

    @classmethod
    def dummy(cls, config: dict[str, Any], *, name: str = "dummy", path: Path | None = None) -> Checkpoint:
        """Return a checkpoint with random weights.

        Args:
            config: Keys of config.json, which determine the shapes.
            name: The name of the checkpoint.
            path: A folder or .gguf file for the tokenizer; None for a model without one.
        """
        return cls(name, path, "dummy", Settings.of(config))

    def within(self, context_length: int | None) -> Checkpoint:
        """Return the checkpoint with another limit on the tokens of a sequence.

        Args:
            context_length: The limit; None for the model's own.
        """
        if context_length is None:
            return self
        limited = replace(self, config=Settings.of(self.config) | {CONTEXT: context_length})
        if "gguf" in self.__dict__:  # keep the file that is read already
            limited.__dict__["gguf"] = self.gguf
        return limited

    def file(self, name: str) -> Path | None:
        """Return the path of the file `name` in the checkpoint's folder, or None if it does not exist."""
        if self.path is None or not self.path.is_dir():
            return None
        path = self.path / name
        return path if path.is_file() else None

    def weights(self, name: str) -> Path | None:
        """Return the path of the file `name` in the folder with the weights, or None if it does not exist."""
        return self.file(str(Path(self.inner, name)))

    def folder(self, name: str, file: str) -> Path:
        """Return the path of a folder inside the checkpoint's folder.

        Args:
            name: The folder's name.
            file: The checkpoint's file that names the folder, for errors.

        Raises:
            CheckpointError: The folder does not exist, or is not inside the checkpoint's folder.
        """
        whole = Path() if self.path is None else self.path
        path = whole / name
        if not path.resolve().is_relative_to(whole.resolve()) or path.resolve() == whole.resolve():
            raise CheckpointError(
                f"{file} of {self.name} names the folder {name!r}, which is not inside the model's folder"
            )
        if not path.is_dir():
            raise CheckpointError(f"{file} of {self.name} names the folder {name!r}, which does not exist in {whole}")
        return path

    def read_json(self, name: str) -> dict[str, Any] | list[Any] | None:
        """Return the content of the JSON file `name` in the checkpoint's folder, or None if it does not exist.

        Raises:
            CheckpointError: The file cannot be read, or is not JSON.
        """
        path = self.file(name)
        return None if path is None else read_json(path)

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The checkpoint's GGUF file, or the GGUF file with the shapes of random weights; None for a folder."""
        return GGUFFile(self.path) if self.path is not None and self.path.is_file() else None

    def metadata(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the GGUF metadata; `default` if the key or the GGUF file does not exist."""
        return default if self.gguf is None else self.gguf.metadata.get(key, default)


def read_object(checkpoint: Checkpoint, name: str, *, keys: str | None = None) -> dict[str, Any]:
    """Return the object in the JSON file `name` of the checkpoint's folder; {} if the file does not exist.

    `keys` selects the table in `KEYS` with the keys to refuse: None for the file's name, "" to refuse none. Raise
    CheckpointError if the file does not contain an object, and UnsupportedModelError for a refused key.
    """
    value = checkpoint.read_json(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} of {checkpoint.name} contains a {type(value).__name__}, not an object")
    check_keys(name if keys is None else keys, value or {}, f"{name} of {checkpoint.name}")
    return value or {}


def served_name(name: str) -> str:
    """Return the name under which a model is served: the last part of a local path, or the unchanged name."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def resolve(
    name: str,
    *,
    revision: str | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    weights: bool = True,
    mmproj: str | None = None,
    context_length: int | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """Return the checkpoint called `name`: a local folder, a .gguf file, a built-in name, or a hub id, in this order.

    Args:
        name: The model's name.
        revision: Branch, tag or commit of a hub id.
        load_format: "dummy" for random weights. `name` may then also be one of GEOMETRIES, and a folder needs only its
            config.json.
        weights: If False, download only the small files (config, tokenizer) of a hub id.
        mmproj: The GGUF file of the tower that belongs to a GGUF file. Not needed if a folder contains only these two
            files and `name` is the folder.
        context_length: Limit on the tokens of a sequence; None for the model's own.
        notify: Called with one line before a download.

    Raises:
        CheckpointError: The model was not found; the message says where prefold looked.
    """
    return _resolve(name, revision, load_format, weights, mmproj, notify).within(context_length)


def _resolve(
    name: str, revision: str | None, load_format: str, weights: bool, mmproj: str | None, notify: Callable[[str], None]
) -> Checkpoint:
    """Return the result of `resolve` with the model's own context length."""
    if load_format not in ("auto", "dummy"):
        raise CheckpointError(f"load_format (--load-format) is {load_format!r}; it must be 'auto' or 'dummy'")
    if not name:
        raise CheckpointError(
            "the model's name is empty; give a local folder, a .gguf file, a built-in name or a hub id"
        )
    dummy = load_format == "dummy"
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(
                f"{name} is a local path, and revision {revision!r} is for hub ids; leave revision out"
            )
        checkpoint = _local(name, path)
    elif dummy and name in GEOMETRIES:
        return Checkpoint.dummy(GEOMETRIES[name], name=name)
    elif name in BUILT_IN:
        checkpoint = _local(name, fetch(BUILT_IN[name], notify))
    elif HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not name.startswith("."):
        checkpoint = _local(name, _from_hub(name, revision, weights and not dummy))
    else:
        names = sorted({*BUILT_IN, *GEOMETRIES} if dummy else BUILT_IN)
        raise CheckpointError(
            f"there is no model {name!r}: no such folder or .gguf file, not a built-in name ({', '.join(names)}), "
            f"and not a hub id (owner/name); {near(name, names)}".rstrip("; ")
        )
    if mmproj is not None:
        tower = Path(mmproj).expanduser()
        if not tower.is_file():
            raise CheckpointError(f"mmproj (--mmproj) is {mmproj}; there is no such file")
        checkpoint = _with_tower(checkpoint, GGUFFile(tower))
    return Checkpoint.dummy(checkpoint.config, name=name, path=checkpoint.path) if dummy else checkpoint


def _local(name: str, path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix == ".gguf":
            file = GGUFFile(path)
            checkpoint = Checkpoint(name, path, "gguf", config_from_gguf(file))
            checkpoint.__dict__["gguf"] = file  # fills the cached property: the file is read already
            return checkpoint
        raise CheckpointError(f"{path} is not a .gguf file; give the folder of a Hugging Face checkpoint")
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        if not isinstance(config, dict):
            raise CheckpointError(f"{path / 'config.json'} is not a JSON object")
        load_plugins()
        inner = next((folder for (key, value), folder in BACKBONES.items() if config.get(key) == value), "")
        place = path / inner / "config.json"
        if inner:
            config = read_json(place) if place.is_file() else None
            if not isinstance(config, dict):
                raise CheckpointError(f"{path} needs {inner}/config.json with the model's config as an object")
        return Checkpoint(name, path, "folder", Settings(config, str(place)), inner=inner)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _local(name, files[0])
    if len(files) == 2:
        towers = [tower for file in files if (tower := _tower_in(file)) is not None]
        if len(towers) == 1:
            (model,) = {*files} - {towers[0].path}
            return _with_tower(_local(name, model), towers[0])
    if files:
        raise CheckpointError(f"{path} contains {len(files)} .gguf files; name one: {', '.join(f.name for f in files)}")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(_of_adapter(path))
    raise CheckpointError(f"{path} contains neither a config.json nor a .gguf file")


def _tower_in(path: Path) -> GGUFFile | None:
    """Return the GGUF file if it contains a tower, else None."""
    try:
        file = GGUFFile(path)
    except CheckpointError:
        return None
    return None if _joining(file) is None else file


def _joining(file: GGUFFile) -> Callable[[Settings, GGUFFile], Settings] | None:
    """Return the entry of TOWERS for a GGUF file; None if the file contains no tower."""
    load_plugins()
    return TOWERS.get(str(file.metadata.get("general.architecture")))


def _with_tower(checkpoint: Checkpoint, tower: GGUFFile) -> Checkpoint:
    """Return the checkpoint of a GGUF file with its tower. Raise CheckpointError if they do not fit."""
    if checkpoint.gguf is None:
        raise CheckpointError(
            f"mmproj (--mmproj) is for GGUF files; {checkpoint.name} is a folder, which contains its tower"
        )
    join = _joining(tower)
    if join is None:
        kind, names = tower.metadata.get("general.architecture"), " or ".join(map(repr, TOWERS))
        raise CheckpointError(f"{tower.path} is not a tower: its architecture is {kind!r}, not {names}")
    joined = replace(checkpoint, config=join(Settings.of(checkpoint.config), tower), mmproj=tower)
    joined.__dict__["gguf"] = checkpoint.gguf
    return joined


def _of_adapter(path: Path) -> str:
    """Return the error message for the folder of a LoRA adapter given instead of a model."""
    settings = read_json(path / "adapter_config.json")
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    model = base if isinstance(base, str) and base else "MODEL"
    return (
        f"{path} is a LoRA adapter, not a model; give its base model and the adapter: "
        f'LLM("{model}", adapters={{"NAME": "{path}"}}) and adapter="NAME" (-m {model} --adapter NAME={path})'
    )


def read_json(path: Path) -> Any:
    """Return the content of a checkpoint's JSON file. Raise CheckpointError, naming the file, if it cannot be read.

    As in transformers 5, a number that JSON cannot represent is an object: {"__float__": "Infinity"}.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_tagged)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _tagged(value: dict[str, Any]) -> Any:
    """Return the number that an object represents, or the object."""
    tag = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tag, value) if isinstance(tag, str) else value


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a hub repository, from the hub, or from the local cache if the hub does not answer."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = SMALL_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=COPIES))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"cannot reach the Hugging Face hub for {name!r}, and it is not in the local cache; check the "
            f"connection, or give a local folder, a .gguf file or a built-in name ({', '.join(BUILT_IN)})"
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = "; it may be private or gated: log in with `hf auth login`" if status in (401, 403) else ""
        raise CheckpointError(f"the Hugging Face hub refused {name!r} (status {status}){hint}: {error}") from error
    except (HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot fetch {name!r} from the Hugging Face hub: {error}") from error
