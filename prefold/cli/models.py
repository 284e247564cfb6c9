"""`prefold models`: list supported models and formats."""

from __future__ import annotations

import click

from .options import command, plugin_option


@command(short_help="List supported models and formats.")
@plugin_option
def models() -> None:
    """List built-in models, supported architectures, RoPE types and formats, and the compiled kernels."""
    for name, lines in sections():
        click.echo(click.style(name, bold=True))
        for line in lines:
            click.echo(f"  {line}")


def sections() -> list[tuple[str, list[str]]]:
    """Return (heading, lines) of each section."""
    from ..checkpoint import BUILT_IN, GEOMETRIES
    from ..kernels import foreseen
    from ..model import fallbacks, supported_architectures
    from ..model.decoders import ROPE_KINDS

    formats = [
        "a Hugging Face folder or hub id, with safetensors (sentence-transformers folders too)",
        "a GGUF file",
        "random weights of a model's shape: --load-format dummy",
    ]
    return [
        ("Built-in models (--model NAME)", [f"{name:<14}{model.about}" for name, model in BUILT_IN.items()]),
        ("Architectures", [*supported_architectures(), *fallbacks()]),
        ("RoPE types", [", ".join(ROPE_KINDS)]),
        ("Formats", formats),
        (
            "Shapes for --load-format dummy, besides any model (without a tokenizer: they accept only token ids)",
            [", ".join(GEOMETRIES)],
        ),
        ("CPU kernels", [foreseen()]),
    ]
