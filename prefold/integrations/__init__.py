"""prefold inside other people's programs. Each module needs that program, and an extra of its name."""
