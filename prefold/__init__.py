"""prefold: batch inference over causal transformers that computes every shared prefix once."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str):
    # `import prefold` and the command line stay fast: torch is imported with the first LLM.
    if name == "LLM":
        from .llm import LLM

        return LLM
    raise AttributeError(f"module 'prefold' has no attribute {name!r}")
