"""Scheduling: which rows a step computes, and the messages that say so. Plain Python and NumPy, never torch."""
