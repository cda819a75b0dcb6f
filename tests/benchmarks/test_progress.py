"""Test that the benchmark of MPI progress measures every way; its times mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "python" / "progress.py"

pytestmark = pytest.mark.skipif(available()[0].name == "gloo", reason="there is no MPI")


def test_every_way_is_measured(tmp_path):
    written = tmp_path / "progress.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(written)]
    command += ["--mpi", available()[0].name]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, timeout=120)
    rows = json.loads(written.read_text())["rows"]
    assert {row["way"] for row in rows} == {"off", "calls"}
    assert {row["calls"] for row in rows} == {1, 4, 16, 64}
    assert all(row["wait"]["min"] >= 0 and row["wait"]["rounds"] == 2 for row in rows)
