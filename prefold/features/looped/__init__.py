"""The room of looped models: families, visits, routes and exits, with a scheduler, a cache and a part of the worker.

Only `model`, `gates`, `train` and `worker` import torch.
"""
