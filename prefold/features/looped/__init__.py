"""Looped models: families, visits, routes and exits. Each worker and the engine have a part for them.

Only `model`, `train` and `worker` import torch.
"""
