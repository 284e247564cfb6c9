"""Scheduling: which rows a step computes, and the messages for the workers. Plain Python and NumPy, never torch."""
