"""Runs prefold inside other programs. Each module needs that program, and an extra of its name."""
