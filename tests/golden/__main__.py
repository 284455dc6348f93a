"""Write the golden files again: python -m tests.golden."""

import os
import sys
from pathlib import Path

import pytest

from tests.golden import WRITE

if __name__ == "__main__":
    os.environ[WRITE] = "1"
    here = Path(__file__).parent
    sys.exit(pytest.main(["-n", "0", str(here), str(here.parent / "refused" / "test_refused.py")]))
