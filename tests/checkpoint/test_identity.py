"""Which model a checkpoint is: by its files, and of the weights by blocks all over each file."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from prefold.checkpoint.identity import folder_digest

MB = 1 << 20


@pytest.mark.parametrize("size", [1000, 9 * MB])
def test_other_weights_of_the_same_size_are_another_model(tmp_path, size):
    weights = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    found = set()
    for change in (0, 0, 1):  # the second is the first again
        (tmp_path / "model.safetensors").write_bytes((weights + change).tobytes())
        found.add(folder_digest(tmp_path))
    weights[-1] += 1
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    found.add(folder_digest(tmp_path))
    assert len(found) == 3


def test_read_whole_one_weight_makes_another_model(tmp_path):
    """Blocks would not show it."""
    weights = np.zeros(9 * MB, np.uint8)
    blocks, whole = set(), set()
    for number in (0, 1):
        weights[100_000] = number
        (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
        blocks.add(folder_digest(tmp_path))
        whole.add(folder_digest(tmp_path, lambda path: hashlib.blake2b(path.read_bytes()).hexdigest()))
    assert len(blocks) == 1 and len(whole) == 2


def test_settings_and_single_files(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"a" * 100)
    whole, alone = folder_digest(tmp_path), folder_digest(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert folder_digest(tmp_path) != whole
    (tmp_path / "model.gguf").write_bytes(b"b" * 100)
    assert folder_digest(tmp_path / "model.gguf") != alone


def test_another_text_of_any_chat_template_is_another_model(tmp_path):
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("one")
        before = folder_digest(tmp_path)
        path.write_text("two")
        assert folder_digest(tmp_path) != before
    path.rename(path.with_name("rag.jinja"))  # a file that is another template, or lies elsewhere, is another
    renamed = folder_digest(tmp_path)
    (path.parent / "rag.jinja").rename(tmp_path / "rag.jinja")
    assert folder_digest(tmp_path) != renamed != before


def test_the_digest_that_journals_have_is_that_of_bare_names_in_the_order_of_paths(tmp_path):
    content = hashlib.blake2b(digest_size=8)
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense.json", "config.json", "tokenizer.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{{{name}}}")
        content.update(f"{path.name} {path.stat().st_size}\n{{{name}}}".encode())
    assert folder_digest(tmp_path) == content.hexdigest()
