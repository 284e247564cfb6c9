"""The room of reuse at other positions: chunks of text whose K/V is copied, rotated, to where another prompt has them.

Only `worker` imports torch.
"""
