"""prefold inside other programs. Each module needs its program, and usually an extra of the same name."""
