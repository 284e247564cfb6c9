"""The executor of GPUs, of training, and of what the native executor lacks: PyTorch."""
