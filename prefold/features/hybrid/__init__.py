"""Hybrids: models with recurrent layers, which carry a state along the sequence. States are stored by trie node.

Only `carry`, `layers` and `worker` import torch.
"""
