"""The states that the native executor keeps for a hybrid: of paths of row streams, and of slots."""

from __future__ import annotations
