"""The room of models that transformers' own modules compute: any causal model that prefold has no family for.

Attention is ours, over rows and slots, and so are the products of linears; norms, positions and all else is
transformers'. A model is taken when a check at load finds that rows of a trie give what whole prompts give.

Only `attach` and `config` do not import torch.
"""
