"""A simulator of a fleet: the real window and router, over workers that return times. No torch."""
