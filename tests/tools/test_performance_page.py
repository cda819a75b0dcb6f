"""Test that docs/performance.md agrees with benchmarks/results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_results():
    script = ROOT / "benchmarks" / "python" / "tables.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, check=True)
    assert (ROOT / "docs" / "performance.md").read_bytes() == made.stdout


def test_results_have_a_line_for_each_row():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        lists = [value for value in result.values() if isinstance(value, list)]
        rows = [each for each in lists if any(isinstance(row, dict) for row in each)]
        lines = len(result) + sum(len(each) + 1 for each in rows)
        assert path.read_text().count("\n") == lines + 2, path.name
