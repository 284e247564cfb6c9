"""Rotary settings out of a Hugging Face config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.settings import MOST_POSITIONS, Settings
from ..errors import UnsupportedModelError
from .config import RopeConfig


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Returns rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    hf = Settings.of(hf)
    scaling, parameters = hf.settings("rope_scaling"), hf.settings("rope_parameters")
    given = scaling or parameters
    kind = given.text("rope_type", None) or given.text("type", "default")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rotary settings that differ from layer to layer are not supported")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"the rope type {kind!r} is not supported; these are: {', '.join(list(ROPE_KINDS)[:-1])}"
        )
    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; all of a head is rotated")
    theta = given.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    return RopeConfig(kind, float(theta), ROPE_KINDS[kind](hf, given))


def _linear_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    return {"factor": given.number("factor")}


def _llama3_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    numbers = {key: given.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise given.wrong("high_freq_factor", f"more than low_freq_factor, {numbers['low_freq_factor']}")
    return numbers | {"original_max_position_embeddings": _trained_positions(hf, given)}


def _yarn_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    theta = given.number("rope_theta", None) or hf.number("rope_theta", 10000.0)
    if theta <= 1:
        raise (given if "rope_theta" in given else hf).wrong("rope_theta", "more than 1 with yarn")
    trained = _trained_positions(hf, given)
    return {
        "factor": given.number("factor", None) or hf.size("max_position_embeddings", most=MOST_POSITIONS) / trained,
        "original_max_position_embeddings": trained,
        "attention_factor": given.number("attention_factor", None),
        "beta_fast": given.number("beta_fast", 32),
        "beta_slow": given.number("beta_slow", 1),
        "mscale": given.number("mscale", None, zero=True),
        "mscale_all_dim": given.number("mscale_all_dim", None, zero=True),
        "truncate": given.flag("truncate", True),
    }


def _factors_rope(hf: Settings, given: Settings) -> dict[str, Any]:
    return {"factors": given.numbers("factors")}


def _trained_positions(hf: Settings, given: Settings) -> int:
    """Returns how many positions the model was trained on, before its context was made longer."""
    key, most = "original_max_position_embeddings", MOST_POSITIONS
    trained = hf.size(key, None, most=most) or given.size(key, None, most=most)
    return trained or hf.size("max_position_embeddings", most=most)


# What reads the settings of each rotary kind; the last one, a divisor for every frequency, is in GGUF files only.
ROPE_KINDS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda hf, given: {},
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "factors": _factors_rope,
}
