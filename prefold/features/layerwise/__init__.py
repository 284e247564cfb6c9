"""Models larger than memory: all rows of a window go through one layer after the other, whose weights are read once."""
