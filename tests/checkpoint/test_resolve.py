"""Names become checkpoints; what cannot be found says what was looked for."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from prefold.checkpoint import BUILT_IN, GEOMETRIES, Checkpoint, resolve
from prefold.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    (path / "modules.json").write_text("[]")
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An offline hub cache that holds owner/cached at branch main."""
    import huggingface_hub.constants as constants

    repository = tmp_path / "hub" / "models--owner--cached"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    (snapshot / "config.json").write_text(json.dumps({"hidden_size": 9}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_folder(folder):
    checkpoint = resolve(str(folder))
    assert (checkpoint.format, checkpoint.path, checkpoint.config["hidden_size"]) == ("folder", folder, 8)
    assert checkpoint.read_json("modules.json") == []
    assert checkpoint.read_json("absent.json") is None
    assert checkpoint.file("config.json") == folder / "config.json"
    assert checkpoint.gguf is None
    assert checkpoint.metadata("general.architecture") is None


def test_dummy_of_a_folder_keeps_its_files(folder):
    checkpoint = resolve(str(folder), load_format="dummy")
    assert checkpoint.format == "dummy"
    assert checkpoint.read_json("modules.json") == []


def test_dummy_of_a_geometry():
    for name, config in GEOMETRIES.items():
        checkpoint = resolve(name, load_format="dummy")
        assert (checkpoint.format, checkpoint.path, checkpoint.config) == ("dummy", None, config)
    assert checkpoint.file("tokenizer.json") is None


def test_dummy_of_a_config():
    config = {"hidden_size": 4}
    checkpoint = Checkpoint.dummy(config)
    config["hidden_size"] = 5
    assert checkpoint.config == {"hidden_size": 4}


def test_a_cached_hub_id_works_offline(hub):
    checkpoint = resolve("owner/cached")
    assert checkpoint.path == hub
    assert checkpoint.config["hidden_size"] == 9
    assert resolve("owner/cached", weights=False).path == hub


def test_a_hub_id_that_is_not_cached_offline(hub):
    with pytest.raises(CheckpointError, match="cannot reach the Hugging Face hub for 'owner/other'"):
        resolve("owner/other")
    with pytest.raises(CheckpointError, match="not in the local cache"):
        resolve("owner/cached", revision="other")


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "a/b/c", "models/x.gguf", "/no/such/model.gguf"])
def test_unknown_names_say_what_was_looked_for(name):
    with pytest.raises(CheckpointError, match=r"no such folder or \.gguf file.*smollm2-135m.*owner/name"):
        resolve(name)


def test_geometries_are_only_for_random_weights(hub):
    with pytest.raises(CheckpointError, match="no model 'qwen3-8b'"):
        resolve("qwen3-8b")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"neither a config\.json nor a \.gguf file"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"a.gguf": "", "b.gguf": ""}, r"contains 2 \.gguf files.*a\.gguf, b\.gguf"),
    ],
)
def test_bad_folders(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        resolve(str(tmp_path))


def test_other_bad_input(folder):
    with pytest.raises(CheckpointError, match=r"not a \.gguf file"):
        resolve(str(folder / "config.json"))
    with pytest.raises(CheckpointError, match="revision"):
        resolve(str(folder), revision="main")
    with pytest.raises(CheckpointError, match="load_format"):
        resolve(str(folder), load_format="pickle")
    with pytest.raises(CheckpointError, match="empty"):
        resolve("")


def test_nothing_here_imports_torch():
    code = "import sys, prefold.checkpoint, prefold.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_built_in_model_resolves():
    checkpoint = resolve("smollm2-135m")
    assert checkpoint.format == "gguf"
    assert checkpoint.path.stat().st_size == BUILT_IN["smollm2-135m"].size
    wanted = {k: v for k, v in GEOMETRIES["smollm2-135m"].items() if k not in ("rope_theta", "rms_norm_eps")}
    assert wanted.items() <= checkpoint.config.items()
    assert checkpoint.config["rope_parameters"]["rope_theta"] == GEOMETRIES["smollm2-135m"]["rope_theta"]
    assert checkpoint.metadata("tokenizer.ggml.pre") == "smollm"


def test_the_folder_of_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter, not a model; .*-m org/base --adapter NAME="):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        resolve(str(tmp_path))


def test_numbers_that_json_has_no_form_for(tmp_path):
    """As transformers 5 writes them."""
    limits = [{"__float__": name} for name in ("Infinity", "-Infinity", "NaN", "0", 5)] + [{"__float__": "NaN", "a": 1}]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "time_step_limit": limits}))
    high, low, nan, *others = resolve(str(tmp_path)).config["time_step_limit"]
    assert (high, low, nan != nan) == (math.inf, -math.inf, True) and others == limits[3:]
