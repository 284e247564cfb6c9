"""The executor of GPUs and of training, and of dtypes and models that the compiled kernels do not know: tensors of
PyTorch."""
