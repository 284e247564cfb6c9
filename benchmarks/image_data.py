"""What the benchmarks of images are made of: towers with random weights, drawings, and how alike two answers are."""

from __future__ import annotations

import numpy as np
import torch

from prefold.images.config import TowerConfig
from prefold.images.tower import Tower
from prefold.model import CausalLM, ModelConfig

SHAPES = {
    "smolvlm-256m": {
        "hidden": 768, "layers": 12, "heads": 12, "intermediate": 3072, "image_size": 512, "patch_size": 16,
    },
    "gemma3-4b": {
        "hidden": 1152, "layers": 27, "heads": 16, "intermediate": 4304, "image_size": 896, "patch_size": 14,
    },
}  # fmt: skip

# What transformers says of google/gemma-3-4b-it.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 896, "patch_size": 14,
    },
}  # fmt: skip


def random_model(config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    """A text model with random weights, packed as one that is loaded: each linear at once, so that it is never there
    twice. Embeddings are small, or else each token would have itself as its most likely successor; the final norm makes
    up for it in the logits."""
    from prefold.kernels import PanelPool
    from prefold.model.layers import Linear

    model, small = CausalLM(config, dtype=dtype, device=torch.device("cpu")).eval(), 0.1
    pool = PanelPool()
    with torch.no_grad():
        model.embedding.normal_(std=small * config.hidden**-0.5)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                elif parameter is not model.embedding:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
            if isinstance(module, Linear):
                module.pack(pool)
        model.norm.weight.fill_(1 / small)
    model.may_pack = True
    return model


def random_tower(config: TowerConfig, dtype: torch.dtype) -> Tower:
    """A tower with random weights, packed as one that is loaded."""
    from prefold.model.layers import Linear

    tower = Tower(config, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)
    for module in tower.modules():
        if isinstance(module, Linear):
            module.pack()
    return tower.eval()


def drawing(name: str, height: int, width: int) -> np.ndarray:
    """A picture of a size, a function of its name: waves of three colours, uint8 [height, width, 3]."""
    rng = np.random.default_rng(list(name.encode()))
    down, across = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = rng.uniform(0.005, 0.1, (3, 2)).astype(np.float32)
    return np.stack([(np.sin(a * down + b * across) * 120 + 128).astype(np.uint8) for a, b in waves], -1)


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1: of the longest common subsequence of words (Lin 2004)."""
    a, b = answer.lower().split(), reference.lower().split()
    lengths = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, lengths[j] = lengths[j], before + 1 if word == other else max(lengths[j], lengths[j - 1])
    common = lengths[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0
