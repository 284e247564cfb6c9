"""The executor for GPUs, for training, and for dtypes and models without compiled kernels: PyTorch tensors."""
