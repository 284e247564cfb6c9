"""A simulator of a fleet: the real window, router, scheduler and cache, over workers that return times. No torch."""
