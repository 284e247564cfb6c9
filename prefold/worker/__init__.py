"""Workers: each owns a device, a model on the device, and its K/V, and runs steps.

`engine/worker.py` defines the worker protocol. `native` and `torch` are the two executors. The other files are shared:
`loading` chooses the executor; the rest is ranks, read-outs, sampling and pooling, written against `arrays`. A worker
receives messages, lists and NumPy arrays, and returns NumPy arrays.
"""
