"""Looped models: families, visits, routes and exits, with a scheduler, a cache and a part of either worker.

Only `model`, `train` and `worker` import torch.
"""
