"""The room of mixtures of experts: families, and the MLP of which each row goes through some parts.

Only `mlp` imports torch.
"""

from .families import ExpertsConfig, mixture

__all__ = ["ExpertsConfig", "mixture"]
