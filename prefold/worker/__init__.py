"""Workers own a device, a model on it and its K/V, and run steps. `engine/worker.py` defines the protocol.

`native` and `torch` are the two executors. The other files are what both use: the choice between them (`loading`),
ranks, and read-outs, sampling and pooling over the arrays of either (`arrays`). Messages, lists and NumPy arrays come
in, and NumPy arrays go out.
"""
