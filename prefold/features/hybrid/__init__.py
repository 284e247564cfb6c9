"""The room of hybrids: models with layers whose state runs along the sequence. States hang on nodes of the trie.

Only `carry`, `delta`, `layers`, `model` and `worker` import torch.
"""
