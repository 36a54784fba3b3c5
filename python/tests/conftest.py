import sys
from pathlib import Path

# For the processes that tests start, which do not read this.
sys.path.insert(0, str(Path(__file__).parent))
