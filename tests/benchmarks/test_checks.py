"""Test that the benchmark of check costs measures every variant; its times mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs.children import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "python" / "checks.py"


def test_every_variant_is_measured(tmp_path):
    pytest.importorskip("monai")
    written = tmp_path / "checks.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(written)]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, timeout=120)
    rows = {row["variant"]: row for row in json.loads(written.read_text())["rows"]}
    assert len(rows) == 6
    assert "all on" in rows
    assert "all off" in rows
    assert all(row["step"]["rounds"] == 2 for row in rows.values())
