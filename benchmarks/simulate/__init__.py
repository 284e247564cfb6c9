"""Other systems in the simulator, and tables that hold ours against them: `python -m benchmarks.simulate --help`."""
