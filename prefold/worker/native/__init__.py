"""The executor for CPUs: a step is one call into the compiled kernels, over NumPy memory. Imports no torch."""
