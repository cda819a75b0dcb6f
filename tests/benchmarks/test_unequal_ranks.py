"""Test that the benchmark of unequal ranks measures its axes; its times mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs.children import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "python" / "unequal_ranks.py"


@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2,
    reason="binds two ranks to two cores",
)
def test_all_axes_are_measured(tmp_path):
    written = tmp_path / "unequal.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(written)]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, timeout=200)
    rows = json.loads(written.read_text())["rows"]
    assert [row["axis"] for row in rows] == ["depth", "channel"]
    for row in rows:
        assert sum(row["even"]["sizes"]) == sum(row["balanced"]["sizes"])
        assert min(*row["even"]["busy"], *row["balanced"]["busy"], row["ideal"]) > 0
        searched = [each["sizes"] for each in row["search"]]
        assert row["even"]["sizes"] == searched[0]
        assert row["balanced"]["sizes"] in searched
