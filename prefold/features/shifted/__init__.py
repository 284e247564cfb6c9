"""Reuse at other positions: the K/V of a chunk of text is copied, with rotated keys, to its position in another prompt.

Only `worker` imports torch.
"""
