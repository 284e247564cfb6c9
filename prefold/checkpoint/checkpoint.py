"""A model's name becomes a Checkpoint: a set of files and a config. No weights are loaded here."""

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

# {name: the config of a well-known model, as Hugging Face writes it}, for random weights (`--load-format dummy`).
# A model of the size of "looped-2x4" is trained by examples/looped_model.py.
GEOMETRIES: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("geometries.json").read_text())
# Makes the config of a model that has a tower of the text model's and the tower's GGUF file, by the architecture that
# this file names. Features enter theirs.
TOWERS: dict[str, Callable[[Settings, GGUFFile], Settings]] = {}
# {(a key of a config.json that is not a model's, its value): the folder beside it that holds the model's config.json
# and weights}. Features enter theirs.
BACKBONES: dict[tuple[str, str], str] = {}
SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
# Some repositories keep second copies of their weights here.
COPIES = ["original/*", "onnx/*", "openvino/*", "coreml/*", "consolidated*.safetensors"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """A Checkpoint is a model's files and its config.

    name    the name as the user gave it
    path    the folder or .gguf file; None for random weights without files
    format  "folder" (Hugging Face, safetensors), "gguf", or "dummy" (random weights)
    config  the keys of Hugging Face's config.json; GGUF metadata is translated to them
    mmproj  the GGUF file of the tower that belongs to a GGUF file; None: there is none
    inner   the folder in `path` that holds config and weights; "": they are in `path`
    """

    name: str
    path: Path | None
    format: Literal["folder", "gguf", "dummy"]
    config: dict[str, Any] = field(repr=False)
    mmproj: GGUFFile | None = field(default=None, repr=False)
    inner: str = field(default="", repr=False)

    @classmethod
    def dummy(cls, config: dict[str, Any], *, name: str = "dummy", path: Path | None = None) -> Checkpoint:
        """Returns a checkpoint of random weights, in the shapes that `config` (keys of config.json) gives."""
        return cls(name, path, "dummy", Settings.of(config))

    def within(self, context_length: int | None) -> Checkpoint:
        """Returns the checkpoint of a model whose longest sequence has so many tokens; None: as it was made for."""
        if context_length is None:
            return self
        limited = replace(self, config=Settings.of(self.config) | {CONTEXT: context_length})
        if "gguf" in self.__dict__:  # it is read already
            limited.__dict__["gguf"] = self.gguf
        return limited

    def file(self, name: str) -> Path | None:
        """Returns the path of the file `name` in the checkpoint's folder, or None where there is none."""
        if self.path is None or not self.path.is_dir():
            return None
        path = self.path / name
        return path if path.is_file() else None

    def weights(self, name: str) -> Path | None:
        """Return the path of the file `name` where the weights are, or None if there is none."""
        return self.file(str(Path(self.inner, name)))

    def folder(self, name: str, file: str) -> Path:
        """Return the path of a folder in the checkpoint's folder, which the checkpoint's file `file` names.

        Raise CheckpointError if there is no such folder, or if it lies elsewhere.
        """
        whole = Path() if self.path is None else self.path
        path = whole / name
        if not path.resolve().is_relative_to(whole.resolve()) or path.resolve() == whole.resolve():
            raise CheckpointError(
                f"{file} of {self.name} names the folder {name!r}, which is not inside of the model's"
            )
        if not path.is_dir():
            raise CheckpointError(f"{file} of {self.name} names the folder {name!r}, and there is none in {whole}")
        return path

    def read_json(self, name: str) -> dict[str, Any] | list[Any] | None:
        """Returns the content of the JSON file `name` in the checkpoint's folder, or None where there is none.

        Raises CheckpointError for a file that cannot be read, or is not JSON.
        """
        path = self.file(name)
        return None if path is None else read_json(path)

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """Returns the GGUF file that the checkpoint is, or that random weights take their shapes from; else None."""
        return GGUFFile(self.path) if self.path is not None and self.path.is_file() else None

    def metadata(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key of the GGUF metadata, or `default` where there is no such key or no GGUF file."""
        return default if self.gguf is None else self.gguf.metadata.get(key, default)


def read_object(checkpoint: Checkpoint, name: str, *, keys: str | None = None) -> dict[str, Any]:
    """Returns the object in the JSON file `name` of the checkpoint's folder; {} where there is no such file.

    keys: the name in `KEYS` with the keys to refuse; None: the file's name; "": refuse none. Raises CheckpointError
    where the file holds anything else, UnsupportedModelError for a refused key.
    """
    value = checkpoint.read_json(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} of {checkpoint.name} holds a {type(value).__name__}, not an object")
    check_keys(name if keys is None else keys, value or {}, f"{name} of {checkpoint.name}")
    return value or {}


def served_name(name: str) -> str:
    """Returns the name by which a model is served: of a local path the last part, any other name as it is."""
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
    """Returns the checkpoint called `name`: a local folder, a .gguf file, a built-in name, or a hub id, in this order.

    revision     the branch, tag or commit of a hub id
    load_format  "dummy": random weights; `name` may then also be one of GEOMETRIES, and a folder
                 needs only its config.json
    weights      False: for a hub id, only the small files (config, tokenizer) are downloaded
    mmproj       the GGUF file of the tower that belongs to a GGUF file. Where it lies beside that file in a folder of
                 its own, the folder's name is enough
    context_length  tokens of the longest sequence; None: what the model was made for
    notify       called with one line before something is downloaded

    Raises CheckpointError, which says what was looked for.
    """
    return _resolve(name, revision, load_format, weights, mmproj, notify).within(context_length)


def _resolve(
    name: str, revision: str | None, load_format: str, weights: bool, mmproj: str | None, notify: Callable[[str], None]
) -> Checkpoint:
    """Returns the result of `resolve`, with the context that the model was made for."""
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
            checkpoint.__dict__["gguf"] = file  # the file is read already, so the cached property is filled
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
                raise CheckpointError(f"{path} has no {inner}/config.json with an object, where its model is described")
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
        raise CheckpointError(f"{path} holds {len(files)} .gguf files; name one: {', '.join(f.name for f in files)}")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(_of_adapter(path))
    raise CheckpointError(f"{path} holds neither a config.json nor a .gguf file")


def _tower_in(path: Path) -> GGUFFile | None:
    """Returns the GGUF file where it holds a tower."""
    try:
        file = GGUFFile(path)
    except CheckpointError:
        return None
    return None if _joining(file) is None else file


def _joining(file: GGUFFile) -> Callable[[Settings, GGUFFile], Settings] | None:
    """Returns the entry of TOWERS for a GGUF file; None where it holds no tower."""
    load_plugins()
    return TOWERS.get(str(file.metadata.get("general.architecture")))


def _with_tower(checkpoint: Checkpoint, tower: GGUFFile) -> Checkpoint:
    """Returns the checkpoint of a GGUF file with its tower. Raises CheckpointError where they do not fit."""
    if checkpoint.gguf is None:
        raise CheckpointError(
            f"mmproj (--mmproj) is for GGUF files; {checkpoint.name} is a folder, whose tower lies in the folder"
        )
    join = _joining(tower)
    if join is None:
        kind, names = tower.metadata.get("general.architecture"), " or ".join(map(repr, TOWERS))
        raise CheckpointError(f"{tower.path} is no tower: its architecture is {kind!r}, not {names}")
    joined = replace(checkpoint, config=join(Settings.of(checkpoint.config), tower), mmproj=tower)
    joined.__dict__["gguf"] = checkpoint.gguf
    return joined


def _of_adapter(path: Path) -> str:
    """Returns the message for the folder of a LoRA adapter that is given in place of a model's."""
    settings = read_json(path / "adapter_config.json")
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    model = base if isinstance(base, str) and base else "MODEL"
    return (
        f"{path} is a LoRA adapter, not a model; give the model it was made for, and the adapter beside it: "
        f'LLM("{model}", adapters={{"NAME": "{path}"}}) and adapter="NAME" (-m {model} --adapter NAME={path})'
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a checkpoint. Raises CheckpointError, naming the file, if it cannot be read.

    A number that JSON has no form for is an object, as transformers 5 writes it: {"__float__": "Infinity"}.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_tagged)
    except (ValueError, RecursionError) as error:  # it is not JSON, not UTF-8, or nested without end
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _tagged(value: dict[str, Any]) -> Any:
    """Return the number that an object stands for, or the object."""
    tag = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tag, value) if isinstance(tag, str) else value


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    """Returns the folder of a hub repository: from the hub, or from the local cache where the hub does not answer."""
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
