"""`python -m prefold`: the command line."""

from .cli import main

main()
