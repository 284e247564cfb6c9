"""The worker: everything that needs torch at run time. It owns a device, the model on it and the K/V there.

What comes in are messages, lists and NumPy arrays; here, and nowhere else, they become tensors, and what is read of
tensors becomes arrays again. `engine/worker.py` defines the protocol.
"""
