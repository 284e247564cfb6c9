import sys
from pathlib import Path

# Helpers shared by the tests (`tiny`) lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))
