import sys
from pathlib import Path

# `benchmarks` lies beside the package, and is not installed with it.
sys.path.insert(0, str(Path(__file__).parents[2]))
