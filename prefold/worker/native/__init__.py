"""The executor of a CPU: one call into the compiled kernels runs a step's program, over NumPy memory. No PyTorch."""
