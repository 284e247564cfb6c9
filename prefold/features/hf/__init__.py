"""Models computed by transformers' own modules: any causal model that has no prefold family.

prefold computes attention, over rows and slots, and the products of linears. transformers' modules compute the rest,
such as norms and positions. A model is accepted if a check at load finds the same results for rows of a trie and for
whole prompts.

Only `attach` and `config` do not import torch.
"""
