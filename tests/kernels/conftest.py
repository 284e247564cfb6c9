"""Machines without a compiler."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine without a compiler. It has the packages in the set that this is: none at first."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    packages = set()
    monkeypatch.setattr("prefold.kernels.compile.find_spec", lambda package: package in packages or None)
    return packages
