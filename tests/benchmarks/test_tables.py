"""docs/performance.md says what benchmarks/results holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_results():
    script = ROOT / "benchmarks" / "python" / "tables.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, check=True)
    assert (ROOT / "docs" / "performance.md").read_bytes() == made.stdout
