"""Models larger than memory: all rows of a window pass one layer, then the next, so weights are read once a window."""
