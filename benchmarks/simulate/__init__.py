"""The fleet simulator: `python -m benchmarks.simulate --help`."""
