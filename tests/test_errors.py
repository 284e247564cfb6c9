"""Errors come out of another process as they went in."""

from __future__ import annotations

import copy
import pickle

import pytest

from prefold import errors

MADE = {
    "InputError": errors.InputError("it is wrong", field="a", remedy="do better", code="bad"),
    "MissingExtraError": errors.MissingExtraError("ray", "cluster", "a fleet"),
}
KINDS = sorted(name for name in vars(errors) if name[0].isupper())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_an_error_survives_pickling(name, through):
    error = MADE.get(name) or getattr(errors, name)("it is wrong")
    found = through(error)
    assert type(found) is type(error) and str(found) == str(error)
    assert vars(found) == vars(error)
