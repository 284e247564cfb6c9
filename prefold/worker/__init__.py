"""The worker: everything that needs torch at run time. It owns a device, the model on it and the K/V there."""
