"""The room of looped models: families, visits, routes and exits, with a scheduler, a cache and a part of the worker.

Only `model`, `gate`, `exits`, `router`, `routed_model`, `visits`, `noise`, `rounds` and `worker` import torch.
"""
